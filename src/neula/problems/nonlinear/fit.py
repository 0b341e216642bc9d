"""A fit from its start to its evidence, whatever the residuals come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from neula.algorithms.nonlinear.damped import norm, picked, triangle
from neula.algorithms.nonlinear.differentiate import MEASURED, PROBES, SHORT
from neula.algorithms.nonlinear.feasible import Bounds
from neula.algorithms.nonlinear.gauss_newton import newton_steps, polish
from neula.algorithms.nonlinear.levenberg_marquardt import (
    BOTH,
    EXHAUSTED,
    FTOL,
    GTOL,
    RUNNING,
    STOPPED,
    XTOL,
    Iterates,
    Linearization,
    Tolerances,
    leave_flat_bounds,
    levenberg_marquardt,
)
from neula.algorithms.nonlinear.losses import Loss
from neula.certificates.forward_error import SURE, digits_of
from neula.certificates.verdict import Evidence
from neula.engines import Engine
from neula.kernels.precision import exact_matmul, plain_arithmetic
from neula.pipeline.call import Call
from neula.pipeline.progress import Progress, digits_done, stage
from neula.pipeline.result import LeastSquaresResult, report_missed
from neula.problems.nonlinear.functions import (
    Jacobian,
    RowFunction,
    complex_rows,
    real_rows,
    refuse_dependence,
)
from neula.problems.nonlinear.problem import (
    Errors,
    NonlinearEvidence,
    Start,
    evidence_of,
    limits_of,
    usual_tolerance,
)
from neula.problems.orthogonal.certified import certified_triangle

POLISHED = 1 << 24
"""Elements of a Jacobian up to which x is refined as far as rounding errors allow: a few more Jacobians. Of
larger ones each takes as long as all the rest of many a fit."""

MORE_CALLS = 30  # calls that the trust region may take for it

ROUGH, SHORTER = 1e-4, (2.0**-3, 2.0**-6, 2.0**-9, 2.0**-12)
"""Relative error of a column from which on shorter steps of differences are tried, and by what factors."""

MESSAGES = {
    STOPPED: "Stopped because `callback` function raised `StopIteration` or returned `True`",
    EXHAUSTED: "The maximum number of function evaluations is exceeded.",
    GTOL: "`gtol` termination condition is satisfied.",
    FTOL: "`ftol` termination condition is satisfied.",
    XTOL: "`xtol` termination condition is satisfied.",
    BOTH: "Both `ftol` and `xtol` termination conditions are satisfied.",
}
"""SciPy's."""


@dataclass(frozen=True)
class NonlinearFit:
    at: Iterates
    evidence: NonlinearEvidence
    tolerance: float  # largest accepted stationarity
    accepted: torch.Tensor  # bool, shape (P,)
    held: torch.Tensor  # bool, shape (P, n): variables that a bound stops

    def why(self, uncertified: str) -> str:
        place = int((~self.accepted).nonzero()[0, 0])
        status, found = int(self.at.status[place]), self.evidence
        reasons = [MESSAGES[status]] if status <= 0 else []
        refused = int(self.at.refused[place])
        if refused:
            reasons.append(f"{refused} steps were refused, since fun is not finite where they led")
        if not found.full[place]:
            reasons.append(
                f"the Jacobian has rank {int(found.rank[place])} at x: some variables, or combinations of "
                "them, have no influence on the residuals"
            )
        left = float(found.stationarity[place])
        if not left <= self.tolerance:
            reasons.append(f"stationarity {left:.1e}, at most {self.tolerance:.1e} asked for")
        if bool(found.full[place]) and not float(found.forward_error[place]) <= SURE:
            reasons.append("no digit of x is guaranteed")
        return "; ".join([*reasons, *([uncertified] if uncertified else [])])


class Watched(NamedTuple):
    callback: Callable[..., Any] | None
    verbose: int
    progress: Progress | None
    wrap: Callable[[torch.Tensor], Any]  # makes an array of the caller's library


