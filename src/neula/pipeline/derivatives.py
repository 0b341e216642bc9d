"""Problems as ``autograd.Function``: of their input, and of what answers.

That is what has been computed already, or where the input is hidden by a transform of ``torch.func`` an
operator of torch (:mod:`neula.pipeline.operators`). Formulas take answers, and gradients of a loss with
respect to them or changes of the input, for real and complex numbers. All are differentiable operations, so
that gradients have gradients, too. The gradient of a real loss L with respect to a complex number z is
``dL/dRe z + i dL/dIm z``, as in torch: a change of the input changes L by the real part of its inner product
with the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch.autograd import Function, forward_ad

from neula.engines.formats import in_double
from neula.kernels.cholesky.symmetric import hermitian_from_lower
from neula.kernels.polar.svd import converged_eigh
from neula.kernels.precision import exact_matmul

Tensor = torch.Tensor
Tensors = tuple[Tensor, ...]

Gradients = tuple[Tensor | None, ...]  # gradients of the operands; None of those that are not wanted
Wanted = Sequence[bool]  # which operands want a gradient
Factorize = Callable[[Tensor], Iterable[Tensor]]  # differentiable ``A -> Q, R`` in double precision

is_legacy_batch: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
"""Whether a tensor hides a batch of ``torch.autograd.functional``, or of ``is_grads_batched``."""

solve_triangular = torch.linalg.solve_triangular


def no_answer(*inputs: Tensor) -> Any:
    raise NotImplementedError


@dataclass(frozen=True)
class PrimalFunction:
    """The function that answers, and the solves that its derivatives need."""

    call: Callable[..., Tensors]  # from the input to the answer, and the evidence, which has no derivatives
    again: Callable[..., Any] = no_answer  # solves, factorizes or multiplies anew
    # Whether the host may read the numbers, so that what has no gradient is an error and not NaN.
    may_raise: bool = True


class Attached(Function):
    """Base of all differentiable problems: outputs with derivatives, then evidence without, and batches."""

    operands = 1  # inputs that derivatives are with respect to
    answers = 1  # outputs that have derivatives
    kept = (0, 1)  # how many inputs, and how many outputs, derivatives need

    @staticmethod
    def forward(*inputs: Any) -> Tensors:
        *operands, primal = inputs
        return primal.call(*operands)

    @classmethod
    def setup_context(cls, ctx: Any, inputs: Any, output: Tensors) -> None:
        *operands, ctx.primal = inputs
        evidence = output[cls.answers :]
        ctx.evidence = len(evidence)
        ctx.mark_non_differentiable(*evidence)
        kept = cls.tensors_kept(operands, output)
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @classmethod
    def backward(cls, ctx: Any, *gradients: Tensor) -> Gradients:
        wanted = ctx.needs_input_grad[: cls.operands]
        return *cls.pulled_back(ctx.primal, wanted, ctx.saved_tensors, *gradients[: cls.answers]), None

    @classmethod
    def jvp(cls, ctx: Any, *changes: Tensor | None) -> Gradients:
        # torch switches forward mode off here, for this level and all around it: tangents would be lost.
        # Switched on again, the formula, which has derivatives in turn, is one of this level's primals.
        with forward_ad._set_fwd_grad_enabled(True):
            kept = tuple(forward_ad.unpack_dual(x).primal for x in ctx.saved_tensors)
            with torch.autocast(kept[0].device.type, enabled=False):
                found = cls.pushed_forward(ctx.primal, kept, *changes[: cls.operands])
        return *found, *(None,) * ctx.evidence

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *inputs: Any) -> tuple[Tensors, tuple[int, ...]]:
        *operands, primal = inputs
        found = cls.apply(*leading(operands, in_dims), primal)
        return found, (0,) * len(found)

    @classmethod
    def tensors_kept(cls, operands: Sequence[Tensor], output: Tensors) -> Tensors:
        inputs, outputs = cls.kept
        return *operands[:inputs], *output[:outputs]

    @classmethod
    def pulled_back(
        cls, primal: PrimalFunction, wanted: Wanted, kept: Tensors, *gradients: Tensor
    ) -> Gradients:
        """Gradients of the operands, without the caller's autocast."""
        if any(map(is_legacy_batch, gradients)):
            primal = replace(primal, may_raise=False)
        with torch.autocast(kept[0].device.type, enabled=False):
            return cls.gradients(primal, wanted, kept, *gradients)

    @staticmethod
    def gradients(primal: PrimalFunction, wanted: Wanted, kept: Tensors, *gradients: Tensor) -> Gradients:
        """Gradients of the operands from those of the answers."""
        raise NotImplementedError

    @classmethod
    def pushed_forward(cls, primal: PrimalFunction, kept: Tensors, *changes: Any) -> Any:
        """Changes of answers from those of operands, None if unchanged; by default, its own adjoint."""
        return cls.gradients(primal, (), kept, *changes)


