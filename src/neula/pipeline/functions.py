"""Problems as ``autograd.Function``: of their input, and of what answers.

That is what has been computed already, or where the input is hidden by a transform of ``torch.func`` an
operator of torch (:mod:`neula.pipeline.operators`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch.autograd import Function

from neula.certificates.forward_error import SURE
from neula.engines.formats import in_double
from neula.pipeline import derivatives
from neula.pipeline import spectral_derivatives as spectral
from neula.pipeline.derivatives import for_operand, leading, pushing_forward

Tensors = tuple[torch.Tensor, ...]

Gradients = tuple[torch.Tensor | None, ...]
"""Gradients of the operands; None of those that are not wanted."""

Wanted = Sequence[bool]
"""Which operands want a gradient."""

is_legacy_batch: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
"""Whether a tensor hides a batch of ``torch.autograd.functional``, or of ``is_grads_batched``."""


def no_answer(*inputs: torch.Tensor) -> Any:
    """Placeholder that is never called."""
    raise NotImplementedError


@dataclass(frozen=True)
class Answerer:
    """The function that answers, and the solves that its derivatives need."""

    call: Callable[..., Tensors]  # from the input to the answer, and the evidence, which has no derivatives
    again: Callable[..., Any] = no_answer  # solves, factorizes or multiplies anew
    # Whether the host may read the numbers, so that what has no gradient is an error and not NaN.
    may_raise: bool = True


class Attached(Function):
    """Base of all differentiable problems: outputs with derivatives, then evidence without, and batches."""

    operands = 1
    """Inputs that derivatives are with respect to."""

    answers = 1
    """Outputs that have derivatives."""

    kept = (0, 1)
    """How many inputs, and how many outputs, derivatives need."""

    @staticmethod
    def forward(*inputs: Any) -> Tensors:
        *operands, answerer = inputs
        return answerer.call(*operands)

    @classmethod
    def setup_context(cls, ctx: Any, inputs: Any, output: Tensors) -> None:
        *operands, ctx.answerer = inputs
        evidence = output[cls.answers :]
        ctx.evidence = len(evidence)
        ctx.mark_non_differentiable(*evidence)
        kept = cls.tensors_kept(operands, output)
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @classmethod
    def backward(cls, ctx: Any, *gradients: torch.Tensor) -> Gradients:
        wanted = ctx.needs_input_grad[: cls.operands]
        return *cls.pulled_back(ctx.answerer, wanted, ctx.saved_tensors, *gradients[: cls.answers]), None

    @classmethod
    def jvp(cls, ctx: Any, *changes: torch.Tensor | None) -> Gradients:
        with pushing_forward(ctx) as kept, torch.autocast(kept[0].device.type, enabled=False):
            found = cls.pushed_forward(ctx.answerer, kept, *changes[: cls.operands])
        return *found, *(None,) * ctx.evidence

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *inputs: Any) -> tuple[Tensors, tuple[int, ...]]:
        *operands, answerer = inputs
        found = cls.apply(*leading(operands, in_dims), answerer)
        return found, (0,) * len(found)

    @classmethod
    def tensors_kept(cls, operands: Sequence[torch.Tensor], output: Tensors) -> Tensors:
        """Tensors that derivatives need."""
        inputs, outputs = cls.kept
        return *operands[:inputs], *output[:outputs]

    @classmethod
    def pulled_back(
        cls, answerer: Answerer, wanted: Wanted, kept: Tensors, *gradients: torch.Tensor
    ) -> Gradients:
        """Gradients of the operands, without the caller's autocast."""
        if any(map(is_legacy_batch, gradients)):
            answerer = replace(answerer, may_raise=False)
        with torch.autocast(kept[0].device.type, enabled=False):
            return cls.gradients(answerer, wanted, kept, *gradients)

    @staticmethod
    def gradients(answerer: Answerer, wanted: Wanted, kept: Tensors, *gradients: torch.Tensor) -> Gradients:
        """Gradients of the operands from those of the answers."""
        raise NotImplementedError

    @staticmethod
    def pushed_forward(answerer: Answerer, kept: Tensors, *changes: Any) -> Tensors:
        """Changes of the answers from those of the operands."""
        raise NotImplementedError