def run_fit(problem: Residuals, start: Start, tolerances: Tolerances, watched: Watched) -> NonlinearFit:
    """Minimize, refine, and measure."""
    everyone = torch.arange(len(start.x), device=start.x.device)
    cost = problem.cost(start.x, everyone)
    _check_finite(cost.isfinite(), "residuals are", start)
    near = problem.linearize(start.x, everyone)
    _check_finite(near.finite, "the Jacobian is", start)
    at = Iterates.begin(start.x, cost, near, start.scale, problem.jacobian.eps)
    watch = _watcher(watched, tolerances, start)
    rescale = start.scale is None
    levenberg_marquardt(problem, at, start.bounds, tolerances, rescale=rescale, watch=watch)
    if len(leave_flat_bounds(problem, at, start.bounds, start.x)):
        levenberg_marquardt(problem, at, start.bounds, tolerances, rescale=rescale, watch=watch)
    rate = torch.zeros_like(cost)
    small = problem.rows * start.x.shape[1] <= POLISHED
    which = _to_refine(at, tolerances)
    if small and len(which):
        rate = _refine(problem, at, start, which, rescale=rescale)
    if watched.verbose:
        _print_end(at, cost)
    errors = problem.errors(at, start.bounds)
    if problem.jacobian.mode == "5-point" and bool((errors.columns[which] > ROUGH).any()):
        _shorten(problem, at, start.bounds, errors, which)
        rate = _refine(problem, at, start, which, rescale=rescale)
        errors = problem.errors(at, start.bounds)
    found, limits = evidence_of(at, start.bounds, rate, problem.rows, errors), limits_of(tolerances)
    unfinished = (at.status < GTOL) | bool(problem.uncertified)
    evidence = Evidence.from_errors(found.stationarity, found.forward_error, unfinished.double())
    held = start.bounds.held(at.x, -at.near.gradient)
    return NonlinearFit(at, found, limits.backward_error, limits.accept(evidence), held)


def _to_refine(at: Iterates, tolerances: Tolerances) -> torch.Tensor:
    """Problems that have passed a test with its usual tolerance, or a smaller one."""
    usual = usual_tolerance(at.x.dtype)
    tight = torch.zeros_like(at.status, dtype=torch.bool)
    for status in (GTOL, FTOL, XTOL, BOTH):
        tight |= (at.status == status) & (tolerances.select(status) <= usual)
    return tight.nonzero()[:, 0]


def _refine(
    problem: Residuals, at: Iterates, start: Start, which: torch.Tensor, *, rescale: bool
) -> torch.Tensor:
    """Continue to what rounding errors allow; returns by what the last steps shrank."""
    # Gauss-Newton steps do, but where a valley is curved they may lead up its side: there the trust region
    # continues, with tight tolerances, before they are tried again.
    if problem.jacobian.take_care():
        x = picked(at.x, which)
        problem.cost(x, which)
        at.near = at.near.placed(which, problem.linearize(x, which))
    rate, tiny = polish(problem, at, start.bounds, which), usual_tolerance(at.x.dtype) ** 1.5
    far = newton_steps(at, start.bounds, which)[1] > tiny
    if bool(far.any()):
        which, status = which[far], at.status.clone()
        at.status[which] = RUNNING
        tight = Tolerances(tiny, tiny, tiny, at.nfev + MORE_CALLS)
        levenberg_marquardt(problem, at, start.bounds, tight, rescale=rescale)
        at.status = status
        rate[which] = polish(problem, at, start.bounds, which)[which]
    return rate


def _shorten(problem: Residuals, at: Iterates, bounds: Bounds, errors: Errors, which: torch.Tensor) -> None:
    """Take shorter differences by variables for which usual ones are too long: a peak far from zero."""
    best, kept = errors.columns, torch.ones_like(errors.columns)

    def linearize(part: torch.Tensor) -> None:
        problem.jacobian.part, x = part, picked(at.x, which)
        problem.cost(x, which)
        at.near = at.near.placed(which, problem.linearize(x, which))

    for part in SHORTER:
        rough = best > ROUGH
        if not bool(rough[which].any()):
            break
        tried = torch.where(rough, part, kept)
        linearize(tried)
        found = problem.errors(at, bounds).columns
        better = found < best
        best, kept = torch.where(better, found, best), torch.where(better, tried, kept)
    linearize(kept)


def _check_finite(finite: torch.Tensor, what: str, start: Start) -> None:
    if not bool(finite.all()):
        place = int((~finite).nonzero()[0, 0])
        whose = f" of problem {place}" if start.batch else ""
        raise ValueError(f"{what} not finite at x0{whose}: start where fun is defined")


