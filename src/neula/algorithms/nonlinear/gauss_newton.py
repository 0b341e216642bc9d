"""Gauss-Newton steps at the end of a fit: to the accuracy that rounding errors allow.

A trust region stops by the cost, which is flat at a minimum: it cannot distinguish x from its neighbours
within the square root of the unit roundoff. The step itself can. It shrinks by a nearly constant factor,
which also says how far the limit is.
"""

from __future__ import annotations

import torch

from neula.algorithms.nonlinear.damped import norm, picked, upper_solve
from neula.algorithms.nonlinear.feasible import Bounds, without
from neula.algorithms.nonlinear.levenberg_marquardt import (
    Iterates,
    LinearizableResiduals,
    Linearization,
    move,
)
from neula.certificates.residuals import X
from neula.kernels.small_problems.refining import over

MOST = 30  # steps; of those that shrink by a tenth each, 30 gain a digit and a half
STAGNANT = 0.9  # a step that is longer than this part of the one before is the last one
ROUNDINGS = 4  # units in the last place by which residuals and their products with Q are taken to err
NEAR = 0.1  # a step that is longer than this part of x is none to end with


def newton_steps(at: Iterates, bounds: Bounds, which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gauss-Newton steps of the variables that are not held by bounds, and their lengths relative to x.

    Lengths are measured in the norms of the columns of the Jacobian, and infinite where J is singular. Where
    x is zero they are relative to where the step leads, and so 1: absolute ones would depend on the units of
    the residuals.
    """
    near, x = at.near.at(which), picked(at.x, which).double()
    held = bounds.at(which).held(x, -near.gradient)
    r, c = without(near.r, near.c, held)
    p = -upper_solve(r, c).masked_fill(held, 0.0)
    far = norm(near.norms * x, dim=1)
    length = norm(near.norms * p, dim=1)
    length = over(length, torch.where(far > 0, far, length))
    return p, torch.where(p.isfinite().all(1), length, torch.inf)


def polish(problem: LinearizableResiduals, at: Iterates, bounds: Bounds, which: torch.Tensor) -> torch.Tensor:
    """Continue from where the trust region has stopped, while steps shrink and the cost does not rise.

    ``which`` are problems that have come to a minimum; ``at`` changes. Returns by what steps shrink, of all
    problems; zero where nothing was left to gain.
    """
    rate = torch.zeros_like(at.cost)
    p, length = newton_steps(at, bounds, which)
    for _ in range(MOST):
        near, x = at.near.at(which), picked(at.x, which).double()
        far = norm(near.norms * x, dim=1)
        # No step is a part of zero.
        gains = _is_more_than_rounding(near, far, p, at.eps) & ((length <= NEAR) | ~x.any(1))
        on = gains.nonzero()[:, 0]
        which, p, length, far = picked(which, on), picked(p, on), picked(length, on), picked(far, on)
        if not len(which):
            break
        x = picked(x, on) + p
        inside = (bounds.at(which).clip(x) == x).all(1)
        trial = x.to(at.x.dtype)
        cost = problem.cost(trial, which)
        at.nfev += 1
        most = allowed_cost(picked(at.cost, which), far, picked(near.size, on), at.eps)
        good = inside & (cost <= most)
        moved = which[good]
        if not len(moved) or len(move(problem, at, moved, trial[good], cost[good])) < len(moved):
            break
        p, shorter = newton_steps(at, bounds, moved)
        rate[moved] = shorter / length[good]
        goes_on = rate[moved] <= STAGNANT
        which, p, length = moved[goes_on], p[goes_on], shorter[goes_on]
    return rate


def _is_more_than_rounding(
    near: Linearization, far: torch.Tensor, p: torch.Tensor, eps: float
) -> torch.Tensor:
    """Whether steps are longer than about what rounding errors of the residuals make of them, from below.

    The condition number is at least the reciprocal of the smallest diagonal element of R with columns of
    norm 1. NaN, of columns that are zero, is not longer.
    """
    diagonal = near.r.diagonal(dim1=1, dim2=2).abs() / near.norms
    return norm(near.norms * p, dim=1) > rounded_step(far, near.size, diagonal.amin(1), eps)


def rounded_step(far: X, size: X, least: X, eps: float) -> X:
    """Length of a step that rounding errors of the residuals may be all of, from below.

    ``far`` is ``||D x||``, D being the norms of the columns, ``size`` that of the residuals, and ``least``
    the smallest diagonal element of R with columns of norm 1.
    """
    return ROUNDINGS * eps * (far + size) / least


def allowed_cost(cost: X, far: X, size: X, eps: float) -> X:
    """A cost with the rounding errors that it may have, for ``||D x||`` and residuals of this size."""
    error = 8 * eps * (far + size)
    return cost * (1 + 8 * eps) + size * error + error * error
