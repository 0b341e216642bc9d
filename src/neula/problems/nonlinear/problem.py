"""Options of a non-linear fit, checked as in SciPy."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

from neula.algorithms.nonlinear.damped import norm
from neula.algorithms.nonlinear.differentiate import UNKNOWN
from neula.algorithms.nonlinear.feasible import Bounds, without
from neula.algorithms.nonlinear.gauss_newton import ROUNDINGS, newton_steps
from neula.algorithms.nonlinear.levenberg_marquardt import Iterates, Tolerances
from neula.algorithms.nonlinear.losses import LOSSES, Loss, Rho
from neula.certificates.forward_error import SURE
from neula.certificates.residuals import X
from neula.certificates.verdict import Limits
from neula.errors import check_name, number, whole_number
from neula.pipeline.inputs import take
from neula.problems.nonlinear.functions import refuse_dependence, tensor_of

METHODS = ("trf", "dogbox", "lm")


@dataclass(frozen=True)
class Start:
    x: torch.Tensor  # shape (P, n)
    batch: tuple[int, ...]  # leading dimensions
    bounds: Bounds
    # Shape (P, n): reciprocals of the sizes of variables; None for those of the Jacobian.
    scale: torch.Tensor | None

    @classmethod
    def from_arrays(cls, x0: torch.Tensor, bounds: Any, x_scale: Any, device: torch.device) -> Start:
        """Check it."""
        x = torch.atleast_1d(x0).detach()
        *batch, n = x.shape
        if n == 0:
            raise ValueError(f"x0 of shape {tuple(x.shape)} has no variables: there is nothing to fit")
        if not bool(x.isfinite().all()):
            raise ValueError("x0 must be finite")
        flat = x.reshape(-1, n).to(device)
        limits = bounds_of(bounds, x.shape, device, x.dtype)
        if bool((limits.lower >= limits.upper).any()):
            raise ValueError("each lower bound must be strictly less than each upper bound")
        outside = (flat.double() < limits.lower) | (flat.double() > limits.upper)
        if bool(outside.any()):
            where = tuple(outside.nonzero()[0].tolist())
            low, high = float(limits.lower[where]), float(limits.upper[where])
            raise ValueError(
                f"x0 is outside of the bounds: variable {where[-1]} is {float(flat[where]):.6g}, allowed is "
                f"{low:.6g} to {high:.6g}"
            )
        return cls(flat, tuple(batch), limits, scale_of(x_scale, x.shape, device))


def are_open(bounds: Any) -> bool:
    """Whether bounds are a pair of infinite numbers, as they are by default."""
    return type(bounds) is tuple and [*map(type, bounds)] == [float] * 2 and bounds == (-math.inf, math.inf)


def bounds_of(bounds: Any, shape: torch.Size, device: torch.device, dtype: torch.dtype) -> Bounds:
    """From a pair of numbers or arrays, or from SciPy's ``Bounds``, as numbers that x can be."""
    if not hasattr(bounds, "lb") and len(bounds if hasattr(bounds, "__len__") else ()) != 2:
        raise ValueError(f"bounds must be a pair of lower and upper ones, got {bounds!r}")
    pair = (bounds.lb, bounds.ub) if hasattr(bounds, "lb") else tuple(bounds)
    ends = [_like(end, name, shape, device) for end, name in zip(pair, ("lower", "upper"), strict=True)]
    if any(bool(end.isnan().any()) for end in ends):
        raise ValueError("bounds must not be NaN: infinite ones are none")
    return Bounds.from_arrays(*(end.to(dtype).double() for end in ends))


def scale_of(x_scale: Any, shape: torch.Size, device: torch.device) -> torch.Tensor | None:
    """Reciprocals of the sizes of variables."""
    if x_scale is None or (isinstance(x_scale, str) and x_scale == "jac"):
        return None
    if isinstance(x_scale, str):
        raise ValueError(f"x_scale must be 'jac' or positive numbers, got {x_scale!r}")
    sizes = _like(x_scale, "x_scale", shape, device)
    if not bool((sizes.isfinite() & (sizes > 0)).all()):
        raise ValueError("x_scale must be 'jac' or positive numbers")
    return 1 / sizes


