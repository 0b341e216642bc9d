"""``torch.ops.neula.lsq_linear``, which is the operator of ``nnls``, too, and gradients: those of least
squares on the unknowns between their bounds.

Near a solution whose other unknowns are pushed against their bounds the same unknowns stay free, and x is a
smooth function of A and b: ``A_F^T (b - A x) = 0`` with the columns of free unknowns.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from neula.algorithms.scaling import power_of_two_scales
from neula.pipeline.call import Call
from neula.pipeline.derivatives import Attached, PrimalFunction, Wanted, changed_residual
from neula.pipeline.gradients import known
from neula.pipeline.operators import Operator, refuse_variable
from neula.pipeline.result import LsqLinearResult, NNLSResult
from neula.pipeline.shapes import BatchedProblem
from neula.problems.operators.arguments import (
    COMMON,
    Tensors,
    are_simple,
    may_be_vectors,
    results_of,
    settings,
    system,
    unread,
)
from neula.problems.operators.solutions import LSTSQ

R = TypeVar("R", NNLSResult, LsqLinearResult)


class BoundedFunction(Attached):
    """x of least squares within bounds, and as evidence at which of them it is."""

    operands = 2
    kept = (2, 2)

    @staticmethod
    def gradients(primal: PrimalFunction, wanted: Wanted, kept: Tensors, *gradients: torch.Tensor) -> Tensors:
        a, b, x, free = _usable(*kept)
        z = _solved(a, free, gradients[0].double(), may_raise=primal.may_raise)
        image = a @ z
        da = (b - a @ x) @ z.mT - image @ x.mT
        return tuple(x.sum_to_size(y.shape).to(y.dtype) for x, y in zip((da, image), kept[:2], strict=True))

    @staticmethod
    def pushed_forward(primal: PrimalFunction, kept: Tensors, *changes: Any) -> Tensors:
        (a, b, x, free), (da, db) = _usable(*kept), changes
        right = a.mT @ changed_residual(x, da, db)
        if da is not None:
            right = right + da.double().mT @ (b - a @ x)
        return (_solved(a, free, right, may_raise=False).to(kept[2].dtype),)


def _usable(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, side: torch.Tensor) -> Tensors:
    """A, b and x in double precision, zero where nothing is known of x, and which unknowns are free."""
    nonfinite = ~x.isfinite().all(-2, keepdim=True)
    a = torch.where(nonfinite.all(-1, keepdim=True), 0.0, a.double())
    b, x = (torch.where(nonfinite, 0.0, t.double()) for t in (b, x))
    return a, b, x, (side == 0) & ~nonfinite


def _solved(a: torch.Tensor, free: torch.Tensor, right: torch.Tensor, *, may_raise: bool) -> torch.Tensor:
    """``(A_F^T A_F)^-1`` times the rows of free unknowns of each right-hand side, and zero for the others."""
    # Where the columns of free unknowns are dependent it is an error, or NaN where nothing may be read.
    largest = a.detach().abs().amax(-2) if a.shape[-2] else a.new_zeros(*a.shape[:-2], a.shape[-1])
    scales = power_of_two_scales(largest)[..., None, :]
    scaled = a * scales
    gram = (scaled.mT @ scaled)[..., None, :, :]

    def factor(mask: torch.Tensor) -> Any:  # a matrix for each right-hand side: one where none is free
        masked = mask[..., :, None] * gram * mask[..., None, :]
        return torch.linalg.cholesky_ex(masked + torch.diag_embed(1 - mask))

    refused = (factor(free.mT.double())[1] > 0)[..., None, :]
    if may_raise and bool((refused & (right != 0)).any()):
        raise ValueError(
            "columns of unknowns between their bounds are dependent, and solutions have no gradient there: "
            "leave columns out, or solve under torch.no_grad()"
        )
    mask = (free & ~refused).mT.double()
    wanted = mask * (scales.mT * right).mT
    z = scales.mT * torch.cholesky_solve(wanted[..., None], factor(mask)[0])[..., 0].mT
    return torch.where(refused & (right != 0), math.nan, z)


def attached(call: Call, shapes: BatchedProblem, result: R) -> R:
    """A result, its tensors attached to the graphs of A and b where that is required."""
    if not call.differentiable:
        return result
    batch, is_vector = shapes.batch, shapes.is_vector

    def columns(x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(-1) if is_vector else x

    a, b = (x.graph for x in call.operands.values())
    a, b = a.expand(*batch, *a.shape[-2:]), columns(b.to(a.device))
    b = b.expand(*batch, *b.shape[-2:])
    x = BoundedFunction.apply(a, b, known(columns(result.x), columns(result.active_mask)))[0]
    found = with_residuals(result, a, b, x, is_vector=is_vector)
    if not isinstance(found, LsqLinearResult):
        return found
    free = columns(found.unbounded_sol)
    # Where columns are dependent it is zero, and stays so; but it is zero where b is, too.
    constant = ~(free != 0).any(-2, keepdim=True) & (b != 0).any(-2, keepdim=True)
    (free,) = BoundedFunction.apply(a, b, known(free, constant.expand(free.shape)))[:1]
    return replace(found, unbounded_sol=free.squeeze(-1) if is_vector else free)


def with_residuals(result: R, a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, *, is_vector: bool) -> R:
    """A result with an x that is attached to graphs, and with what follows from x, whose numbers stay."""

    def joined(value: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.squeeze(-1) if is_vector else x
        if value is None:
            return x
        value = value if isinstance(value, torch.Tensor) else x.new_tensor(value)
        return value + (x - x.detach()).to(value.dtype)

    residual = a.double() @ x.double() - b.double()
    largest = residual.detach().abs().amax(-2, keepdim=True) if a.shape[-2] else residual.new_ones(())
    largest = torch.where(largest > 0, largest, 1.0)  # squares of what it is divided by do not overflow
    norms = torch.linalg.vector_norm(residual / largest, dim=-2, keepdim=True) * largest
    norms = norms[..., 0, :]
    known: dict[str, Any] = {"residual_norms": joined(result.residual_norms, norms)}
    if isinstance(result, LsqLinearResult):
        known |= {"fun": joined(result.fun, residual.to(x.dtype)), "cost": joined(result.cost, norms**2 / 2)}
    return replace(result, x=x.squeeze(-1) if is_vector else x, is_variable=True, **known)


def _lsq_linear(
    A: torch.Tensor, b: torch.Tensor, *, lower: torch.Tensor, upper: torch.Tensor, **options: Any
) -> Tensors:
    from neula.problems.bounded.lsq_linear import lsq_linear

    known = lsq_linear(*system(A, b), (lower, upper), **options)
    return known.x, known.active_mask, known.backward_errors, known.forward_errors, known.accepted


LSQ_LINEAR = Operator(
    f"lsq_linear(Tensor A, Tensor b, Tensor lower, Tensor upper, {COMMON}, int? max_iter=None)"
    " -> (Tensor x, Tensor active_mask, Tensor backward_error, Tensor forward_error, Tensor accepted)",
    BoundedFunction,
    _lsq_linear,
    results_of("n p", "int64 n p", "float64 p", "float64 p", "bool p"),
)


def traced_nnls(
    A: Any, b: Any, *, maxiter: int | None = None, sum_to: float | None = None, **options: Any
) -> NNLSResult[Any] | None:
    if sum_to is not None:
        return None
    return _traced(NNLSResult, A, b, (0.0, math.inf), options | {"max_iter": maxiter})


def traced_lsq_linear(
    A: Any,
    b: Any,
    bounds: Any = (-math.inf, math.inf),
    method: str = "trf",
    tol: float = 1e-10,
    lsq_solver: str | None = None,
    lsmr_tol: float | str | None = None,
    max_iter: int | None = None,
    verbose: int = 0,
    *,
    constraints: Any = None,
    **options: Any,
) -> LsqLinearResult[Any] | None:
    from neula.problems.bounded.lsq_linear import checked

    if constraints is not None:
        return None
    both, most = checked(bounds, method, lsq_solver, max_iter, verbose)
    return _traced(LsqLinearResult, A, b, both, options | {"max_iter": most})


def _traced(kind: Any, A: Any, b: Any, bounds: tuple[Any, Any], options: dict[str, Any]) -> Any:
    """A result whose numbers may not be read."""
    if not are_simple(A, b, **options) or may_be_vectors(A, b):
        return None
    for name, x in zip(("lower bound", "upper bound"), bounds, strict=True):
        refuse_variable(x, name)
        is_complex = isinstance(x, torch.Tensor) and x.is_complex()
        if is_complex or (not isinstance(x, float | int | torch.Tensor) and np.iscomplexobj(x)):
            raise TypeError(f"{name} is complex, and must be real")
    lower, upper = (torch.as_tensor(x, dtype=torch.float64, device=A.device) for x in bounds)
    is_vector = b.ndim == 1
    rhs = b.unsqueeze(-1) if is_vector else b
    x, mask, *evidence = LSQ_LINEAR.by_name(A, rhs, lower=lower, upper=upper, **options)

    def columns(x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(-1) if is_vector else x

    backward, forward, accepted = map(columns, evidence)
    known = unread(accepted, backward_errors=backward, forward_errors=forward) | settings(options, A, b)
    known |= {"x": None, "residual_norms": None, "active_mask": columns(mask), "_axis": x.ndim - 2}
    if kind is LsqLinearResult:
        free, ranks, *_ = LSTSQ.by_name(A, rhs, **options)
        unbounded = torch.where((ranks < A.shape[-1])[..., None, None], 0.0, free)
        known |= {"cost": None, "fun": None, "unbounded_sol": columns(unbounded)}
        known |= {"nit": 0, "status": 1, "message": ""}
    matrices, rhs = system(A, rhs)
    return with_residuals(kind(**known), matrices, rhs, x, is_vector=is_vector)
