"""``torch.ops.neula.polar``."""

from __future__ import annotations

import math
from typing import Any

import torch

from neula.certificates.bounds import Accuracy
from neula.errors import check_name
from neula.pipeline import functions
from neula.pipeline.gradients import symmetric_part
from neula.pipeline.operators import Operator, name_of
from neula.pipeline.result import PolarResult
from neula.problems.operators.arguments import (
    COMMON,
    Shapes,
    Tensors,
    are_simple,
    common,
    common_dtype,
    worst,
)
from neula.problems.polar.problem import SIDES


def _polar(
    A: torch.Tensor, accuracy: str | None, engine: str, strict: bool, rcond: float | None, completion: bool
) -> Tensors:
    from neula.problems.polar.polar import polar

    found = polar(A, **common(accuracy, engine, strict), rcond=rcond, completion=completion)
    return found.U, found.ranks, found.residuals, found.orthogonalities, found.accepted


def _shapes_of_polar(A: torch.Tensor) -> Shapes:
    batch = tuple(A.shape[:-2])
    errors = ((batch, torch.float64),) * 2
    return (tuple(A.shape), common_dtype(A)), (batch, torch.int64), *errors, (batch, torch.bool)


POLAR = Operator(
    f"polar(Tensor A, {COMMON}, float? rcond=None, bool completion=False)"
    " -> (Tensor U, Tensor rank, Tensor residual, Tensor orthogonality, Tensor accepted)",
    functions.Polar,
    _polar,
    _shapes_of_polar,
)


def traced_polar(
    A: Any,
    *,
    side: str | None = None,
    rcond: float | None = None,
    completion: bool = False,
    accuracy: Accuracy | None = None,
    engine: Any = "auto",
    strict: bool = False,
    **others: Any,
) -> PolarResult[Any] | None:
    """:func:`neula.polar` in a graph."""
    if not are_simple(engine, A):
        return None
    check_name("side", side, SIDES, optional=True)
    u, ranks, residuals, orthogonalities, accepted = POLAR(
        A, name_of(accuracy), engine, strict, rcond, completion
    )
    rank: Any = ranks.amin() if ranks.numel() else min(A.shape[-2:])
    known: dict[str, Any] = {"converged": accepted.all(), "rank": rank}
    known |= {"residual": worst(residuals), "orthogonality": worst(orthogonalities)}
    return PolarResult(
        U=u,
        H=None if side is None else symmetric_part(A.to(u.dtype), u, side),
        side=side,
        **known,
        residual_bound=math.nan,
        orthogonality_bound=math.nan,
        ranks=ranks,
        residuals=residuals,
        orthogonalities=orthogonalities,
        accepted=accepted,
        engine=engine,
        accuracy=name_of(accuracy) or "",
    )
