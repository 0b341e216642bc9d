"""``torch.ops.neula.lsq_linear``, which is the operator of ``nnls``, too."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from neula.pipeline.operators import Operator, refuse_variable
from neula.pipeline.result import LsqLinearResult, NNLSResult
from neula.problems.bounded.problem import BoundedFunction, with_residuals
from neula.problems.operators.arguments import (
    COMMON,
    Shapes,
    Tensors,
    are_simple,
    common_dtype,
    may_be_vectors,
    settings,
    shapes_of_system,
    system,
    worst,
)
from neula.problems.operators.solutions import LSTSQ


def _lsq_linear(
    A: torch.Tensor, b: torch.Tensor, *, lower: torch.Tensor, upper: torch.Tensor, **options: Any
) -> Tensors:
    from neula.problems.bounded.lsq_linear import lsq_linear

    known = lsq_linear(*system(A, b), (lower, upper), **options)
    return known.x, known.active_mask, known.backward_errors, known.forward_errors, known.accepted


def _shapes_of_lsq_linear(A: torch.Tensor, b: torch.Tensor) -> Shapes:
    batch, x = shapes_of_system(A, b)
    each = (*batch, b.shape[-1])
    errors = ((each, torch.float64),) * 2
    return (x, common_dtype(A, b)), (x, torch.int64), *errors, (each, torch.bool)


LSQ_LINEAR = Operator(
    f"lsq_linear(Tensor A, Tensor b, Tensor lower, Tensor upper, {COMMON}, int? max_iter=None)"
    " -> (Tensor x, Tensor active_mask, Tensor backward_error, Tensor forward_error, Tensor accepted)",
    BoundedFunction,
    _lsq_linear,
    _shapes_of_lsq_linear,
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
    known: dict[str, Any] = {"x": None, "residual_norms": None, "active_mask": columns(mask)}
    known |= {"converged": accepted.all(), **settings(options, A, b)}
    known |= {"backward_error": worst(backward), "forward_error": worst(forward), "accepted": accepted}
    known |= {"backward_errors": backward, "forward_errors": forward}
    if kind is LsqLinearResult:
        free, ranks, *_ = LSTSQ.by_name(A, rhs, **options)
        unbounded = torch.where((ranks < A.shape[-1])[..., None, None], 0.0, free)
        known |= {"cost": None, "fun": None, "unbounded_sol": columns(unbounded)}
        known |= {"nit": 0, "status": 1, "message": ""}
    matrices, rhs = system(A, rhs)
    return with_residuals(kind(**known), matrices, rhs, x, is_vector=is_vector)