def _watcher(watched: Watched, tolerances: Tolerances, start: Start) -> Callable[[Iterates], bool]:
    """A function that reports each step, by callback, print or progress; it returns True to stop."""
    callback, verbose, progress, wrap = watched
    done = stage(progress, "levenberg-marquardt")
    stop = _with_state(callback)
    if callback is None and verbose < 2 and progress is None:
        return lambda at: False
    if verbose >= 2:
        print(f"{'Iteration':^15}{'Total nfev':^15}{'Cost':^15}{'Optimality':^15}")

    def watch(at: Iterates) -> bool:
        steps = int(at.steps.max())
        slope = float(at.near.gradient.abs().max())
        if verbose >= 2:
            print(f"{steps:^15}{at.nfev:^15}{float(at.cost.sum()):^15.4e}{slope:^15.2e}")
        if progress is not None:
            cosine = float(at.near.cosine(start.bounds.held(at.x, -at.near.gradient)).max())
            done(
                max(
                    digits_done(cosine, min(0.5, tolerances.gtol or 1e-8)),
                    float((at.status != RUNNING).double().mean()),
                )
            )
        if stop is None:
            return False
        shape = (*start.batch, at.x.shape[1])
        state = SimpleNamespace(
            x=wrap(at.x.reshape(shape).clone()),
            cost=_number(at.cost, start.batch, wrap),
            nit=steps,
            nfev=at.nfev,
            optimality=slope,
        )
        try:
            return bool(stop(state) or False)
        except StopIteration:
            return True

    return watch


def _with_state(callback: Callable[..., Any] | None) -> Callable[[SimpleNamespace], Any] | None:
    """SciPy's two kinds of callbacks: of ``intermediate_result``, or of x."""
    import inspect

    if callback is None:
        return None
    if set(inspect.signature(callback).parameters) == {"intermediate_result"}:
        return lambda state: callback(intermediate_result=state)
    return lambda state: callback(state.x)


def _number(values: torch.Tensor, batch: tuple[int, ...], wrap: Callable[[torch.Tensor], Any]) -> Any:
    return wrap(values.reshape(batch).clone()) if batch else float(values[0])


def _print_end(at: Iterates, first: torch.Tensor) -> None:
    status = int(at.status.min()) if len(at.status) else GTOL
    print(MESSAGES[status])
    print(
        f"Function evaluations {at.nfev}, initial cost {float(first.sum()):.4e}, final cost "
        f"{float(at.cost.sum()):.4e}, first-order optimality {float(at.near.gradient.abs().max()):.2e}."
    )


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
            no_digits=not error <= SURE,
            name="x0",
        )
    return result


REFLECTED = 1e7
"""Work ``m n^2`` up to which reflections of the library take less than the evidence for anything else."""


