"""``torch.ops.neula.lstsq`` and ``solve``."""

from __future__ import annotations

import math
from typing import Any

import torch

from neula.certificates.bounds import Accuracy
from neula.errors import part_of_one
from neula.pipeline import functions
from neula.pipeline.gradients import stacked_problem
from neula.pipeline.operators import Operator, name_of, refuse_variable
from neula.pipeline.result import LstsqResult, SolveResult
from neula.problems.operators.arguments import (
    COMMON,
    Shapes,
    Tensors,
    are_simple,
    common,
    common_dtype,
    may_be_vectors,
    shapes_of_evidence,
    shapes_of_system,
    system,
    worst,
)
from neula.problems.operators.factorizations import QR

LSTSQ_OPTIONS = ("algorithm", "compute", "rcond", "max_iterations", "certify")
SOLVE_OPTIONS = ("assume_a", "pivot", "compute", "max_iterations", "certify")


def _lstsq(
    A: torch.Tensor, b: torch.Tensor, accuracy: str | None, engine: str, strict: bool, *named: Any
) -> Tensors:
    from neula.problems.least_squares.lstsq import lstsq

    options = dict(zip(LSTSQ_OPTIONS, named, strict=True))
    matrices, rhs = system(A, b)
    found: LstsqResult[Any] = lstsq(matrices, rhs, **common(accuracy, engine, strict), **options)
    return found.x, found.ranks, found.backward_errors, found.forward_errors, found.accepted


def _shapes_of_lstsq(A: torch.Tensor, b: torch.Tensor) -> Shapes:
    batch, x = shapes_of_system(A, b)
    return (x, common_dtype(A, b)), (batch, torch.int64), *shapes_of_evidence(batch, b.shape[-1])


def _factorize(accuracy: str | None, engine: str, *others: Any) -> Any:
    return lambda a: QR(a, "fp64", engine, False, None, None, None, None)[:2]


LSTSQ = Operator(
    f"lstsq(Tensor A, Tensor b, {COMMON}, str? algorithm=None, str? compute=None, float? rcond=None, "
    'int max_iterations=60, str certify="backward")'
    " -> (Tensor x, Tensor rank, Tensor backward_error, Tensor forward_error, Tensor accepted)",
    functions.Solution,
    _lstsq,
    _shapes_of_lstsq,
    _factorize,
)


def traced_lstsq(
    A: Any,
    b: Any,
    *,
    accuracy: Accuracy | None = None,
    engine: Any = "auto",
    algorithm: str | None = None,
    compute: str | None = None,
    damp: float = 0.0,
    intercept: bool = False,
    weights: Any = None,
    sigma: Any = None,
    sample_weight: Any = None,
    rcond: float | None = None,
    max_iterations: int = 60,
    certify: str = "backward",
    strict: bool = False,
    constraints: Any = None,
    covariance: Any = None,
    covariance_factor: Any = None,
    **others: Any,
) -> LstsqResult[Any] | None:
    """:func:`neula.lstsq` in a graph."""
    if not are_simple(engine, A, b) or may_be_vectors(A, b):
        return None
    general = (constraints, covariance, covariance_factor, sigma, sample_weight)
    if intercept or any(x is not None for x in general):
        return None
    refuse_variable(damp, "damp")
    is_vector, dtype, target = b.ndim == 1, common_dtype(A, b), name_of(accuracy)
    rhs = b.unsqueeze(-1) if is_vector else b
    if damp or weights is not None:
        target = target or name_of(dtype)
        rcond = max(max(A.shape[-2:]) * 2.0**-52, torch.finfo(dtype).eps) if rcond is None else rcond
        batch, _ = shapes_of_system(A, rhs)
        matrices, rhs = A.expand(*batch, *A.shape[-2:]), rhs.expand(*batch, *rhs.shape[-2:])
        A, rhs = stacked_problem(matrices, rhs, weights, damp)
    options = target, engine, strict, algorithm, compute, rcond, max_iterations, certify
    x, ranks, *evidence = LSTSQ(A, rhs, *options)
    worst: Any = ranks.amin() if ranks.numel() else min(A.shape[-2:])
    return LstsqResult(
        **_unread(x.to(dtype), *evidence, is_vector=is_vector, engine=engine),
        optimality=math.nan,
        residual_norm=math.nan,
        rank=worst,
        ranks=ranks,
    )