def leading(operands: Sequence[Tensor], dims: Sequence[int | None]) -> list[Tensor]:
    """Matrices whose hidden dimensions come first, before as many others as the rules of NumPy ask for."""
    dims = dims[: len(operands)]
    most = max(x.ndim - (dim is not None) for x, dim in zip(operands, dims, strict=True))
    found = []
    for x, dim in zip(operands, dims, strict=True):
        if dim is not None:
            x = x.movedim(dim, 0)
            x = x.reshape(x.shape[0], *(1,) * (most + 1 - x.ndim), *x.shape[1:])
        found.append(x)
    return found


class ByFormulas(Attached):
    """Answers of one operand, by formulas of these and of their gradients, or of changes of the operand.

    In the common dtype of all, at least float32: half precision has no triangular solves.
    """

    backward_formula: Callable[..., Tensor]
    forward_formula: Callable[..., Tensors | Tensor]

    @classmethod
    def gradients(cls, primal: PrimalFunction, wanted: Wanted, kept: Tensors, *gradients: Tensor) -> Tensors:
        return (cls.backward_formula(*_at_least_single(*kept, *gradients)).to(kept[0].dtype),)

    @classmethod
    def pushed_forward(cls, primal: PrimalFunction, kept: Tensors, *changes: Any) -> Tensors:
        found = cls.forward_formula(*_at_least_single(*kept, *changes))
        return tuple(x.to(kept[0].dtype) for x in (found if isinstance(found, tuple) else (found,)))


def _at_least_single(*tensors: Tensor) -> Tensors:
    dtype = reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)
    return tuple(x.to(dtype) for x in tensors)


class QRFunction(ByFormulas):
    """Q and R.

    With ``M = R dR^H - dQ^H Q`` and C the Hermitian matrix that has the lower triangle of M, and the real
    part of its diagonal, ``dA = (dQ + Q C) R^-H`` [1]_. Of a wide matrix ``[X, Y] = Q [U, V]``, Q and U are
    the factors of X, and ``V = Q^H Y``. Forward, with ``W = Q^H dA R^-1`` and L its strictly lower triangle,
    ``Q^H dQ = L - L^H + i Im diag(W)`` is skew, and ``dR = (W - Q^H dQ) R`` is upper triangular with a real
    diagonal.

    References
    ----------
    .. [1] S. F. Walter, L. Lehmann, "Algorithmic differentiation of linear algebra functions with application
       in optimum experimental design", 2010; M. Seeger et al., "Auto-differentiating linear algebra", 2017.
    """

    answers, kept = 2, (0, 2)

    @staticmethod
    def backward_formula(q: Tensor, r: Tensor, dq: Tensor, dr: Tensor) -> Tensor:
        k = q.shape[-1]
        if r.shape[-1] > k:
            (u, v), (du, dv) = (x.tensor_split([k], -1) for x in (r, dr))
            dq = dq + exact_matmul(q, exact_matmul(v, dv.mH))
            return torch.cat([QRFunction.backward_formula(q, u, dq, du), exact_matmul(q, dv)], -1)
        m = exact_matmul(r, dr.mH) - exact_matmul(dq.mH, q)
        right = dq + exact_matmul(q, hermitian_from_lower(m))
        return solve_triangular(r.mH, right, upper=False, left=False)

    @staticmethod
    def forward_formula(q: Tensor, r: Tensor, da: Tensor) -> Tensors:
        k = q.shape[-1]
        if r.shape[-1] > k:
            (u, v), (dx, dy) = (x.tensor_split([k], -1) for x in (r, da))
            dq, du = QRFunction.forward_formula(q, u, dx)
            dv = exact_matmul(dq.mH, exact_matmul(q, v)) + exact_matmul(q.mH, dy)
            return dq, torch.cat([du, dv], -1)
        scaled = solve_triangular(r, da, upper=True, left=False)
        w = exact_matmul(q.mH, scaled)
        triangle = w.triu(1) + hermitian_from_lower(w).triu()
        return scaled - exact_matmul(q, triangle), exact_matmul(triangle, r)