@dataclass
class Residuals:
    """Residuals of a batch of problems, all at once or block by block."""

    call: RowFunction
    jacobian: Jacobian
    loss: Loss
    engine: Engine
    # Arguments of the function, one after the other: only one block of the Jacobian is in memory.
    blocks: Sequence[Any] | None = None
    # fun, jac: of each problem at the point where it was linearized last, shapes (P, m) and (P, m, n); the
    # second is scaled by the loss.
    fun: torch.Tensor | None = None
    jac: torch.Tensor | None = None
    uncertified: str = ""  # why the last triangular factor is not certified, if it is not
    rows: int = 0  # residuals of a problem; complex ones count twice
    _trial: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32, device="cpu"))
    _of: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float32, device="cpu"))

    @property
    def _items(self) -> Sequence[Any]:
        return (None,) if self.blocks is None else self.blocks

    def cost(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        """Half the sum of losses, shape (P,)."""
        found, rows = torch.zeros(len(x), dtype=torch.float64, device=self.engine.device), 0
        for item in self._items:
            self._trial, self._of = self._residuals(x, which, item), which
            found, rows = found + self.loss.cost(self._trial), rows + self._trial.shape[1]
        if self.rows and rows != self.rows:
            raise ValueError(f"fun returned {self.rows} residuals before, and now {rows}")
        self.rows = rows
        return found

    def linearize(self, x: torch.Tensor, which: torch.Tensor) -> Linearization:
        """At points for which :meth:`cost` was called last, or some: R of earlier blocks above later rows."""
        whole: Linearization | None = None
        for item in self._items:
            if self.blocks is not None:
                f = self._residuals(x, which, item)
            elif len(which) == len(self._of):
                f = self._trial
            else:
                f = self._trial[torch.searchsorted(self._of, which)]
            j = self._scaled_jacobian(x, which, item, f)
            if self.blocks is None:
                if self.fun is None or self.jac is None or len(which) == len(self.fun):
                    self.fun, self.jac = f, j
                else:
                    self.fun[which], self.jac[which] = f, j
            size, f = self.loss.size(f), f * self.loss.weights(f)[1]
            with plain_arithmetic(self.engine.device):
                gradient = exact_matmul(j.mT, f[..., None])[..., 0]
                norms = norm(j, dim=1)
                if whole is not None:
                    j, f = torch.cat([whole.r, j], 1), torch.cat([whole.c, f], 1)
                    gradient, norms = gradient + whole.gradient, torch.hypot(norms, whole.norms)
                    size = torch.hypot(size, whole.size)
                whole = Linearization(*self._factor(j, f), gradient, norms, size)
        assert whole is not None
        return whole

    def _residuals(self, x: torch.Tensor, which: torch.Tensor, item: Any) -> torch.Tensor:
        # The first time as autograd sees it.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.rows):
            found = self.call(x, which, item)
            refuse_dependence(found, "fun")
        self.jacobian.values = found.dtype
        found = real_rows(found.detach())
        # A copy: a function may write into the same memory each time.
        return found.to(self.engine.device, torch.float64, copy=True)

    def errors(self, at: Iterates, bounds: Bounds) -> Errors:
        """Errors of the residuals and of the Jacobian at the points where it was computed last."""
        # Differences: truncation and rounding errors together, by how much shorter steps change them.
        x, near, left = at.x, at.near, self._unexplained(at, bounds)
        least = torch.full_like(near.norms, self.jacobian.noise)
        if not self.jacobian.approximate:
            return Errors(left, least, least * near.size[:, None])
        everyone, square = torch.arange(len(x), device=x.device), torch.zeros_like(least)
        slope = square.clone()
        for item in self._items:
            f = self._residuals(x, everyone, item) if self.fun is None else self.fun
            j = self._scaled_jacobian(x, everyone, item, f) if self.jac is None else self.jac
            change = self._scaled_jacobian(x, everyone, item, f, SHORT) - j
            square += change.square().sum(1)
            slope += (change * (f * self.loss.weights(f)[1])[..., None]).sum(1)
        columns = _bounded(MEASURED * square.sqrt() / near.norms, least)
        # Rounding errors are nearly orthogonal to the residuals, truncation errors may not be.
        products = (
            MEASURED * slope.abs() / near.norms + columns * (near.size / max(self.rows, 1) ** 0.5)[:, None]
        )
        return Errors(left, columns, _bounded(products, least * near.size[:, None]))

    def _unexplained(self, at: Iterates, bounds: Bounds) -> torch.Tensor:
        """Length of what changes residuals, other than the Jacobian, where x changes by nearly nothing."""
        worst = torch.zeros_like(at.near.size)
        if self.fun is None or self.jac is None:
            return worst
        x, everyone = at.x.double(), torch.arange(len(at.x), device=at.x.device)
        signed = x * (1 - 2 * (torch.arange(x.shape[1], device=x.device) % 2))
        rows, weights = self.loss.weights(self.fun)
        for probe in PROBES:
            point = bounds.clip(x + probe * at.eps * signed).to(at.x.dtype)
            slope = (self.jac @ (point - x)[..., None])[..., 0]
            change = (self._residuals(point, everyone, None) - self.fun) * rows
            left = norm((change - slope) * (weights / rows).nan_to_num(0.0), dim=1)
            worst = torch.fmax(worst, left)
            if not bool((2 * left > norm(slope, dim=1)).any()):
                break
        return worst

    def _scaled_jacobian(
        self, x: torch.Tensor, which: torch.Tensor, item: Any, f: torch.Tensor, part: float = 1.0
    ) -> torch.Tensor:
        """Column-major: derivatives come by columns, and so do factorizations go."""
        count, n = x.shape
        j = torch.empty(count, n, f.shape[1], dtype=torch.float64, device=self.engine.device).mT
        with torch.no_grad():
            self.jacobian.write(x, which, item, f.to(x.device, x.dtype), j, part)
        if self.loss.rho is not None:
            j *= self.loss.weights(f)[0][..., None]
        return j

    def _factor(self, j: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count, m, n = j.shape
        small = j.device.type == "cpu" and count * m * n * n <= REFLECTED * count
        if small or m < n or not j.numel():
            return triangle(torch.cat([j.mT, f[:, None]], 1).mT)  # by columns, as they are
        found = certified_triangle(j, f[..., None], self.engine)
        accepted = found.accepted or not bool(j.isfinite().all())
        self.uncertified = "" if accepted else f"the Jacobian's QR: {found.attempts[-1].reason}"
        return found.r, found.c[..., 0]


def _bounded(errors: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Errors that are measured; Inf where they cannot be."""
    return torch.maximum(least, torch.nan_to_num(errors, torch.inf))
