"""Gradients of solutions within bounds: those of least squares on the unknowns between their bounds.

Near a solution whose other unknowns are pushed against their bounds the same unknowns stay free, and x is a
smooth function of A and b: ``A_F^T (b - A x) = 0`` with the columns of free unknowns.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeVar

import torch

from neula.algorithms.scaling import power_of_two_scales
from neula.pipeline.call import Call
from neula.pipeline.derivatives import Answerer, Attached, Tensors, Wanted, changed_residual
from neula.pipeline.gradients import known
from neula.pipeline.result import LsqLinearResult, NNLSResult
from neula.pipeline.shapes import BatchedProblem

R = TypeVar("R", NNLSResult, LsqLinearResult)


class BoundedFunction(Attached):
    """x of least squares within bounds, and as evidence at which of them it is."""

    operands = 2
    kept = (2, 2)

    @staticmethod
    def gradients(answerer: Answerer, wanted: Wanted, kept: Tensors, *gradients: torch.Tensor) -> Tensors:
        a, b, x, free = _usable(*kept)
        z = _solved(a, free, gradients[0].double(), may_raise=answerer.may_raise)
        image = a @ z
        da = (b - a @ x) @ z.mT - image @ x.mT
        return tuple(x.sum_to_size(y.shape).to(y.dtype) for x, y in zip((da, image), kept[:2], strict=True))

    @staticmethod
    def pushed_forward(answerer: Answerer, kept: Tensors, *changes: Any) -> Tensors:
        (a, b, x, free), (da, db) = _usable(*kept), changes
        right = a.mT @ changed_residual(x, da, db)
        if da is not None:
            right = right + da.double().mT @ (b - a @ x)
        return (_solved(a, free, right, may_raise=False).to(kept[2].dtype),)


def _usable(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, side: torch.Tensor) -> Tensors:
    """A, b and x in double precision, zero where nothing is known of x, and which unknowns are free."""
    spoilt = ~x.isfinite().all(-2, keepdim=True)
    a = torch.where(spoilt.all(-1, keepdim=True), 0.0, a.double())
    b, x = (torch.where(spoilt, 0.0, t.double()) for t in (b, x))
    return a, b, x, (side == 0) & ~spoilt


def _solved(a: torch.Tensor, free: torch.Tensor, right: torch.Tensor, *, may_raise: bool) -> torch.Tensor:
    """``(A_F^T A_F)^-1`` times the rows of free unknowns of each right-hand side, and zero for the others.

    Where the columns of free unknowns are dependent it is an error, or NaN where nothing may be read.
    """
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