class CholeskyFunction(ByFormulas):
    """L of ``A = L L^H``, with a Hermitian gradient of A, as in torch.

    With P the lower triangle of ``L^H dL``, its diagonal halved, ``dA = L^-H (P + P^H) L^-1 / 2`` (I. Murray,
    "Differentiation of the Cholesky decomposition", 2016, formula 10). Forward, with ``M = L^-1 dA L^-H``,
    dL is L times the lower triangle of M, its diagonal halved.
    """

    @staticmethod
    def backward_formula(lower: Tensor, dl: Tensor) -> Tensor:
        symmetric = hermitian_from_lower(exact_matmul(lower.mH, dl.tril()))  # P + P^H
        solve = solve_triangular
        return 0.5 * solve(lower, solve(lower.mH, symmetric, upper=True), upper=False, left=False)

    @staticmethod
    def forward_formula(lower: Tensor, da: Tensor) -> Tensor:
        left = solve_triangular(lower, 0.5 * (da + da.mH), upper=False)
        m = solve_triangular(lower.mH, left, upper=True, left=False)
        return exact_matmul(lower, 0.5 * (m.tril() + m.tril(-1)))


class LUFunction(ByFormulas):
    """L and U, without pivoting: ``dA = L^-H (tril(L^H dL, -1) + triu(dU U^H)) U^-H``.

    Forward, with ``M = L^-1 dA U^-1``, L times the strict lower triangle of M, and the rest of it times U.
    """

    answers, kept = 2, (0, 2)

    @staticmethod
    def backward_formula(lower: Tensor, upper: Tensor, dl: Tensor, du: Tensor) -> Tensor:
        inner = exact_matmul(lower.mH, dl).tril(-1) + exact_matmul(du, upper.mH).triu()
        solve = solve_triangular
        return solve(upper.mH, solve(lower.mH, inner, upper=True), upper=False, left=False)

    @staticmethod
    def forward_formula(lower: Tensor, upper: Tensor, da: Tensor) -> Tensors:
        left = solve_triangular(lower, da, upper=False)
        m = solve_triangular(upper, left, upper=True, left=False)
        return exact_matmul(lower, m.tril(-1)), exact_matmul(m.triu(), upper)


class SymmetricFunction(ByFormulas):
    """A Hermitian matrix of which one triangle was read; its gradient is Hermitian, as that of L is."""

    backward_formula = forward_formula = staticmethod(lambda _, change: (change + change.mH) / 2)


class LogDeterminant(Attached):
    """``log |det A|``, or complex ``log det A``, with the gradient ``A^-H`` (Giles 2008, section 2.2.4)."""

    kept = (1, 1)

    @staticmethod
    def gradients(primal: PrimalFunction, wanted: Wanted, kept: Tensors, *gradients: Tensor) -> Tensors:
        return (gradients[0][..., None, None] * primal.again(kept[0]).mH,)

    @staticmethod
    def pushed_forward(primal: PrimalFunction, kept: Tensors, *changes: Any) -> Tensors:
        change = (primal.again(kept[0]).mT * changes[0]).sum((-2, -1))
        return (change if kept[1].is_complex() else change.real,)


class LinearSystem(Attached):
    """x of ``A x = b``: with ``A^H y = dx``, ``db = y`` and ``dA = -y x^H`` (M. B. Giles, "Collected matrix
    derivative results for forward and reverse mode algorithmic differentiation", 2008, section 2.3.1).
    """

    operands = 2
    kept = (2, 1)

    @staticmethod
    def gradients(primal: PrimalFunction, wanted: Wanted, kept: Tensors, *gradients: Tensor) -> Gradients:
        (a, b, x), (dx,), solve = kept, gradients, primal.again
        y = solve(in_double(a).mH, in_double(dx))
        return for_operand(-y @ in_double(x).mH, a) if wanted[0] else None, for_operand(y, b)

    @staticmethod
    def pushed_forward(primal: PrimalFunction, kept: Tensors, *changes: Any) -> Tensors:
        a, _, x = kept
        return (primal.again(in_double(a), changed_residual(x, *changes)).to(x.dtype),)


