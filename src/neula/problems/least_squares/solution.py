"""One least-squares call: its chain is run, and what came of it becomes a result."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from neula.pipeline.call import Call
from neula.pipeline.chain import Answer, Run
from neula.pipeline.gradients import attach_solution, stacked_problem
from neula.pipeline.result import Attempt, LstsqResult
from neula.pipeline.shapes import BatchedProblem
from neula.pipeline.solutions import Report, attached, numbers_of, unread
from neula.problems.least_squares.fit import LinearFit, fit_spread
from neula.problems.least_squares.plan import solved_by_plan
from neula.problems.least_squares.prepared import LeastSquaresProblems
from neula.problems.least_squares.problem import LeastSquaresOptions, LeastSquaresSolutions
from neula.problems.least_squares.regression import RegressionFit
from neula.problems.least_squares.report import LeastSquaresOutcome, collect
from neula.problems.least_squares.run import begin_problems, solve_problems, with_exact_zeros
from neula.problems.orthogonal.qr import qr


def begin_system(call: Call, shapes: BatchedProblem, options: LeastSquaresOptions) -> LstsqResult | None:
    """The result of the first link, before anything is read; None if that link synchronizes."""
    with call.computing():
        without_waits = replace(options, may_wait=False)
        problems = LeastSquaresProblems(call.here(shapes.matrices), call.here(shapes.columns), without_waits)
        found = begin_problems(problems)
    if found is None:
        return None
    begun, accepted = found
    values, least = begun.values, cast(int, begun.values.rank.amin())
    result: LstsqResult[Any] = LstsqResult(
        **unread(call, shapes, begun.values, accepted, options),
        optimality=math.nan,
        residual_norm=math.nan,
        rank=least,
        factorization=begun.label,
        ranks=call.hand_back(shapes.of_members(values.rank), torch.int64),
        _pending=lambda: solve_system(call, shapes, options, None, begun).reported(call),
    )
    return attached(call, shapes, result, partial(_attach, None, options, result.ranks))


def solve_system(
    call: Call,
    shapes: BatchedProblem,
    options: LeastSquaresOptions,
    weights: torch.Tensor | None,
    begun: Answer[LeastSquaresSolutions] | None = None,
) -> LeastSquaresOutcome:
    """Run or continue the chain, and attach the solution to the graphs of the operands and weights."""
    if begun is None:
        soon = solved_by_plan(call, shapes, options)
        if isinstance(soon, LstsqResult):
            return LeastSquaresOutcome(_attached(call, shapes, options, weights, soon))
        begun = soon
    problems = LeastSquaresProblems(call.here(shapes.matrices), call.here(shapes.columns), options)
    is_batch = bool(shapes.batch)
    with call.computing():
        spoilt = _spoilt(shapes, problems.b)
        if spoilt is not None:  # a column refined with others would overwrite them
            usable = problems.b.masked_fill(shapes.for_columns(spoilt)[:, None], 0.0)
            problems, begun = replace(problems, b=usable), None
        run = with_exact_zeros(solve_problems(problems, is_batch=is_batch, begun=begun), problems)
    if spoilt is not None:
        _put_nan(run, spoilt, shapes)
    report = Report(call, shapes, options, run, spoilt)
    fit: LinearFit | None = None
    if spoilt is None:
        make = fit_spread if options.over_rows.spread else RegressionFit
        fit = make(call, shapes, options, run.found.x, run.found.residual_norm)
    found = collect(report, fit=fit)
    result = _attached(call, shapes, options, weights, found)
    return LeastSquaresOutcome.from_report(result, report, is_batch=is_batch)


def _spoilt(shapes: BatchedProblem, columns: torch.Tensor) -> torch.Tensor | None:
    """Right-hand sides with NaN or Inf that share a matrix with others, shape (P, copies), if any do."""
    if not shapes.shares:
        return None
    spoilt = ~shapes.finite.to(columns.device)
    return spoilt if bool(spoilt.any()) else None


def _put_nan(run: Run[LeastSquaresSolutions], spoilt: torch.Tensor, shapes: BatchedProblem) -> None:
    """Say that nothing is known of right-hand sides with NaN or Inf."""
    values, columns = run.found, shapes.for_columns(spoilt)
    for known in (values.forward_error, values.residual_norm):
        known.masked_fill_(columns, math.nan)
    values.x.masked_fill_(columns[:, None], math.nan)
    numbers_of(run)["forward_error"][0] = np.nan  # the largest of all is not known
    reason = f"{int(spoilt.sum())} of {spoilt.numel()} problems hold NaN or Inf"
    run.attempts.append(Attempt("none", False, reason))


def _attached(
    call: Call,
    shapes: BatchedProblem,
    options: LeastSquaresOptions,
    weights: torch.Tensor | None,
    result: LstsqResult[Any],
) -> LstsqResult[Any]:
    """A result, its x attached to the graphs of the operands and weights."""
    return attached(call, shapes, result, lambda *of: _attach(weights, options, result.ranks, *of))


def _attach(
    weights: torch.Tensor | None,
    options: LeastSquaresOptions,
    ranks: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    x: torch.Tensor,
) -> torch.Tensor:
    """The solution attached to the graph of A, b and weights."""
    if x.numel() == 0 or a.numel() == 0:  # it does not depend on the numbers
        return x + 0 * a.sum() + 0 * b.sum()
    factorize = partial(qr, accuracy="fp64", engine=options.engine)
    return attach_solution(*stacked_problem(a, b, weights, options.damp), x, ranks=ranks, factorize=factorize)
