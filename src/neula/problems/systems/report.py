"""Results and warnings for solved linear systems."""

from __future__ import annotations

import math

from neula.certificates.bounds import solve_bound
from neula.certificates.forward_error import SURE
from neula.pipeline.chain import Run
from neula.pipeline.result import SolveResult
from neula.pipeline.solutions import Report, does_not_fit, rounded_away
from neula.problems.systems.problem import SystemsOptions, SystemsSolutions


def why(result: SolveResult, options: SystemsOptions, run: Run[SystemsSolutions]) -> str:
    """Why the accuracy was missed."""
    if not result.backward_error <= result.tolerance:
        asked = f"asked for {result.tolerance:.1e} ({result.method})"
        lost = rounded_away(run, result.tolerance, options.dtype)
        singular = "" if result.forward_error <= SURE else "; A is ill-conditioned or singular"
        return f"backward error {result.backward_error:.1e}, {asked}{lost}{singular}"
    if not result.forward_error <= SURE:
        return (
            f"A is ill-conditioned or singular, no digit of x is guaranteed: condition number "
            f"{result.condition:.1e}, forward error {result.forward_error:.1e} ({result.method})"
        )
    if not result.forward_error <= options.largest_error:
        return (
            f"forward error {result.forward_error:.1e}, asked for {options.largest_error:.1e}: "
            f"condition number {result.condition:.1e} ({result.method})"
        )
    return (
        f"A is so ill-conditioned that the residual of the rounded x exceeds b: condition number "
        f"{result.condition:.1e} ({result.method})"
    )


def collect(report: Report) -> SolveResult:
    """One result for the batch: the worst of its members speaks for all."""
    options = report.options
    if not math.isfinite(report.most("largest", 0.0)):
        raise does_not_fit(options.dtype)
    known = report.common()
    known["tolerance"] = solve_bound(options.target, report.shapes.a.shape[-1])
    known["growth"], known["method"] = report.worst.get("growth", 1.0), report.run.label
    return SolveResult._from_fields(known)
