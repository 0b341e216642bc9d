"""The method of Levenberg and Marquardt for a batch of problems, each at its own pace.

J. J. Moré, "The Levenberg-Marquardt algorithm: implementation and theory", Numerical Analysis, Lecture Notes
in Mathematics 630, 1978: a model of the sum of squares, from the triangular factor of the Jacobian, is
minimized within a radius that grows where the model is right and shrinks where it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from neula.algorithms.nonlinear.damped import norm, picked, placed
from neula.algorithms.nonlinear.feasible import Bounds, Quadratic, feasible_steps

WORTH = 1e-4  # part of the promised decrease with which a step is taken

WRONG, RIGHT = 0.25, 0.75
"""Parts of the promised decrease below which the radius shrinks, and from which on it grows."""

FIRST_RADIUS = 1.0
"""Times the length of x, scaled: with Moré's 100 the first step may end where the Jacobian vanishes."""

FLAT = 1e-4
"""Part of the largest norm that a column of the Jacobian has had, below which its variable does nothing."""

RUNNING, STOPPED, EXHAUSTED, GTOL, FTOL, XTOL, BOTH = -9, -2, 0, 1, 2, 3, 4
"""Status of a problem; SciPy's numbers."""


@dataclass(frozen=True)
class Linearization:
    """Residuals f and their Jacobian J at x, for each problem of a batch."""

    r: torch.Tensor  # shape (batch, n, n): triangular factor of J
    c: torch.Tensor  # shape (batch, n): Q^T f
    gradient: torch.Tensor  # shape (batch, n): J^T f
    norms: torch.Tensor  # shape (batch, n): of the columns of J
    size: torch.Tensor  # shape (batch,): ||f||; with a loss that of the residuals weighted by its slope

    def at(self, which: torch.Tensor) -> Linearization:
        """The linearization of some problems; itself, if they are all."""
        if which.shape[0] == self.size.shape[0]:
            return self
        return Linearization(*(getattr(self, name)[which] for name in self.__dataclass_fields__))

    def placed(self, which: torch.Tensor, other: Linearization) -> Linearization:
        names = self.__dataclass_fields__
        return Linearization(*(placed(getattr(self, name), which, getattr(other, name)) for name in names))

    @property
    def finite(self) -> torch.Tensor:
        """Mask of the problems whose linearization holds neither NaN nor Inf."""
        return (norm(self.r, torch.inf, dim=(1, 2)) + norm(self.c, torch.inf, dim=1)).isfinite()

    def cosine(self, held: torch.Tensor) -> torch.Tensor:
        """Largest cosine of the angle between f and a column of J that is not held, shape (batch,)."""
        lengths = self.norms * self.size[:, None]
        cosines = torch.where(held | (lengths == 0), 0.0, self.gradient.abs() / lengths)
        return cosines.amax(1)