def traced_pinv(
    A: Any,
    rcond: float | None = None,
    *,
    accuracy: Accuracy | None = None,
    engine: Any = "auto",
    strict: bool = False,
    **others: Any,
) -> torch.Tensor | None:
    """:func:`neula.pinv` in a graph."""
    if not are_simple(engine, A) or A.ndim < 2:
        return None
    tall, k = A.shape[-2] > A.shape[-1], min(A.shape[-2:])
    identity = torch.eye(k, dtype=common_dtype(A), device=A.device)
    options = name_of(accuracy), engine, strict, None, None, part_of_one("rcond", rcond), 60, "backward"
    x = LSTSQ(A.mH if tall else A, identity, *options)[0]
    return x.mH if tall else x


def _solve(
    A: torch.Tensor, b: torch.Tensor, accuracy: str | None, engine: str, strict: bool, *named: Any
) -> Tensors:
    from neula.problems.systems.solve import solve

    options = dict(zip(SOLVE_OPTIONS, named, strict=True))
    matrices, rhs = system(A, b)
    found: SolveResult[Any] = solve(matrices, rhs, **common(accuracy, engine, strict), **options)
    return found.x, found.backward_errors, found.forward_errors, found.accepted


def _shapes_of_solve(A: torch.Tensor, b: torch.Tensor) -> Shapes:
    batch, x = shapes_of_system(A, b)
    return (x, common_dtype(A, b)), *shapes_of_evidence(batch, b.shape[-1])


def _solve_again(accuracy: str | None, engine: str, strict: bool, *named: Any) -> Any:
    *how, _ = named
    return lambda a, b: SOLVE(a, b, None, engine, strict, *how, "backward")[0]


SOLVE = Operator(
    f'solve(Tensor A, Tensor b, {COMMON}, str assume_a="gen", str? pivot=None, str? compute=None, '
    'int max_iterations=100, str certify="backward")'
    " -> (Tensor x, Tensor backward_error, Tensor forward_error, Tensor accepted)",
    functions.LinearSystem,
    _solve,
    _shapes_of_solve,
    _solve_again,
)


def traced_solve(
    A: Any,
    b: Any,
    *,
    assume_a: str = "gen",
    accuracy: Accuracy | None = None,
    engine: Any = "auto",
    pivot: str | None = None,
    compute: str | None = None,
    max_iterations: int = 100,
    certify: str = "backward",
    strict: bool = False,
    **others: Any,
) -> SolveResult[Any] | None:
    """:func:`neula.solve` in a graph."""
    if not are_simple(engine, A, b) or may_be_vectors(A, b):
        return None
    options = name_of(accuracy), engine, strict, assume_a, pivot, compute, max_iterations, certify
    is_vector = b.ndim == 1
    x, *evidence = SOLVE(A, b.unsqueeze(-1) if is_vector else b, *options)
    return SolveResult(**_unread(x, *evidence, is_vector=is_vector, engine=engine), growth=math.nan)


def _unread(
    x: torch.Tensor,
    backward_errors: torch.Tensor,
    forward_errors: torch.Tensor,
    accepted: torch.Tensor,
    *,
    is_vector: bool,
    engine: str,
) -> dict[str, Any]:
    """Fields of a result whose numbers may not be read: they stay tensors."""
    return {
        "x": x.squeeze(-1) if is_vector else x,
        "converged": accepted.all(),
        "iterations": 0,
        "backward_error": worst(backward_errors),
        "tolerance": math.nan,
        "forward_error": worst(forward_errors),
        "engine": engine,
        "accepted": accepted,
        "backward_errors": backward_errors,
        "forward_errors": forward_errors.squeeze(-1) if is_vector else forward_errors,
    }
