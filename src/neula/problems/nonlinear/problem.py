"""Options of a non-linear fit, checked as in SciPy."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

from neula.algorithms.nonlinear.feasible import Bounds
from neula.algorithms.nonlinear.levenberg_marquardt import Tolerances
from neula.algorithms.nonlinear.losses import LOSSES, Loss, Rho
from neula.certificates.forward_error import SURE
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