class ByFormulas(Attached):
    """Answers of one operand, by formulas of these and of their gradients, or of changes of the operand.

    In the common dtype of all, at least float32: half precision has no triangular solves.
    """

    backward_formula: Callable[..., torch.Tensor]
    forward_formula: Callable[..., Tensors | torch.Tensor]

    @classmethod
    def gradients(
        cls, answerer: Answerer, wanted: Wanted, kept: Tensors, *gradients: torch.Tensor
    ) -> Tensors:
        return (cls.backward_formula(*_at_least_single(*kept, *gradients)).to(kept[0].dtype),)

    @classmethod
    def pushed_forward(cls, answerer: Answerer, kept: Tensors, *changes: Any) -> Tensors:
        found = cls.forward_formula(*_at_least_single(*kept, *changes))
        return tuple(x.to(kept[0].dtype) for x in (found if isinstance(found, tuple) else (found,)))


class QRFunction(ByFormulas):
    """Q and R."""

    answers, kept = 2, (0, 2)
    backward_formula = staticmethod(derivatives.factors_backward)
    forward_formula = staticmethod(derivatives.factors_forward)


class CholeskyFunction(ByFormulas):
    """L."""

    backward_formula = staticmethod(derivatives.cholesky_backward)
    forward_formula = staticmethod(derivatives.cholesky_forward)


class LUFunction(ByFormulas):
    """L and U, without pivoting."""

    answers, kept = 2, (0, 2)
    backward_formula = staticmethod(derivatives.lu_backward)
    forward_formula = staticmethod(derivatives.lu_forward)


class SymmetricFunction(ByFormulas):
    """A Hermitian matrix of which one triangle was read; its gradient is Hermitian, as that of L is."""

    backward_formula = forward_formula = staticmethod(lambda _, change: (change + change.mH) / 2)


class Polar(Attached):
    """The orthogonal or unitary polar factor, and as evidence the ranks of the matrices."""

    kept = (1, 2)

    @staticmethod
    def gradients(answerer: Answerer, wanted: Wanted, kept: Tensors, *gradients: torch.Tensor) -> Tensors:
        (a, u, deficient), (du,) = _of_full_rank(*kept), gradients
        du = torch.where(deficient & (du != 0), math.nan, in_double(du))
        return (derivatives.polar_backward(a, u, du).to(kept[0].dtype),)

    @staticmethod
    def pushed_forward(answerer: Answerer, kept: Tensors, *changes: Any) -> Tensors:
        a, u, deficient = _of_full_rank(*kept)
        du = derivatives.polar_forward(a, u, in_double(changes[0]))
        return (torch.where(deficient, math.nan, du).to(kept[1].dtype),)


class EigenvectorsFunction(Attached):
    """Eigenvalues and eigenvectors, and as evidence bounds on the errors of the eigenvalues."""

    answers = 2
    kept = (0, 3)

    @staticmethod
    def gradients(answerer: Answerer, wanted: Wanted, kept: Tensors, *gradients: torch.Tensor) -> Tensors:
        (w, v, errors), (dw, dv) = map(in_double, kept), map(in_double, gradients)
        negligible = torch.finfo(gradients[1].dtype).eps ** 0.5
        return (spectral.eigenvectors_backward(w, v, errors / SURE, dw, dv, negligible).to(kept[1].dtype),)

    @staticmethod
    def pushed_forward(answerer: Answerer, kept: Tensors, *changes: Any) -> Tensors:
        w, v, errors = map(in_double, kept)
        found = spectral.eigenvectors_forward(w, v, errors / SURE, in_double(changes[0]))
        return tuple(x.to(y.dtype) for x, y in zip(found, kept[:2], strict=True))


