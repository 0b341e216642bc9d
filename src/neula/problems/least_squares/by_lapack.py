"""One least-squares problem on a CPU, by NumPy and LAPACK: the first link of its chain without the chain.

For small problems tensors, batches and records of what was tried take many times as long as the arithmetic.
What is accepted here is what the judge of the chain accepts; what is not begins with its first link again.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from neula.algorithms.krylov.doubled_refinement import MAX_STEPS
from neula.algorithms.lapack.refinement import length, refine
from neula.algorithms.lapack.seminormal import Seminormal
from neula.algorithms.lapack.square import Square
from neula.certificates.bounds import lstsq_bound
from neula.certificates.forward_error import rounded_error
from neula.engines import FP32, FP64
from neula.kernels.magnitudes import MODERATE
from neula.pipeline.call import Call
from neula.pipeline.chain import Answer
from neula.pipeline.in_numpy import FEW, IN_NUMPY, array_of, arrays_of, is_large, is_single
from neula.pipeline.memory import MemoryGuard
from neula.pipeline.progress import stage
from neula.pipeline.result import LstsqResult
from neula.pipeline.shapes import System
from neula.problems.least_squares.by_kernel import solve_by_kernel
from neula.problems.least_squares.prepared import Problems, Way
from neula.problems.least_squares.problem import ROUNDED_RANK, Members, Options
from neula.problems.least_squares.report import Found, result_of

LABEL = "cholesky fp64 + seminormal"

SINGLE = 3000
"""Order up to which LU in single precision comes first, where no more is asked for: it does up to condition
numbers of some 2e4, and that of a random matrix is some times its order. Of normal ones nine in ten are good
enough at order 2000, three in four at 3000, half at 4000; these take half the time, the others a quarter
more."""


class _Column(NamedTuple):
    """What is known of one right-hand side."""

    x: np.ndarray
    residual_norm: float
    forward_error: float
    backward_error: float
    refined_error: float
    optimality: float
    steps: int


_Solved = tuple[str, float, list[_Column]]
"""How, the condition number, and solutions."""


def solve_by_lapack(call: Call, shapes: System, options: Options) -> LstsqResult[Any] | None:
    """The solution where it is accepted, and the problem is one for this way."""
    if not _suits(shapes, options):
        return None
    found = solve_by_kernel(shapes.a, shapes.b, LABEL, options) or _by_library(call, shapes, options)
    return None if found is None else result_of(call, shapes, options, found)


def _by_library(call: Call, shapes: System, options: Options) -> Found | None:
    with np.errstate(all="ignore"):  # what is not finite is not accepted
        if not is_large(shapes.a.numel(), options):
            with suppress(MemoryError):
                return _by_lapack(shapes, options)
        with MemoryGuard(call.engine.device).attempt(LABEL), call.computing():
            return _by_lapack(shapes, options)
    return None


def each_by_lapack(
    problems: Problems, before: Answer[Members] | None, *, label: str, together: Way
) -> Answer[Members]:
    """All of a batch, one after the other: for matrices that take longer than the calls for one.

    Many right-hand sides are better taken together.
    """
    if problems.b.shape[2] > FEW:
        return together(problems, before)
    options, (a, b) = problems.options, (array_of(problems.a), array_of(problems.b))
    values = Members.missing(len(problems), a.shape[2], b.shape[2], problems.device)
    values.rank.fill_(a.shape[2])
    known = {name: x.numpy() for name, x in vars(values).items()}
    places = range(len(a)) if problems.places is None else problems.places.tolist()
    report, steps, used = stage(options.progress, label), 0, label
    for i, place in enumerate(places):
        with np.errstate(all="ignore"):  # what is not finite is not accepted
            found = _member(a[place], list(np.ascontiguousarray(b[place].T, np.float64)), options)
        if found is not None:
            way, condition, columns = found
            used = way if way != label else used
            known["condition"][i], known["accepted"][i] = condition, True
            for name in ("backward_error", "refined_error", "optimality"):
                known[name][i] = max([getattr(column, name) for column in columns])
            for name in ("x", "forward_error", "residual_norm"):
                known[name][i] = np.array([getattr(column, name) for column in columns]).T
            steps = max(steps, *(column.steps for column in columns))
        report((i + 1) / len(values))
    return Answer(values, used, iterations=steps)


def _by_lapack(shapes: System, options: Options) -> Found | None:
    a, b = arrays_of(shapes)
    found = _by_lu(a, b, options) if len(a) == a.shape[1] else None
    found = found or _member(a, b, options)
    if found is None:
        return None
    label, condition, columns = found
    return Found(
        label,
        np.array([column.x for column in columns]).T,
        max([column.steps for column in columns]),
        max([column.backward_error for column in columns]),
        condition,
        max([column.optimality for column in columns]),
        [column.forward_error for column in columns],
        [column.residual_norm for column in columns],
    )


def _by_lu(a: np.ndarray, b: list[np.ndarray], options: Options) -> _Solved | None:
    """The same of a square matrix, by half the operations of a QR; what did it comes first."""
    doubled, large = options.refines_doubled(*a.shape), is_large(a.size, options)
    single = options.target is not FP64 and not doubled and len(a) <= SINGLE
    for format in (FP32, FP64) if single else (FP64,):
        found = Square.of(a, b, positive=False, single=format is FP32, doubled=doubled, large=large)
        columns = None if found is None else _columns(found[0], b, options)
        if found is not None and columns is not None:
            return f"lu {format.name} with pivoting", found[0].condition, columns
    return None


def _columns(system: Seminormal | Square, b: list[np.ndarray], options: Options) -> list[_Column] | None:
    """All solutions; None where one is not accepted, or the rank is in doubt."""
    if not system.condition_bound * options.certain_rcond(system.shape) * ROUNDED_RANK < 1:
        return None
    bound, columns = lstsq_bound(options.target, system.shape[1]), []
    known = system.first if isinstance(system, Square) else [None] * len(b)
    for right, first in zip(b, known, strict=True):
        found = _solved(system, right, first, options)
        if found is None or not (
            found.refined_error <= bound and found.forward_error <= options.largest_error
        ):
            return None
        columns.append(found)
    return columns


def _member(a: np.ndarray, b: list[np.ndarray], options: Options) -> _Solved | None:
    """One problem; None where a solution is not accepted."""
    m, n = a.shape
    doubled = options.refines_doubled(m, n)
    single, large = options.target is not FP64 and not doubled, is_large(a.size, options)
    system = Seminormal.of(a, doubled=doubled, single=single, large=large)
    columns = None if system is None else _columns(system, b, options)
    if system is None or columns is None:
        return None
    return f"{system.method} + seminormal", system.condition, columns


def _suits(shapes: System, options: Options) -> bool:
    """Whether there is one plain problem, neither too large nor with too many right-hand sides."""
    if options.weights is not None or options.damp or options.named or not is_single(shapes, options):
        return False
    m, n = shapes.a.shape
    return m >= n > 0 and m * n**2 <= options.engine.tuning.by_lapack


def _solved(
    system: Seminormal | Square, b: np.ndarray, first: np.ndarray | None, options: Options
) -> _Column | None:
    """One solution with its evidence; None where the residual is longer than b, and where x is not finite."""
    b_norm = length(b)
    if not 1 / MODERATE <= b_norm <= MODERATE:
        return None
    found = refine(system, b, options.digits, min(MAX_STEPS, options.max_iterations), first)
    if found is None:
        return None
    refined_error, optimality, forward_error = system.errors(b, found)
    # Residuals in working precision do not see what x lacks of the sum, unless that is all there is.
    lost = found.x_low if system.doubled or isinstance(system, Square) else None
    x, rounding = found.x if system.scales is None else found.x * system.scales, 0.0
    if options.dtype != torch.float64:
        x = x.astype(IN_NUMPY[options.dtype]).astype(np.float64)
        rest = found.x - (x if system.scales is None else x / system.scales)
        lost, rounding = rest if lost is None else lost + rest, system.size(rest) / found.size
    residual_norm = length(found.residual if lost is None else found.residual + system.change(lost))
    if not residual_norm <= b_norm * (1 + sum(system.shape) * FP64.u):
        return None
    return _Column(
        x,
        residual_norm,
        rounded_error(forward_error, rounding),
        refined_error + rounding + found.low,
        refined_error,
        optimality,
        found.steps,
    )
