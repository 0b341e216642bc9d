"""One least-squares call: its chain is run, and what came of it becomes a result."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from neula.certificates.bounds import lstsq_bound
from neula.certificates.forward_error import SURE
from neula.pipeline.call import Call
from neula.pipeline.chain import Run
from neula.pipeline.gradients import attach_solution, stacked_problem
from neula.pipeline.result import Attempt, LstsqResult
from neula.pipeline.shapes import System
from neula.pipeline.solutions import Report, accept_digits, does_not_fit, numbers_of, unsure
from neula.problems.least_squares.fit import LinearFit
from neula.problems.least_squares.prepared import Problems
from neula.problems.least_squares.problem import Members, Options
from neula.problems.least_squares.run import solve_problems, with_exact_zeros
from neula.problems.orthogonal.qr import qr


@dataclass(frozen=True)
class Solved:
    """A result, and what is to be said where it is not converged.

    Attributes
    ----------
    result : LstsqResult
    why : str
    missed : list of list of int
        Where in the batch problems are that were not accepted.
    unsure : bool
        Whether of any problem no digit of x is sure.
    """

    result: LstsqResult
    why: str
    missed: list[list[int]]
    unsure: bool

    def report(self, call: Call) -> None:
        """Warn where the accuracy was missed, or raise where the call is strict."""
        if self.result.converged:
            return
        call.report_missed(
            f"least squares is not certified to {self.result.accuracy} accuracy",
            self.why,
            self.result,
            self.missed,
            unsure=self.unsure,
        )


def solve_system(call: Call, shapes: System, options: Options, weights: torch.Tensor | None) -> Solved:
    """Run the chain, and attach the solution to the graphs of the operands and weights."""
    matrices, columns = call.here(shapes.matrices), call.here(shapes.columns)
    is_batch = bool(shapes.batch)
    with call.computing():
        spoilt = _spoilt(shapes, columns)
        if spoilt is not None:  # a column that is worked on with others would spoil them
            columns = columns.masked_fill(shapes.for_columns(spoilt)[:, None], 0.0)
        problems = Problems(matrices, columns, options)
        run = with_exact_zeros(solve_problems(problems, is_batch=is_batch), problems)
    accept_digits(run, options)
    if spoilt is not None:
        _put_nan(run, spoilt, shapes)
    report = Report(call, shapes, options, run, spoilt)
    result = _collect(report)
    if spoilt is None and not options.over_rows.spread:
        result = replace(result, fit=LinearFit(call, shapes, options, run.found.x, run.found.residual_norm))
    why = "" if result.converged else _why(result, run, options, is_batch=is_batch)
    result = report.attached(result, partial(_attach, weights, options, result.ranks))
    return Solved(result, why, report.missed(), unsure(run))


def _spoilt(shapes: System, columns: torch.Tensor) -> torch.Tensor | None:
    """Right-hand sides with NaN or Inf that share a matrix with others, shape (P, copies), if any do."""
    if not shapes.shares:
        return None
    spoilt = ~shapes.finite.to(columns.device)
    return spoilt if bool(spoilt.any()) else None


def _put_nan(run: Run[Members], spoilt: torch.Tensor, shapes: System) -> None:
    """Say that nothing is known of right-hand sides with NaN or Inf."""
    values, columns = run.found, shapes.for_columns(spoilt)
    for known in (values.forward_error, values.residual_norm):
        known.masked_fill_(columns, math.nan)
    values.x.masked_fill_(columns[:, None], math.nan)
    numbers_of(run)["forward_error"][spoilt.any(1).cpu().numpy()] = np.nan
    reason = f"{int(spoilt.sum())} of {spoilt.numel()} problems hold NaN or Inf"
    run.attempts.append(Attempt("none", False, reason))


def _why(result: LstsqResult, run: Run[Members], options: Options, *, is_batch: bool) -> str:
    accurate = result.backward_error <= result.tolerance
    if is_batch:
        return run.attempts[-1].reason
    if accurate and SURE >= result.forward_error > options.largest_error:
        return (
            f"forward error {result.forward_error:.1e}, asked for {options.largest_error:.1e}: "
            f"condition number {result.condition:.1e} ({run.label})"
        )
    if accurate and not unsure(run):  # the rank is in doubt
        return run.attempts[-1].reason
    if accurate:
        return (
            f"A is ill-conditioned, no digit of x is sure: condition number {result.condition:.1e}, "
            f"forward error {result.forward_error:.1e} ({run.label})"
        )
    return f"backward error {result.backward_error:.1e}, asked for {result.tolerance:.1e} ({run.label})"


def _collect(report: Report) -> LstsqResult:
    """One result for the batch: the worst of its members speaks for all."""
    run, options = report.run, report.options
    values, of = run.found, numbers_of(run)
    if np.isinf(of["largest"]).any():
        raise does_not_fit(options.dtype)
    m, n = options.over_rows.count(report.shapes.matrices.shape[-2]), report.shapes.matrices.shape[-1]
    ranks = of["rank"][~np.isnan(of["backward_error"])]
    norms = report.shapes.of_columns(values.residual_norm).flatten().tolist()
    return LstsqResult(
        **report.common(),
        optimality=report.worst.get("optimality", 0.0),
        tolerance=lstsq_bound(options.target, max(1, min(m, n))),
        residual_norm=norms[0] if len(norms) == 1 else norms,
        rank=int(min(ranks, default=0)) if len(run.accepted) else min(m, n),
        factorization=run.label,
        ranks=report.of_members(values.rank, 0),
    )


def _attach(
    weights: torch.Tensor | None,
    options: Options,
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
