"""One least-squares problem on a CPU, by NumPy and LAPACK: the first link of its chain without the chain.

For small problems tensors, batches and records of what was tried take many times as long as the arithmetic.
What is accepted here is what the judge of the chain accepts; what is not begins with its first link again.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from neula.certificates.forward_error import ESTIMATED, wedin_factor
from neula.engines import FP64
from neula.pipeline.call import Call
from neula.pipeline.chain import Answer
from neula.pipeline.gradients import stacked_problem
from neula.pipeline.in_numpy import FEW, array_of, arrays_of, is_large, is_single
from neula.pipeline.memory import MemoryGuard
from neula.pipeline.progress import stage
from neula.pipeline.result import LstsqResult
from neula.pipeline.shapes import BatchedProblem
from neula.problems.least_squares.by_kernel import LABEL, most_right, takes
from neula.problems.least_squares.in_arrays import solved_in_arrays
from neula.problems.least_squares.prepared import LeastSquaresProblems, Way
from neula.problems.least_squares.problem import LeastSquaresOptions, LeastSquaresSolutions
from neula.problems.least_squares.report import SingleProblemSolution, result_of


def solve_by_lapack(
    call: Call, shapes: BatchedProblem, options: LeastSquaresOptions
) -> LstsqResult[Any] | None:
    """The solution where it is accepted, and the problem is one for this way."""
    if not _suits(shapes, options):
        return None
    given, plain = shapes, options
    if options.weights is not None or options.damp:
        a, b = stacked_problem(shapes.a, shapes.b, options.weights, options.damp)
        given, plain = replace(shapes, a=a, b=b), replace(options, weights=None, damp=0.0)
    found = _by_library(call, given, plain, refused=False) if given.b.shape[-1] <= FEW else None
    if found is not None and options.weights is not None:
        found = _with_rounded_weights(given, found, options)
    return None if found is None else result_of(call, shapes, options, found)


def _with_rounded_weights(
    given: BatchedProblem, found: SingleProblemSolution, options: LeastSquaresOptions
) -> SingleProblemSolution | None:
    """Errors of the problem whose weighted elements are not rounded; None where they are too large.

    Rounding them is a perturbation of A and b by one unit roundoff (Wedin's bound), for columns that are
    independent: it turns the rows, which decide what the shortest solution of others is. With columns of norm
    1 that of A has a Frobenius norm of at most ``sqrt(n) u``, and A a norm of at least 1.
    """
    if found.rank < len(found.x):
        return None
    sizes = torch.linalg.vector_norm(given.a, dim=0).numpy()
    image = np.linalg.norm(sizes[:, None] * found.x, axis=0)
    condition = ESTIMATED * found.condition
    factor = wedin_factor(condition, np.array(found.residual_norms) / image)
    errors = (found.forward_errors + condition * FP64.u * factor).tolist()
    backward, limits = found.backward_error + len(sizes) ** 0.5 * FP64.u, options.limits(given.a.shape)
    if not (max(errors) <= limits.forward_error and backward <= limits.backward_error):
        return None
    return found._replace(forward_errors=errors, backward_error=backward)


def _by_library(
    call: Call, shapes: BatchedProblem, options: LeastSquaresOptions, *, refused: bool
) -> SingleProblemSolution | None:
    with np.errstate(all="ignore"):  # what is not finite is not accepted
        if not is_large(shapes.a.numel(), options):
            with suppress(MemoryError):
                return _by_lapack(shapes, options, refused=refused)
        with MemoryGuard(call.engine.device).attempt(LABEL), call.computing():
            return _by_lapack(shapes, options, refused=refused)
    return None


def each_by_lapack(
    problems: LeastSquaresProblems,
    before: Answer[LeastSquaresSolutions] | None,
    *,
    label: str,
    together: Way,
    refused: bool = False,
) -> Answer[LeastSquaresSolutions]:
    """All of a batch, one after the other: for matrices that take longer than the calls for one, and those
    that others have ``refused`` to factorize.

    Many right-hand sides are better taken together.
    """
    if problems.b.shape[2] > FEW:
        return together(problems, before)
    options, (a, b) = problems.options, (array_of(problems.a), array_of(problems.b))
    values = LeastSquaresSolutions.missing(len(problems), a.shape[2], b.shape[2], problems.device)
    values.rank.fill_(a.shape[2])
    known = {name: x.numpy() for name, x in values.by_name.items()}
    places = range(len(a)) if problems.places is None else problems.places.tolist()
    report, steps, used = stage(options.progress, label), 0, label
    for i, place in enumerate(places):
        with np.errstate(all="ignore"):  # what is not finite is not accepted
            right = list(np.ascontiguousarray(b[place].T, np.float64))
            found = solved_in_arrays(a[place], right, options, refused=refused)
        if found is not None:
            way, condition, condition_bound, rank, columns = found
            used = way if way != label else used
            known["condition"][i], known["condition_bound"][i], known["rank"][i] = (
                condition,
                condition_bound,
                rank,
            )
            for name in ("residual", "backward_error", "refined_error", "optimality"):
                known[name][i] = max([getattr(column, name) for column in columns])
            for name in ("x", "forward_error", "residual_norm"):
                known[name][i] = np.array([getattr(column, name) for column in columns]).T
            steps = max(steps, *(column.steps for column in columns))
        report((i + 1) / len(values))
    return Answer(values, used, iterations=steps)


def _by_lapack(
    shapes: BatchedProblem, options: LeastSquaresOptions, *, refused: bool
) -> SingleProblemSolution | None:
    a, b = arrays_of(shapes)
    solved = solved_in_arrays(a, b, options, refused=refused)
    if solved is None:
        return None
    label, condition, _, rank, columns = solved
    return SingleProblemSolution(
        label,
        np.array([column.x for column in columns]).T,
        max([column.steps for column in columns]),
        max([column.backward_error for column in columns]),
        condition,
        max([column.optimality for column in columns]),
        [column.forward_error for column in columns],
        [column.residual_norm for column in columns],
        rank,
    )


def _suits(shapes: BatchedProblem, options: LeastSquaresOptions) -> bool:
    """Whether there is one problem, neither too large nor with too many right-hand sides.

    Weighted ones are solved with rounded elements, unless more digits than these leave are asked for, or the
    shortest of several solutions.
    """
    m, n = shapes.a.shape[-2:]
    exact = options.weights is None or not (options.forward or options.is_wide(m, n))
    if takes(m, n, options) or options.named or not exact or not is_single(shapes, options, most_right(m, n)):
        return False
    m = options.rows(m, n)
    return min(m, n) > 0 and max(m, n) * min(m, n) ** 2 <= options.engine.tuning.by_lapack