class Solution(Attached):
    """x of least squares, and as evidence the ranks of the matrices.

    With ``y = A^+H dx`` it is ``db = y``, and ``dA = (b - A x) z^H - y x^H`` where ``z = A^+ y`` [1]_. Of the
    minimum-norm solution of a wide system, ``dA = w (dx - A^H y)^H - y x^H`` where ``w = A^+H x``. Both are
    computed in double precision through ``A = Q R``, or ``A^H = Q R``. Forward, ``dx = A^+ (db - dA x)``, and
    of a tall matrix ``(A^H A)^-1 dA^H (b - A x)`` more, of a wide one ``(I - A^+ A) dA^H A^+H x``.

    References
    ----------
    .. [1] G. H. Golub, V. Pereyra, "The differentiation of pseudo-inverses and nonlinear least squares
       problems whose variables separate", 1973.
    """

    operands = 2
    kept = (2, 2)

    @staticmethod
    def gradients(primal: PrimalFunction, wanted: Wanted, kept: Tensors, *gradients: Tensor) -> Tensors:
        (given, rhs, y, ranks), (dx,) = kept, gradients
        deficient = _deficient(given, ranks)
        if primal.may_raise:
            _refuse_where(deficient[..., 0, 0] & (dx != 0).flatten(-2).any(-1), ranks, given.shape)
        # Their gradients are zero and not needed: those of any matrix of full rank will do.
        instead = torch.eye(*given.shape[-2:], dtype=given.dtype, device=given.device)
        pairs = (instead, given), (0.0, rhs), (0.0, y)
        a, b, x = (in_double(torch.where(deficient, t, u)) for t, u in pairs)
        # Where this is done and is not an error, they are NaN.
        dx = torch.where(deficient & (dx != 0), math.nan, in_double(dx))
        if a.shape[-2] >= a.shape[-1]:
            q, r, a = _in_dtype_of(x, *primal.again(a), a)
            c = solve_triangular(r.mH, dx, upper=False)
            y, z = q @ c, solve_triangular(r, c, upper=True)
            da = (b - a @ x) @ z.mH - y @ x.mH
        else:
            q, r = _in_dtype_of(x, *primal.again(a.mH))
            c = q.mH @ dx
            y = solve_triangular(r, c, upper=True)
            w = solve_triangular(r.mH, b.to(x.dtype), upper=False)
            da = solve_triangular(r, w, upper=True) @ (dx - q @ c).mH - y @ x.mH
        return for_operand(da, given), for_operand(y, rhs)

    @staticmethod
    def pushed_forward(primal: PrimalFunction, kept: Tensors, *changes: Any) -> Tensors:
        (*_, ranks), (da, db) = kept, changes
        a, b, x = map(in_double, kept[:3])
        rest = changed_residual(x, da, db).to(x.dtype)
        if a.shape[-2] >= a.shape[-1]:
            q, r, a = _in_dtype_of(x, *primal.again(a), a)
            image = q.mH @ rest
            if da is not None:
                image = image + solve_triangular(r.mH, da.to(x.dtype).mH @ (b - a @ x), upper=False)
            dx = solve_triangular(r, image, upper=True)
        else:
            q, r = _in_dtype_of(x, *primal.again(a.mH))
            dx = q @ solve_triangular(r.mH, rest, upper=False)
            if da is not None:
                y = da.to(x.dtype).mH @ solve_triangular(r, q.mH @ x, upper=True)
                dx = dx + y - q @ (q.mH @ y)
        return (torch.where(_deficient(a, ranks), math.nan, dx).to(kept[2].dtype),)


def changed_residual(x: Tensor, da: Tensor | None, db: Tensor | None) -> Tensor:
    """``db - dA x`` in double precision."""
    x = in_double(x)
    change = torch.zeros_like(x[..., :1, :]) if db is None else in_double(db)
    return change if da is None else change - da.to(x.dtype) @ x


def for_operand(gradient: Tensor, operand: Tensor) -> Tensor:
    """A gradient in the shape and the dtype of its operand: of a real one the real part."""
    if gradient.is_complex() and not operand.is_complex():
        gradient = gradient.real
    return gradient.sum_to_size(operand.shape).to(operand)


def _in_dtype_of(x: Tensor, *others: Tensor) -> Tensors:
    """Tensors in the dtype of x: complex ones of a real A with a complex right-hand side."""
    return tuple(y.to(x.dtype) for y in others)


def _deficient(a: Tensor, ranks: Tensor) -> Tensor:
    """Which matrices are not of full rank, shape (..., 1, 1)."""
    return (ranks.to(a.device) < min(a.shape[-2:]))[..., None, None]


