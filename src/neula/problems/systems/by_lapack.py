"""One linear system on a CPU, by NumPy and LAPACK: the first links of its chain without the chain.

For small systems tensors, batches and records of what was tried take many times as long as the arithmetic.
What is accepted here is what the judge of the chain accepts; what is not begins with its first link again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from neula.algorithms.krylov.doubled_refinement import MAX_STEPS
from neula.algorithms.lapack.refinement import length, refine
from neula.algorithms.lapack.square import SquareSystem
from neula.certificates.bounds import solve_bound
from neula.certificates.forward_error import COMPUTED, rounded_error
from neula.certificates.verdict import Evidence
from neula.engines import FP32, FP64, Format
from neula.kernels.magnitudes import MODERATE
from neula.pipeline.call import Call
from neula.pipeline.chain import Answer
from neula.pipeline.in_numpy import (
    FEW,
    IN_NUMPY,
    array_of,
    arrays_of,
    is_large,
    is_single,
    of_single,
    x_of_single,
)
from neula.pipeline.result import Attempt, SolveResult
from neula.pipeline.shapes import BatchedProblem
from neula.problems.systems.problem import Systems, SystemsOptions, SystemsSolutions, in_words

WORTH = 48
"""Order from which on a system takes longer than the calls for it."""


class _SystemColumn(NamedTuple):
    """What is known of one right-hand side."""

    x: np.ndarray
    forward_error: float
    residual: float
    backward_error: float
    history: list[float]


def solve_by_lapack(call: Call, shapes: BatchedProblem, options: SystemsOptions) -> SolveResult[Any] | None:
    """The solution where it is accepted, and the system is one for this way."""
    n, tuning = shapes.a.shape[-1], options.engine.tuning
    named = options.pivot is not None or options.compute is not None
    order = tuning.direct_definite if options.positive else tuning.direct
    if not options.positive:
        order = max(order, tuning.direct_alone)
    if named or not tuning.lapack or not 0 < n < order or not is_single(shapes, options):
        return None
    with np.errstate(all="ignore"):  # what is not finite is not accepted
        if not is_large(shapes.a.numel(), options):
            return _by_lapack(call, shapes, options)
        with call.computing():
            return _by_lapack(call, shapes, options)


def _by_lapack(call: Call, shapes: BatchedProblem, options: SystemsOptions) -> SolveResult[Any] | None:
    a, b = arrays_of(shapes)
    large = is_large(a.size, options)
    doubled = options.forward or len(a) <= options.engine.tuning.doubled_order
    for single in (True, False) if options.target is not FP64 and not doubled else (False,):
        found = SquareSystem.factorize(
            a, b, positive=options.positive, single=single, doubled=doubled, large=large
        )
        columns = None if found is None else solutions_of(found[0], b, options)
        if found is not None and columns is not None:
            format = "fp32" if single else "fp64"
            label = f"cholesky {format}" if options.positive else f"lu {format} with pivoting"
            return _result(call, shapes, options, found, label, columns)
    return None


def each_by_lapack(systems: Systems, format: Format) -> Answer[SystemsSolutions] | None:
    """All of a batch, one after the other, where matrices take longer than the calls for one; None where one
    of them is not accepted.
    """
    options, (a, b) = systems.options, (systems.a, systems.b)
    here = a.is_cpu and options.engine.tuning.lapack and options.dtype in IN_NUMPY
    if not (here and len(a) > 1 and a.shape[1] >= WORTH and b.shape[2] <= FEW and options.progress is None):
        return None
    doubled, found = options.forward or a.shape[1] <= options.engine.tuning.doubled_order, []
    large = is_large(a[0].numel(), options)
    for member, right in zip(array_of(a), array_of(b), strict=True):
        columns = list(np.ascontiguousarray(right.T, np.float64))
        with np.errstate(all="ignore"):  # what is not finite is not accepted
            one = SquareSystem.factorize(
                member,
                columns,
                positive=options.positive,
                single=format is FP32,
                doubled=doubled,
                large=large,
            )
            solved = None if one is None else solutions_of(one[0], columns, options)
        if one is None or solved is None:
            return None
        found.append((solved, one[0].condition, one[0].condition_bound, one[1]))
    solutions, conditions, bounds, growths = zip(*found, strict=True)
    values = SystemsSolutions(
        x=_tensor([[c.x for c in columns] for columns in solutions]).mT,
        forward_error=_tensor([[c.forward_error for c in columns] for columns in solutions]),
        backward_error=_tensor([max(c.backward_error for c in columns) for columns in solutions]),
        condition=_tensor(conditions),
        doubtful=torch.zeros(len(a), dtype=torch.bool, device="cpu"),
        residual=_tensor([max(c.residual for c in columns) for columns in solutions]),
        refined_error=_tensor([max(c.history[-1] for c in columns) for columns in solutions]),
        condition_bound=_tensor(bounds),
        growth=_tensor(growths),
    )
    history = _worst([c.history for columns in solutions for c in columns])
    name = "cholesky fp64" if options.positive else f"lu {format.name} with pivoting"
    return Answer(values, name, "", len(history) - 1, history)


def _tensor(numbers: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(numbers))


def _worst(histories: list[list[float]]) -> tuple[float, ...]:
    """The largest error after each step; some take fewer."""
    steps = max(map(len, histories))
    return tuple(max(h[min(step, len(h) - 1)] for h in histories) for step in range(steps))


def solutions_of(
    system: SquareSystem, right: list[np.ndarray], options: SystemsOptions
) -> list[_SystemColumn] | None:
    """The solutions; None where one is not accepted."""
    limits, columns = options.limits(len(right[0])), []
    for b, first in zip(right, system.first, strict=True):
        b_norm, system.history = length(b), []
        if not 1 / MODERATE <= b_norm <= MODERATE:
            return None
        found = refine(system, b, options.digits, min(MAX_STEPS, options.max_iterations), first)
        if found is None:
            return None
        measured = system.backward_error(b, found.x, found.residual)
        x, lost, rounding = found.x, found.x_low, 0.0
        if options.dtype != torch.float64:
            x = x.astype(IN_NUMPY[options.dtype]).astype(np.float64)
            rest = found.x - x
            lost, rounding = lost + rest, system.size(rest) / found.size
        forward_error = rounded_error(found.forward_error, COMPUTED * rounding)
        residual = system.longest(found.residual, lost, b_norm * limits.residual) / b_norm
        backward_error = measured + rounding + found.low
        errors = measured, backward_error, forward_error
        if not limits.accept(Evidence(0.0, residual, *errors, system.condition_bound)):
            return None
        history = [*system.history, measured]
        columns.append(_SystemColumn(x, forward_error, residual, backward_error, history))
    return columns


def _result(
    call: Call,
    shapes: BatchedProblem,
    options: SystemsOptions,
    found: tuple[SquareSystem, float],
    label: str,
    columns: list[_SystemColumn],
) -> SolveResult[Any]:
    system, growth = found
    x, forward_errors = np.array([column.x for column in columns]).T, [c.forward_error for c in columns]
    backward_error, bound = max([c.backward_error for c in columns]), solve_bound(options.target, len(x))
    history = _worst([column.history for column in columns])
    reason = in_words(backward_error, bound, max(forward_errors), len(history) - 1, growth)
    known = {
        "x": x_of_single(call, shapes, options, x),
        "iterations": len(history) - 1,
        "backward_error": backward_error,
        "condition": system.condition,
        "history": history,
        "attempts": (Attempt(label, True, reason),),
        "tolerance": bound,
        "growth": growth,
        "method": label,
    }
    more = of_single(call, shapes, options, backward_error, system.condition, forward_errors)
    return SolveResult.from_fields(known | more)