class PowerFunction(Attached):
    """A power of a Hermitian matrix, and as evidence its eigenvalues and eigenvectors."""

    kept = (0, 3)

    @staticmethod
    def gradients(answerer: Answerer, wanted: Wanted, kept: Tensors, *gradients: torch.Tensor) -> Tensors:
        x, w, v = map(in_double, kept)
        dx = in_double(gradients[0])
        return (spectral.power_backward(x, w, v, answerer.again(), (dx + dx.mH) / 2).to(kept[0].dtype),)

    @staticmethod
    def pushed_forward(answerer: Answerer, kept: Tensors, *changes: Any) -> Tensors:
        x, w, v = map(in_double, kept)
        da = in_double(changes[0])
        return (spectral.power_forward(x, w, v, answerer.again(), (da + da.mH) / 2).to(kept[0].dtype),)


class TripletsFunction(Attached):
    """U, s and V of the leading singular triplets, and as evidence bounds on the errors of s."""

    answers = 3
    kept = (1, 4)

    @staticmethod
    def gradients(answerer: Answerer, wanted: Wanted, kept: Tensors, *gradients: torch.Tensor) -> Tensors:
        a, u, s, v, errors = map(in_double, kept)
        du, ds, dv = map(in_double, gradients)
        negligible = torch.finfo(gradients[0].dtype).eps ** 0.5
        if u.is_complex():
            # The common phase of a pair of vectors is arbitrary: a loss that depends on it has no gradient.
            moved = (u.conj() * du).sum(-2) + (v.conj() * dv).sum(-2)
            sizes = torch.linalg.vector_norm(du, dim=-2) + torch.linalg.vector_norm(dv, dim=-2)
            ill_defined = moved.imag.abs() > negligible * sizes
            du = torch.where(ill_defined.unsqueeze(-2), math.nan, du)
        found = spectral.triplets_backward(a, (u, s, v), errors / SURE, (du, ds, dv), negligible)
        return (found.to(kept[0].dtype),)

    @staticmethod
    def pushed_forward(answerer: Answerer, kept: Tensors, *changes: Any) -> Tensors:
        a, u, s, v, errors = map(in_double, kept)
        found = spectral.triplets_forward(a, (u, s, v), errors / SURE, in_double(changes[0]))
        return tuple(x.to(y.dtype) for x, y in zip(found, kept[1:4], strict=True))


class SVDFunction(TripletsFunction):
    """U, s and V^H of all singular triplets, and as evidence bounds on the errors of s."""

    @staticmethod
    def gradients(answerer: Answerer, wanted: Wanted, kept: Tensors, *gradients: torch.Tensor) -> Tensors:
        (a, u, s, vh, errors), (du, ds, dvh) = kept, gradients
        return TripletsFunction.gradients(answerer, wanted, (a, u, s, vh.mH, errors), du, ds, dvh.mH)

    @staticmethod
    def pushed_forward(answerer: Answerer, kept: Tensors, *changes: Any) -> Tensors:
        a, u, s, vh, errors = kept
        du, ds, dv = TripletsFunction.pushed_forward(answerer, (a, u, s, vh.mH, errors), *changes)
        return du, ds, dv.mH


def _of_full_rank(a: torch.Tensor, u: torch.Tensor, ranks: torch.Tensor) -> Tensors:
    """A and U in double precision, where they have a gradient, and where not; there any others will do."""
    deficient = (ranks.to(a.device) < min(a.shape[-2:]))[..., None, None]
    instead = torch.eye(*a.shape[-2:], dtype=torch.float64, device=a.device)
    return *(torch.where(deficient, instead, in_double(x)) for x in (a, u)), deficient


class LogDeterminant(Attached):
    """``log |det A|``, whose gradient is ``A^-H``, or ``log det A``, if the answer is complex."""

    kept = (1, 1)

    @staticmethod
    def gradients(answerer: Answerer, wanted: Wanted, kept: Tensors, *gradients: torch.Tensor) -> Tensors:
        return (gradients[0][..., None, None] * answerer.again(kept[0]).mH,)

    @staticmethod
    def pushed_forward(answerer: Answerer, kept: Tensors, *changes: Any) -> Tensors:
        change = (answerer.again(kept[0]).mT * changes[0]).sum((-2, -1))
        return (change if kept[1].is_complex() else change.real,)


