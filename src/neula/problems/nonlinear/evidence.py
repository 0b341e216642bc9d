"""Evidence for a minimum: whether it is stationary, and how many digits of x are guaranteed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neula.algorithms.nonlinear.damped import norm
from neula.algorithms.nonlinear.differentiate import UNKNOWN
from neula.algorithms.nonlinear.feasible import Bounds, without
from neula.algorithms.nonlinear.gauss_newton import ROUNDINGS, newton_steps
from neula.algorithms.nonlinear.levenberg_marquardt import Iterates
from neula.certificates.residuals import X

SLOWEST = 0.99  # rate of Gauss-Newton steps beyond which nothing is known of where they lead
MARGIN = 10.0  # times the errors of the columns: singular values above them are not what errors make of zero


@dataclass(frozen=True)
class NonlinearEvidence:
    """Evidence of each problem of a batch; variables held at a bound do not count."""

    # int, shape (batch,): of the Jacobian with normalized columns; those without influence on the residuals
    # count as zero.
    rank: torch.Tensor
    full: torch.Tensor  # bool, shape (batch,)
    # bool, shape (batch,): whether it is of full rank also with the variables that do not count.
    determined: torch.Tensor
    condition: torch.Tensor  # shape (batch,): condition number of the same
    # Shape (batch,): ||Q^T f||, the part of the residuals that variables could still take away to first
    # order, relative to the larger one of the residuals and of what x contributes to the model: a relative
    # change of the data for which x is exactly stationary.
    stationarity: torch.Tensor
    # Shape (batch,): estimate of ||D (x - x*)|| / ||D x*||, D being the norms of the columns: 1 of x = 0, or
    # 0 where residuals are zero there or bounds stop all variables.
    forward_error: torch.Tensor


@dataclass(frozen=True)
class Errors:
    residuals: torch.Tensor  # shape (batch,): length of their rounding errors, as far as it is known
    columns: torch.Tensor  # shape (batch, n): of the Jacobian's columns, relative to their norms
    # Shape (batch, n): of the scalar products of these columns, with norm 1, and the residuals.
    products: torch.Tensor


def evidence_of(
    at: Iterates, bounds: Bounds, rate: torch.Tensor, rows: int, errors: Errors
) -> NonlinearEvidence:
    """Measure it, from the factor of the Jacobian at x.

    ``rate``, shape (batch,): by what Gauss-Newton steps shrank. ``rows``: residuals of a problem.
    """
    near, x, n, u = at.near, at.x.double(), at.x.shape[1], at.eps
    held = _pressed(at, bounds.held(x, -near.gradient), errors, max(rows, n) * u)
    r, c = without(near.r, near.c, held)
    known = errors.columns <= UNKNOWN
    idle = (_without_influence(at, u * max(rows, 1)) | ~known) & ~held
    noise = norm(errors.columns.masked_fill(held | idle, 0.0), dim=1)
    norms = torch.where(held | (near.norms == 0), 1.0, near.norms)
    b = (r / norms[:, None, :]).masked_fill(idle[:, None, :], 0.0)
    left, values, _ = torch.linalg.svd(torch.nan_to_num(b))
    largest, smallest = values.amax(1), values.amin(1)
    relative = (max(rows, n) * u + MARGIN * noise)[:, None]
    counted = values > relative * largest[:, None]
    full = counted.all(1) & ~idle.any(1) & ((~held).sum(1) <= rows)
    condition = torch.where(full, largest / smallest, torch.inf)
    within = (left.mT @ c.masked_fill(held, 0.0)[..., None])[..., 0].masked_fill(~counted, 0.0)
    far = norm(near.norms * x, dim=1)  # of held variables, too: in the units of the residuals
    size = largest * far
    data = torch.maximum(near.size, norm((near.r @ x[..., None])[..., 0], dim=1))
    removable = norm(within, dim=1)
    stationarity = torch.where(removable > 0, removable / data, 0.0)
    length = newton_steps(at, bounds, torch.arange(len(x), device=x.device))[1]
    rounding = torch.maximum(ROUNDINGS * u * (near.size + size), errors.residuals)
    tilt = norm(errors.products.masked_fill(held | idle, 0.0), dim=1)
    forward = estimated_error(length, rate.clamp(max=SLOWEST), condition, rounding / size, tilt / size)
    # Whatever x* is, all of it is missing in zero, unless bounds or vanishing residuals say that it is right.
    forward = torch.where(far > 0, forward, ((near.size > 0) & ~held.all(1)).double())
    return NonlinearEvidence(
        rank=(counted.sum(1) - held.sum(1)).clamp(min=0),
        full=full,
        determined=full if bounds.none else _of_full_rank(near.r, relative) & known.all(1) & (n <= rows),
        condition=condition,
        stationarity=stationarity,
        forward_error=torch.where(full, forward, torch.inf),
    )


def estimated_error(length: X, rate: X, condition: X, of_residuals: X, of_products: X) -> X:
    """Estimate of the error that Gauss-Newton steps of this length leave, if each is shorter by this rate.

    The inverse magnifies errors of the residuals once, and twice those of their products with columns.
    """
    return (length + condition * (of_residuals + condition * of_products)) / (1 - rate)


def _pressed(at: Iterates, held: torch.Tensor, errors: Errors, u: float) -> torch.Tensor:
    """Variables at bounds whose gradient is more than errors, and more than others have left.

    A bound does not keep the rest of them where they are: they may as well move away from it.
    """
    near = at.near
    slopes = near.gradient.abs() / torch.where(near.norms > 0, near.norms, 1.0)
    left = slopes.masked_fill(held, 0.0).amax(1) + u * near.size
    return held & (slopes > MARGIN * (errors.products + left[:, None]))


def _of_full_rank(r: torch.Tensor, relative: torch.Tensor) -> torch.Tensor:
    norms = norm(r, dim=1, keepdim=True)
    values = torch.linalg.svdvals(torch.nan_to_num(r / torch.where(norms > 0, norms, 1.0)))
    return values.amin(1) > relative[:, 0] * values.amax(1)


def _without_influence(at: Iterates, u: float) -> torch.Tensor:
    """Variables that residuals have ceased to depend on: neither a change of all of x does anything to them,
    nor is the column of the Jacobian more than rounding errors of what it was.
    """
    near = at.near
    faded = near.norms <= u * at.peaks
    silent = near.norms * at.x.double().abs() <= u * near.size[:, None]
    return (near.norms == 0) | (faded & silent)