class LinearizableResiduals(Protocol):
    """Residuals of a batch of problems; ``which`` says of which ones, by their numbers."""

    def cost(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        """Half the sum of losses, shape (batch,); NaN or Inf where the residuals are not finite."""

    def linearize(self, x: torch.Tensor, which: torch.Tensor) -> Linearization:
        """At points for which :meth:`cost` was called last."""


@dataclass(frozen=True)
class Tolerances:
    """When to stop, in SciPy's sense."""

    ftol: float  # relative change of the cost
    xtol: float  # relative change of x, scaled
    gtol: float  # cosine of the angle between residuals and any column of the Jacobian
    max_nfev: int  # calls of the function

    def select(self, status: int) -> float:
        """The tolerance of a test that was passed."""
        both = max(self.ftol, self.xtol)
        return {GTOL: self.gtol, FTOL: self.ftol, XTOL: self.xtol, BOTH: both}[status]

    @property
    def stationarity(self) -> float:
        """The stationarity that these tolerances ask for: the relative decrease of the cost is its square."""
        return max(self.ftol**0.5, self.xtol, self.gtol)


@dataclass
class Iterates:
    """Current iterate of each problem of a batch."""

    x: torch.Tensor  # shape (batch, n)
    cost: torch.Tensor  # shape (batch,)
    near: Linearization  # at x
    scale: torch.Tensor  # shape (batch, n): of the trust region
    radius: torch.Tensor  # shape (batch,)
    damping: torch.Tensor  # shape (batch,)
    status: torch.Tensor  # int, shape (batch,)
    steps: torch.Tensor  # int, shape (batch,): that were tried
    refused: torch.Tensor  # int, shape (batch,): steps that led to where the function is not finite
    peaks: torch.Tensor  # shape (batch, n): largest norms that the columns of the Jacobian have had
    eps: float  # relative rounding errors of x and of the residuals
    # nfev, njev: calls for residuals and for Jacobians, each for all problems that are left.
    nfev: int = 1
    njev: int = 1

    @classmethod
    def begin(
        cls, x: torch.Tensor, cost: torch.Tensor, near: Linearization, scale: torch.Tensor | None, eps: float
    ) -> Iterates:
        """At x, with the scale of the caller or that of the Jacobian."""
        peaks = near.norms.clone()
        columns = torch.where(peaks > 0, peaks, 1.0)
        scale = columns if scale is None else scale.clone()
        far = norm(scale * x.to(scale.dtype), dim=1)
        zeros = torch.zeros_like(cost, dtype=torch.long)
        return cls(
            x=x.clone(),
            cost=cost.clone(),
            near=near,
            scale=scale,
            radius=FIRST_RADIUS * torch.where(far > 0, far, 1.0),
            damping=torch.zeros_like(cost),
            status=zeros + RUNNING,
            steps=zeros.clone(),
            refused=zeros.clone(),
            peaks=peaks,
            eps=eps,
        )

    @property
    def open(self) -> torch.Tensor:
        """Numbers of the problems that have not come to an end."""
        return (self.status == RUNNING).nonzero()[:, 0]


def levenberg_marquardt(
    problem: LinearizableResiduals,
    at: Iterates,
    bounds: Bounds,
    tolerances: Tolerances,
    *,
    rescale: bool,
    watch: Callable[[Iterates], bool] = lambda at: False,
) -> None:
    """Minimize the cost of each problem of a batch.

    ``at``: where to begin, within the bounds; in the end where it has come to. ``rescale``: whether the trust
    region is to follow the norms of the columns. ``watch``: called after each step; True stops all problems.
    """
    _test_gradient(at, bounds, tolerances, at.open)
    first = True
    while len(which := at.open):
        if at.nfev >= tolerances.max_nfev:
            at.status[which] = EXHAUSTED
            return
        taken = _step(problem, at, bounds, tolerances, which, first=first)
        if len(taken):
            norms = picked(at.near.norms, taken)
            if rescale:
                at.scale = placed(at.scale, taken, torch.maximum(picked(at.scale, taken), norms))
            at.peaks = placed(at.peaks, taken, torch.maximum(picked(at.peaks, taken), norms))
            _test_gradient(at, bounds, tolerances, taken)
        first = False
        if watch(at):
            at.status[at.open] = STOPPED


def _step(
    problem: LinearizableResiduals,
    at: Iterates,
    bounds: Bounds,
    tolerances: Tolerances,
    which: torch.Tensor,
    *,
    first: bool,
) -> torch.Tensor:
    """Try a step of each problem that is open; returns which problems have moved."""
    x, here, cost = picked(at.x, which), bounds.at(which), picked(at.cost, which)
    wide, near, scale = x.double(), at.near.at(which), picked(at.scale, which)
    model, radius = Quadratic(near.r, near.c, scale), picked(at.radius, which)
    p, damping = feasible_steps(wide, model, here, radius, picked(at.damping, which))
    trial = here.clip(wide + p).to(x.dtype)
    new_cost = problem.cost(trial, which)
    at.nfev += 1
    finite = new_cost.isfinite()
    at.steps = placed(at.steps, which, picked(at.steps, which) + 1)
    at.refused = placed(at.refused, which, picked(at.refused, which) + ~finite)
    length, promised = norm(scale * p, dim=1), model.decrease(p)
    actual = torch.where(finite, cost - new_cost, -torch.inf)
    ratio = torch.where(promised > 0, actual / promised, 0.0)
    radius, damping = _resized(
        torch.minimum(radius, length) if first else radius,
        damping, length, ratio, actual, -(near.gradient * p).sum(1),
    )  # fmt: skip
    at.radius, at.damping = placed(at.radius, which, radius), placed(at.damping, which, damping)
    better = (ratio > WORTH).nonzero()[:, 0]
    moved = picked(which, better)
    if len(moved):
        moved = move(problem, at, moved, picked(trial, better), picked(new_cost, better))
    _test_step(at, tolerances, which, length, norm(scale * wide, dim=1), ratio, actual, promised, cost)
    return moved


def move(
    problem: LinearizableResiduals, at: Iterates, which: torch.Tensor, x: torch.Tensor, cost: torch.Tensor
) -> torch.Tensor:
    """Go to x, but where the Jacobian is not finite there; returns which problems have moved."""
    near = problem.linearize(x, which)
    at.njev += 1
    good = near.finite
    if not bool(good.all()):
        lost = which[~good]
        problem.cost(at.x[lost], lost)
        at.near = at.near.placed(lost, problem.linearize(at.x[lost], lost))
        at.radius[lost] = norm(at.scale[lost] * (x[~good].double() - at.x[lost].double()), dim=1) / 4
        at.refused[lost] += 1
        which, x, cost, near = which[good], x[good], cost[good], near.at(good.nonzero()[:, 0])
    at.x, at.cost = placed(at.x, which, x), placed(at.cost, which, cost)
    at.near = at.near.placed(which, near)
    return which


def leave_flat_bounds(
    problem: LinearizableResiduals, at: Iterates, bounds: Bounds, begun: torch.Tensor
) -> torch.Tensor:
    """Go halfway back from bounds at which a variable has ceased to have an influence, where the cost falls.

    There the gradient vanishes whether the cost is least or largest: ``sqrt(t^2 + c^2)`` with c >= 0 does not
    change at c = 0, where a step that is too long ends. Problems began at ``begun``. Returns the numbers of
    those that have moved, and are to continue.
    """
    if bounds.none:
        return at.open[:0]
    ends = (at.x <= bounds.lower) | (at.x >= bounds.upper)
    flat = ends & (at.x != begun) & (at.near.norms <= FLAT * at.peaks)
    which = (flat.any(1) & (at.status > EXHAUSTED)).nonzero()[:, 0]
    if not len(which):
        return which
    x = torch.where(flat, at.x + (begun - at.x) / 2, at.x)[which]
    cost = problem.cost(x, which)
    at.nfev += 1
    better = (cost < at.cost[which]).nonzero()[:, 0]
    which = which[better]
    if len(which):
        which = move(problem, at, which, x[better], cost[better])
        at.status[which] = RUNNING
        at.radius[which] = FIRST_RADIUS * norm(at.scale[which] * (at.x[which] - begun[which]).double(), dim=1)
        at.damping[which] = 0.0
    return which


def _resized(
    radius: torch.Tensor,
    damping: torch.Tensor,
    length: torch.Tensor,
    ratio: torch.Tensor,
    actual: torch.Tensor,
    slope: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Moré's rules for the radius: after a step that was too long, by a parabola through the costs."""
    parabola = torch.where(actual >= 0, 0.5, 0.5 * slope / (slope - actual))
    shrink = torch.nan_to_num(parabola, 0.1, 0.1, 0.1).clamp(0.1, 0.5)
    smaller = shrink * torch.minimum(radius, 10 * length)
    grows = (ratio >= RIGHT) | ((damping == 0) & (ratio > WRONG))
    wrong = ratio <= WRONG
    radius = torch.where(wrong, smaller, torch.where(grows, 2 * length, radius))
    return radius, torch.where(wrong, damping / shrink, torch.where(grows, 0.5 * damping, damping))


def _test_gradient(at: Iterates, bounds: Bounds, tolerances: Tolerances, which: torch.Tensor) -> None:
    near = at.near.at(which)
    held = bounds.at(which).held(picked(at.x, which), -near.gradient)
    at.status[which[near.cosine(held) <= tolerances.gtol]] = GTOL


def _test_step(
    at: Iterates,
    tolerances: Tolerances,
    which: torch.Tensor,
    length: torch.Tensor,
    far: torch.Tensor,
    ratio: torch.Tensor,
    actual: torch.Tensor,
    promised: torch.Tensor,
    cost: torch.Tensor,
) -> None:
    """SciPy's tests of a step; where no more than rounding errors is promised there is nothing to gain."""
    small = (promised <= tolerances.ftol * cost) & (actual < tolerances.ftol * cost)
    small &= (ratio > WRONG) | (promised <= at.eps * cost)
    short = length <= tolerances.xtol * (tolerances.xtol + far)
    found = torch.where(small & short, BOTH, torch.where(small, FTOL, XTOL))
    done = small | short
    at.status[which[done]] = found[done]