class LinearSystem(Attached):
    """x of ``A x = b``."""

    operands = 2
    kept = (2, 1)

    @staticmethod
    def gradients(answerer: Answerer, wanted: Wanted, kept: Tensors, *gradients: torch.Tensor) -> Gradients:
        (a, b, x), (dx,) = kept, gradients
        da, db = derivatives.system_backward(a, x, dx, answerer.again)
        return for_operand(da, a) if wanted[0] else None, for_operand(db, b)

    @staticmethod
    def pushed_forward(answerer: Answerer, kept: Tensors, *changes: Any) -> Tensors:
        (a, _, x), (da, db) = kept, changes
        return (derivatives.system_forward(a, x, da, db, answerer.again).to(x.dtype),)


class Solution(Attached):
    """x of least squares, and as evidence the ranks of the matrices."""

    operands = 2
    kept = (2, 2)

    @staticmethod
    def gradients(answerer: Answerer, wanted: Wanted, kept: Tensors, *gradients: torch.Tensor) -> Tensors:
        (a, b, x, ranks), (dx,) = kept, gradients
        deficient = (ranks.to(a.device) < min(a.shape[-2:]))[..., None, None]
        if answerer.may_raise:
            _refuse_where(deficient[..., 0, 0] & (dx != 0).flatten(-2).any(-1), ranks, a.shape)
        # Their gradients are zero and not needed: those of any matrix of full rank will do.
        instead = torch.eye(*a.shape[-2:], dtype=a.dtype, device=a.device)
        pairs = (instead, a), (0.0, b), (0.0, x)
        full, rhs, y = (in_double(torch.where(deficient, t, u)) for t, u in pairs)
        # Where somebody does and this is not an error, they are NaN.
        dx = torch.where(deficient & (dx != 0), math.nan, in_double(dx))
        da, db = derivatives.solution_backward(full, rhs, y, dx, answerer.again)
        return for_operand(da, a), for_operand(db, b)

    @staticmethod
    def pushed_forward(answerer: Answerer, kept: Tensors, *changes: Any) -> Tensors:
        (*_, x, ranks), (da, db) = kept, changes
        a, b, wide = map(in_double, kept[:3])
        deficient = (ranks.to(a.device) < min(a.shape[-2:]))[..., None, None]
        dx = derivatives.solution_forward(a, b, wide, da, db, answerer.again)
        return (torch.where(deficient, math.nan, dx).to(x.dtype),)


def _refuse_where(refused: torch.Tensor, ranks: torch.Tensor, shape: torch.Size) -> None:
    if not bool(refused.any()):
        return
    index = refused.nonzero()[0].tolist()
    name = f"A[{', '.join(map(str, index))}]" if index else "A"
    raise ValueError(
        f"{name} has rank {int(ranks[tuple(index)])}, not {min(shape[-2:])}, and the solution has no "
        "gradient where the rank can change: leave dependent columns out, or pass damp="
    )


class ProductFunction(Attached):
    """A B."""

    operands = 2
    kept = (2, 0)

    @staticmethod
    def gradients(answerer: Answerer, wanted: Wanted, kept: Tensors, *gradients: torch.Tensor) -> Gradients:
        (a, b), (dc,), (for_a, for_b) = kept, gradients, wanted
        return derivatives.product_backward(a, b, dc, answerer.again, (for_a, for_b))

    @staticmethod
    def pushed_forward(answerer: Answerer, kept: Tensors, *changes: Any) -> Tensors:
        (a, b), (da, db) = kept, changes
        return (derivatives.product_forward(a, b, da, db, answerer.again),)


def _at_least_single(*tensors: torch.Tensor) -> Tensors:
    """Tensors in their common dtype, at least float32."""
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)
    return tuple(x.to(dtype) for x in tensors)