def step_of(diff_step: Any, start: Start) -> torch.Tensor | None:
    """Relative steps of differences. Raises ValueError unless they are positive and fit x0."""
    if diff_step is None:
        return None
    shape = torch.Size((*start.batch, start.x.shape[1]))
    steps = _like(diff_step, "diff_step", shape, start.x.device)
    if not bool((steps > 0).all()):
        raise ValueError(f"diff_step must be positive, got {diff_step}")
    return steps.to(start.x.dtype)


def _like(numbers: Any, name: str, shape: torch.Size, device: torch.device) -> torch.Tensor:
    # A copy: SciPy's bounds may be views that NumPy does not like to be asked about.
    tensor = take(copy(numbers), name).tensor.to(device, torch.float64)
    try:
        return tensor.expand(shape).reshape(-1, shape[-1]).clone()
    except RuntimeError:
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} does not fit x0 of shape {tuple(shape)}"
        ) from None


def usual_tolerance(dtype: torch.dtype) -> float:
    """SciPy's 1e-8 in double precision, elsewhere the root of the spacing of numbers."""
    return 1e-8 if dtype == torch.float64 else torch.finfo(dtype).eps ** 0.5


def limits_of(tolerances: Tolerances) -> Limits:
    """Limits of the evidence for a minimum: its stationarity takes the place of a backward error."""
    return Limits(tolerances.stationarity, SURE, residual=1.0)


def check_names(method: str | None, verbose: int) -> None:
    check_name("method", method, METHODS, optional=True)
    if not isinstance(verbose, int) or verbose not in (0, 1, 2):
        raise ValueError(f"verbose must be 0, 1 or 2, got {verbose!r}")


def tolerances_of(
    ftol: float | None,
    xtol: float | None,
    gtol: float | None,
    max_nfev: int | None,
    n: int,
    dtype: torch.dtype,
) -> Tolerances:
    """Tolerances for n variables. None is zero; those below the spacing of a coarse format are its root."""
    eps = torch.finfo(dtype).eps
    wanted = "a number that is not negative, or None"
    found = {
        name: 0.0 if value is None else number(name, value, wanted, lambda x: x >= 0)
        for name, value in (("ftol", ftol), ("xtol", xtol), ("gtol", gtol))
    }
    if dtype != torch.float64:
        found = {k: usual_tolerance(dtype) if 0 < v < eps else v for k, v in found.items()}
    if all(value < eps for value in found.values()):
        raise ValueError(f"at least one of the tolerances must be higher than machine epsilon ({eps:.2e})")
    wanted = "None or a positive integer"
    most = 100 * n * (n + 1) if max_nfev is None else whole_number("max_nfev", max_nfev, wanted=wanted)
    return Tolerances(**found, max_nfev=most)


def loss_of(loss: Any, f_scale: Any, wrap: Any, device: torch.device) -> Loss:
    """A loss by name, or one of the caller."""
    if not callable(loss):
        check_name("loss", loss, tuple(LOSSES))
    scale = take(f_scale, "f_scale").tensor.to(device, torch.float64)
    if not bool((scale > 0).all()):
        raise ValueError(f"f_scale must be positive, got {f_scale}")
    if not callable(loss):
        return Loss(None if loss == "linear" else LOSSES[loss], scale)

    def rho(z: torch.Tensor) -> Rho:
        rows = [tensor_of(loss(wrap(row)), "loss").to(device, torch.float64) for row in z]
        for row in rows:
            refuse_dependence(row, "loss")
        if any(found.shape != (3, z.shape[1]) for found in rows):
            raise ValueError(
                f"the return value of loss has wrong shape: expected {(3, z.shape[1])}, got "
                f"{tuple(rows[0].shape)}"
            )
        first, second, third = torch.stack(rows, 1)
        return first, second, third

    return Loss(rho, scale)


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
    """Measure it, from the factor of the Jacobian at x."""
    # ``rate``, shape (batch,): by what Gauss-Newton steps shrank. ``rows``: residuals of a problem.
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
    """Estimate of the error that Gauss-Newton steps of this length leave, if each is shorter by this rate."""
    # The inverse magnifies errors of the residuals once, and twice those of their products with columns.
    return (length + condition * (of_residuals + condition * of_products)) / (1 - rate)


def _pressed(at: Iterates, held: torch.Tensor, errors: Errors, u: float) -> torch.Tensor:
    """Variables at bounds whose gradient is more than errors, and more than others have left."""
    # A bound does not keep the rest of them where they are: they may as well move away from it.
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
