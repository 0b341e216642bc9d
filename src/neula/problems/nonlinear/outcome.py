"""Results of non-linear fits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from neula.algorithms.nonlinear.levenberg_marquardt import GTOL
from neula.certificates.forward_error import SURE, digits_of
from neula.pipeline.call import Call
from neula.pipeline.result import LeastSquaresResult, report_missed
from neula.problems.nonlinear.fit import MESSAGES, NonlinearFit
from neula.problems.nonlinear.functions import complex_rows
from neula.problems.nonlinear.problem import Start
from neula.problems.nonlinear.residuals import Residuals


def result_of(fit: NonlinearFit, problem: Residuals, call: Call, start: Start) -> LeastSquaresResult:
    """The result in the library of x0, after a warning or an error where a problem is not certified."""
    at, found, batch = fit.at, fit.evidence, start.batch
    dtype = at.x.dtype

    def array(x: torch.Tensor, kind: torch.dtype = dtype) -> Any:
        return call.give_back(x.reshape(*batch, *x.shape[1:]), kind)

    def residuals(x: torch.Tensor | None) -> Any:
        if x is None:
            return None
        is_complex = problem.jacobian.values.is_complex
        return array(complex_rows(x), dtype.to_complex()) if is_complex else array(x)

    def number(values: torch.Tensor) -> Any:
        wide = values.cpu().numpy()
        return wide.reshape(batch) if batch else wide[0].item()

    worst = int(at.status.min()) if len(at.status) else GTOL
    slopes = at.near.gradient.masked_fill(fit.held, 0.0).abs().amax(1)
    at_bounds = (at.x >= start.bounds.upper).long() - (at.x <= start.bounds.lower).long()
    error = float(found.forward_error.max()) if len(at.x) else 0.0
    result = LeastSquaresResult(
        x=array(at.x),
        cost=number(at.cost),
        fun=residuals(problem.fun),
        jac=residuals(problem.jac),
        grad=array(at.near.gradient),
        optimality=number(slopes),
        active_mask=array(at_bounds, torch.int64),
        nfev=at.nfev,
        njev=at.njev,
        status=number(at.status),
        message=MESSAGES[worst],
        success=worst >= GTOL,
        converged=bool(fit.accepted.all()),
        stationarity=number(found.stationarity),
        tolerance=fit.tolerance,
        rank=number(found.rank),
        determined=number(found.determined),
        condition=number(found.condition),
        forward_error=number(found.forward_error),
        digits=max(0.0, digits_of(error, dtype)) if error >= 0 else 0.0,
        nit=number(at.steps),
        refused=number(at.refused),
        R=array(at.near.r, torch.float64),
        observations=problem.rows,
        accepted=fit.accepted.cpu().numpy().reshape(batch),
        engine=str(call.engine),
        seconds=call.seconds,
    )
    if not result.converged:
        missed = np.argwhere(~np.asarray(result.accepted)).tolist()
        report_missed(
            "the fit is not certified",
            fit.why(problem.uncertified),
            result,
            missed,
            strict=call.strict,
            unsure=not error <= SURE,
            name="x0",
        )
    return result
