"""Results and warnings for solved least-squares problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np
import torch

from neula.certificates.bounds import lstsq_bound
from neula.certificates.forward_error import SURE
from neula.pipeline.call import Call
from neula.pipeline.chain import Run
from neula.pipeline.result import LstsqResult
from neula.pipeline.result.deferred import Later
from neula.pipeline.shapes import BatchedProblem
from neula.pipeline.solutions import Report, does_not_fit, numbers_of, rounded_away, unsure
from neula.problems.least_squares.problem import LeastSquaresOptions, LeastSquaresSolutions


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


def norms_of(residual_norm: torch.Tensor, shapes: BatchedProblem) -> float | list[float]:
    """A number, or those of all right-hand sides."""
    norms: list[float] = shapes.of_columns(residual_norm).flatten().tolist()
    return norms[0] if len(norms) == 1 else norms


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