def _refuse_where(refused: Tensor, ranks: Tensor, shape: torch.Size) -> None:
    if not bool(refused.any()):
        return
    index = refused.nonzero()[0].tolist()
    name = f"A[{', '.join(map(str, index))}]" if index else "A"
    raise ValueError(
        f"{name} has rank {int(ranks[tuple(index)])}, not {min(shape[-2:])}, and the solution has no "
        "gradient where the rank can change: leave dependent columns out, or pass damp="
    )


class ProductFunction(Attached):
    """A B, with ``dA = dC B^H`` and ``dB = A^H dC``."""

    operands = 2
    kept = (2, 0)

    @staticmethod
    def gradients(primal: PrimalFunction, wanted: Wanted, kept: Tensors, *gradients: Tensor) -> Gradients:
        (a, b), (dc,), multiply = kept, gradients, primal.again
        da = for_operand(multiply(dc, b.mH), a) if wanted[0] else None
        db = for_operand(multiply(a.mH, dc), b) if wanted[1] else None
        return da, db

    @staticmethod
    def pushed_forward(primal: PrimalFunction, kept: Tensors, *changes: Any) -> Tensors:
        (a, b), (da, db), multiply = kept, changes, primal.again
        parts = [multiply(da, b)] if da is not None else []
        parts += [multiply(a, db)] if db is not None else []
        return (reduce(torch.add, parts),)


class Polar(Attached):
    """The orthogonal or unitary polar factor, and as evidence the ranks of the matrices.

    Of a tall A ``dA = U Y + (I - U U^H) dU H^-1``, where Y solves ``H Y + Y H = U^H dU - dU^H U``: only sums
    of singular values are divided by (C. S. Kenney, A. J. Laub, "Polar decomposition and matrix sign function
    condition estimates", SIAM J. Sci. Stat. Comput. 12, 1991). The derivative is its own adjoint.
    """

    kept = (1, 2)

    @staticmethod
    def gradients(primal: PrimalFunction, wanted: Wanted, kept: Tensors, *gradients: Tensor) -> Tensors:
        a, u, deficient = _of_full_rank(*kept)
        du = torch.where(deficient & (gradients[0] != 0), math.nan, in_double(gradients[0]))
        return (_derivative_of_polar(a, u, du).to(kept[0].dtype),)


def _of_full_rank(a: Tensor, u: Tensor, ranks: Tensor) -> Tensors:
    """A and U in double precision, where they have a gradient, and where not; there any others will do."""
    deficient = _deficient(a, ranks)
    instead = torch.eye(*a.shape[-2:], dtype=torch.float64, device=a.device)
    return *(torch.where(deficient, instead, in_double(x)) for x in (a, u)), deficient


def _derivative_of_polar(a: Tensor, u: Tensor, change: Tensor) -> Tensor:
    """Change of U from that of A, or gradient of A from that of U, in double precision."""
    if a.shape[-2] < a.shape[-1]:
        return _derivative_of_polar(a.mH, u.mH, change.mH).mH
    h, inner = u.mH @ a, u.mH @ change
    h = (h + h.mH) / 2
    # By the inverse: the forward derivative of torch's own ``solve`` has no derivative with respect to H.
    return u @ lyapunov(h, inner - inner.mH) + (change - u @ inner) @ torch.linalg.inv_ex(h)[0]


def lyapunov(h: Tensor, k: Tensor) -> Tensor:
    """Y of ``H Y + Y H = K`` for a Hermitian positive definite H, differentiable."""
    return Lyapunov.apply(h, k, PrimalFunction(_lyapunov))[0]


def _lyapunov(h: Tensor, k: Tensor) -> Tensors:
    values, vectors = converged_eigh(h)
    sums = values[..., :, None] + values[..., None, :]
    return (vectors @ ((vectors.mH @ k @ vectors) / sums) @ vectors.mH,)


class Lyapunov(Attached):
    """Y of ``H Y + Y H = K``: linear in K, and its own adjoint.

    Eigenvectors have gradients that divide by differences of eigenvalues; Y divides by sums alone.
    """

    operands = 2
    kept = (1, 1)

    @staticmethod
    def gradients(primal: PrimalFunction, wanted: Wanted, kept: Tensors, *gradients: Tensor) -> Tensors:
        h, y = kept
        z = lyapunov(h, gradients[0])
        return -(z @ y.mH + y.mH @ z), z

    @staticmethod
    def pushed_forward(primal: PrimalFunction, kept: Tensors, *changes: Any) -> Tensors:
        (h, y), (dh, dk) = kept, changes
        right = torch.zeros_like(y) if dk is None else dk
        return (lyapunov(h, right if dh is None else right - dh @ y - y @ dh),)
