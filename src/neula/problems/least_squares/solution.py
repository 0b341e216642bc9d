"""One least-squares call: its chain is run, and what came of it becomes a result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, cast

import numpy as np
import torch

from neula.certificates.bounds import lstsq_bound
from neula.certificates.forward_error import SURE
from neula.pipeline.call import Call
from neula.pipeline.chain import Answer, Run
from neula.pipeline.gradients import attach_solution, stacked_problem
from neula.pipeline.result import Attempt, LstsqResult
from neula.pipeline.result.deferred import Later
from neula.pipeline.shapes import BatchedProblem
from neula.pipeline.solutions import Report, attached, does_not_fit, numbers_of, rounded_away, unread, unsure
from neula.problems.least_squares.fit import LinearFit, fit_spread
from neula.problems.least_squares.plan import solved_by_plan
from neula.problems.least_squares.prepared import LeastSquaresProblems
from neula.problems.least_squares.problem import LeastSquaresOptions, LeastSquaresSolutions, norms_of
from neula.problems.least_squares.regression import RegressionFit
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
    if shapes.copies <= 1:
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


@dataclass(frozen=True)
class LeastSquaresOutcome:
    """A result, and what is to be said where it is not converged."""

    result: LstsqResult
    why: str = ""
    missed: Sequence[list[int]] = ()  # where in the batch problems are that were not accepted
    unsure: bool = False  # whether x of any problem has no guaranteed digit

    @classmethod
    def from_report(cls, result: LstsqResult, report: Report, *, is_batch: bool = False) -> Self:
        """The outcome of a run."""
        if result.converged:
            return cls(result)
        reason = why(result, report.run, cast(LeastSquaresOptions, report.options), is_batch=is_batch)
        return cls(result, reason, report.missed(), unsure(report.run))

    def reported(self, call: Call) -> LstsqResult:
        """The result, after a warning where the accuracy was missed, or an error where the call is strict."""
        if not self.result.converged:
            what = f"least squares is not certified to {self.result.accuracy} accuracy"
            call.report_missed(what, self.why, self.result, self.missed, unsure=self.unsure)
        return self.result


def collect(report: Report, passes: int = 0, fit: Any = None) -> LstsqResult:
    """One result for the batch: the worst of its members speaks for all."""
    run, options = report.run, cast(LeastSquaresOptions, report.options)
    values, of = run.found, numbers_of(run)
    if np.isinf(of["largest"]).any():
        raise does_not_fit(options.dtype)
    m, n = options.over_rows.count(report.shapes.a.shape[-2]), report.shapes.a.shape[-1]
    full_rank = options.full_rank(m, n)
    ranks = of["rank"][~np.isnan(of["backward_error"])]
    return LstsqResult._from_fields(
        {
            **report.common(),
            "optimality": report.worst.get("optimality", 0.0),
            "tolerance": lstsq_bound(options.target, max(1, full_rank)),
            "residual_norm": Later(lambda: norms_of(values.residual_norm, report.layout)),
            "rank": int(ranks.min(initial=full_rank)) if len(ranks) else min(m, n) * (not len(run.accepted)),
            "full_rank": full_rank,
            "factorization": run.label,
            "ranks": report.of_members(lambda: values.rank, 0),
            "passes": passes,
            "_fit": fit,
        }
    )


def why(
    result: LstsqResult, run: Run[LeastSquaresSolutions], options: LeastSquaresOptions, *, is_batch: bool
) -> str:
    """Why the accuracy was missed."""
    accurate = result.backward_error <= result.tolerance
    if is_batch:
        return run.attempts[-1].reason + rounded_away(run, result.tolerance, options.dtype)
    if accurate and SURE >= result.forward_error > options.largest_error:
        return (
            f"forward error {result.forward_error:.1e}, asked for {options.largest_error:.1e}: "
            f"condition number {result.condition:.1e} ({run.label})"
        )
    if accurate and run.doubt:
        return f"no digit of x is guaranteed: {run.doubt} ({run.label})"
    if accurate and not unsure(run):
        return run.attempts[-1].reason
    if accurate:
        return (
            f"A is ill-conditioned, no digit of x is guaranteed: condition number {result.condition:.1e}, "
            f"forward error {result.forward_error:.1e} ({run.label})"
        )
    digits = ", no digit of x is guaranteed" if unsure(run) else ""
    return (
        f"backward error {result.backward_error:.1e}, asked for {result.tolerance:.1e}{digits} ({run.label})"
        + rounded_away(run, result.tolerance, options.dtype)
    )
