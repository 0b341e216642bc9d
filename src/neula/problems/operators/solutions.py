"""``torch.ops.neula.lstsq`` and ``solve``."""

from __future__ import annotations

from typing import Any

import torch

from neula.errors import part_of_one
from neula.pipeline import derivatives
from neula.pipeline.gradients import stacked_problem
from neula.pipeline.operators import Operator, name_of, refuse_variable
from neula.pipeline.result import LstsqResult, SolveResult
from neula.problems.operators.arguments import (
    COMMON,
    are_simple,
    common_dtype,
    fields_of,
    may_be_vectors,
    results_of,
    settings,
    unread,
)
from neula.problems.operators.factorizations import QR

EVIDENCE = ("backward_errors", "forward_errors", "accepted")
"""Fields of solutions with what was measured of each."""


def _factorize(*, engine: str, **others: Any) -> Any:
    return lambda a: QR.by_name(a, accuracy="fp64", engine=engine)[:2]


LSTSQ = Operator(
    f"lstsq(Tensor A, Tensor b, {COMMON}, str? algorithm=None, str? compute=None, float? rcond=None, "
    'int max_iterations=60, str certify="backward")'
    " -> (Tensor x, Tensor rank, Tensor backward_error, Tensor forward_error, Tensor accepted)",
    derivatives.Solution,
    fields_of("least_squares.lstsq:lstsq", "x", "ranks", *EVIDENCE),
    results_of("n p", "int64", "float64", "float64 p", "bool"),
    _factorize,
)


def traced_lstsq(
    A: Any,
    b: Any,
    *,
    damp: float = 0.0,
    intercept: bool = False,
    weights: Any = None,
    sigma: Any = None,
    sample_weight: Any = None,
    constraints: Any = None,
    covariance: Any = None,
    covariance_factor: Any = None,
    **options: Any,
) -> LstsqResult[Any] | None:
    if not are_simple(A, b, **options) or may_be_vectors(A, b):
        return None
    general = (constraints, covariance, covariance_factor, sigma, sample_weight)
    if intercept or any(x is not None for x in general):
        return None
    refuse_variable(damp, "damp")
    is_vector, dtype, known = b.ndim == 1, common_dtype(A, b), settings(options, A, b)
    rhs = b.unsqueeze(-1) if is_vector else b
    if damp or weights is not None:
        options["accuracy"] = name_of(options.get("accuracy")) or name_of(dtype)
        if options.get("rcond") is None:
            options["rcond"] = max(max(A.shape[-2:]) * 2.0**-52, torch.finfo(dtype).eps)
        batch = torch.broadcast_shapes(A.shape[:-2], rhs.shape[:-2])
        matrices, rhs = A.expand(*batch, *A.shape[-2:]), rhs.expand(*batch, *rhs.shape[-2:])
        A, rhs = stacked_problem(matrices, rhs, weights, damp)
    x, ranks, *evidence = LSTSQ.by_name(A, rhs, **options)
    known |= {"ranks": ranks, "rank": ranks.amin() if ranks.numel() else min(A.shape[-2:])}
    return LstsqResult(**_solution(x.to(dtype), *evidence, is_vector=is_vector), **known)


def traced_pinv(A: Any, rcond: float | None = None, **options: Any) -> torch.Tensor | None:
    if not are_simple(A, **options) or A.ndim < 2:
        return None
    tall, k = A.shape[-2] > A.shape[-1], min(A.shape[-2:])
    identity = torch.eye(k, dtype=common_dtype(A), device=A.device)
    x = LSTSQ.by_name(A.mH if tall else A, identity, rcond=part_of_one("rcond", rcond), **options)[0]
    return x.mH if tall else x


def _solve_again(**options: Any) -> Any:
    how = {**options, "accuracy": None, "certify": "backward"}
    return lambda a, b: SOLVE.by_name(a, b, **how)[0]


SOLVE = Operator(
    f'solve(Tensor A, Tensor b, {COMMON}, str assume_a="gen", str? pivot=None, str? compute=None, '
    'int max_iterations=100, str certify="backward")'
    " -> (Tensor x, Tensor backward_error, Tensor forward_error, Tensor accepted)",
    derivatives.LinearSystem,
    fields_of("systems.solve:solve", "x", *EVIDENCE),
    results_of("n p", "float64", "float64 p", "bool"),
    _solve_again,
)


def traced_solve(A: Any, b: Any, **options: Any) -> SolveResult[Any] | None:
    if not are_simple(A, b, **options) or may_be_vectors(A, b):
        return None
    is_vector, known = b.ndim == 1, settings(options, A, b)
    x, *evidence = SOLVE.by_name(A, b.unsqueeze(-1) if is_vector else b, **options)
    return SolveResult(**_solution(x, *evidence, is_vector=is_vector), **known)


def _solution(
    x: torch.Tensor,
    backward_errors: torch.Tensor,
    forward_errors: torch.Tensor,
    accepted: torch.Tensor,
    *,
    is_vector: bool,
) -> dict[str, Any]:
    if is_vector:
        x, forward_errors = x.squeeze(-1), forward_errors.squeeze(-1)
    return {"x": x} | unread(accepted, backward_errors=backward_errors, forward_errors=forward_errors)
