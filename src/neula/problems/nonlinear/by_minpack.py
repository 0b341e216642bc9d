"""One plain fit on a CPU in NumPy: by MINPACK, with the evidence of the way for all others.

For small problems tensors and batches take many times as long as the arithmetic. Both accept the same
answers; rejected problems start again there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from neula.algorithms.nonlinear.differentiate import UNKNOWN
from neula.algorithms.nonlinear.gauss_newton import ROUNDINGS
from neula.algorithms.nonlinear.levenberg_marquardt import Tolerances
from neula.algorithms.nonlinear.losses import LOSSES, Loss
from neula.algorithms.nonlinear.minpack import TINY, Near, minimized, polished
from neula.algorithms.nonlinear.one_function import EPS, OneFunction, Unusual, Vectors, length
from neula.certificates.forward_error import digits_of
from neula.certificates.verdict import Evidence
from neula.io.integers import in_float64
from neula.kernels import scipy_linalg
from neula.pipeline.call import Call
from neula.pipeline.result import LeastSquaresResult
from neula.problems.nonlinear.fit import MESSAGES
from neula.problems.nonlinear.problem import (
    MARGIN,
    SLOWEST,
    are_open,
    estimated_error,
    limits_of,
    usual_tolerance,
)

WORK = 1e6
"""Value of ``m n^2`` up to which MINPACK, column by column, takes no longer than what works with blocks."""

USUAL = usual_tolerance(torch.float64)
SCHEMES = ("2-point", "3-point", "5-point")  # differences that are taken here


def is_plain(call: Call, x: torch.Tensor, loss: Any, f_scale: Any, jac: Any, *others: Any) -> bool:
    """Whether there is one problem of NumPy on a CPU, without anything unusual."""
    # ``x``: variables, or observations: a vector. ``others``: arguments that are None, or zero, by default.
    known = jac is None or callable(jac) or jac in SCHEMES
    here = call.engine.device.type == "cpu" and call.engine.tuning.lapack
    of_numpy = call.first.wrap is torch.Tensor.numpy and here
    named = isinstance(loss, str) and loss in LOSSES and type(f_scale) is float and f_scale > 0
    plain = not any(other is not None for other in others)
    return known and of_numpy and named and plain and x.ndim <= 1


def fit_by_minpack(
    call: Call,
    fun: Vectors,
    jac: Callable[..., Any] | str | None,
    x: np.ndarray,
    bounds: Any,
    loss: tuple[str, float],
    tolerances: Tolerances,
) -> LeastSquaresResult[Any] | None:
    """The minimum where it is certified, if residuals and derivatives are what NumPy computes with, and the
    way there stays within bounds.
    """
    # ``x``, shape (n,): where to begin. ``loss``: its name, and its scale.
    default, given = not jac, jac if callable(jac) else None
    scheme = jac if isinstance(jac, str) else "2-point"
    try:
        lower, upper = _ends(bounds, x)
        function = OneFunction(fun, given, scheme, lower, upper, _loss(*loss))
        m, n = len(function.residuals(x)), len(x)
        if not (m >= n > 0 and m * n * n <= WORK):
            return None
        x, status = minimized(function, x, tolerances)
        steps = function.nfev - 1
        if tolerances.select(status) > USUAL:
            near, rate = Near.at(function, x), 0.0
        else:
            function.scheme = "5-point" if default else function.scheme
            near, rate = polished(function, x)
            if near.length > max(TINY * near.far, near.rounding, near.noise):
                return None
        if lower is not None and not ((near.x > lower) & (near.x < upper)).all():
            return None
        r = near.r.copy()
        for j in range(n):
            r[j + 1 :, j] = 0.0
        found = _evidence(near, r, rate, function)
    except Unusual:
        return None
    if found is None:
        return None
    limits, errors = limits_of(tolerances), (found["stationarity"], found["forward_error"])
    if not limits.accept(Evidence.from_errors(*errors)):
        return None
    return LeastSquaresResult(
        x=near.x,
        cost=near.cost,
        fun=function.presented(function.residuals(near.x)),
        jac=function.presented(near.slopes).T,
        grad=near.gradient,
        optimality=float(np.abs(near.gradient).max()),
        active_mask=np.zeros(n, dtype=np.int64),
        nfev=function.nfev,
        njev=function.njev,
        status=status,
        message=MESSAGES[status],
        success=True,
        converged=True,
        tolerance=limits.backward_error,
        rank=n,
        determined=True,
        digits=max(0.0, digits_of(found["forward_error"], torch.float64)),
        nit=steps,
        refused=0,
        R=r,
        observations=m,
        accepted=np.array(True),
        engine=str(call.engine),
        seconds=call.seconds,
        **found,
    )


def _loss(name: str, scale: float) -> Loss | None:
    return (
        None
        if name == "linear"
        else Loss(LOSSES[name], torch.tensor(scale, dtype=torch.float64, device="cpu"))
    )


def _ends(bounds: Any, x: np.ndarray) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    if are_open(bounds):
        return None, None
    pair = (bounds.lb, bounds.ub) if hasattr(bounds, "lb") else bounds
    try:
        lower, upper = (np.broadcast_to(in_float64(end, "bounds"), x.shape) for end in pair)
    except (TypeError, ValueError):
        raise Unusual from None  # and to be refused
    return lower, upper


def _evidence(near: Near, r: np.ndarray, rate: float, function: OneFunction) -> dict[str, float] | None:
    """The numbers of :func:`~neula.problems.nonlinear.problem.evidence_of`; None unless J has full rank."""
    m, u, norms = near.slopes.shape[1], EPS, near.norms
    errors, products = function.errors(near.x, norms, near.size)
    with np.errstate(all="ignore"):
        silent = (norms <= u * m * function.peaks) & (norms * np.abs(near.x) <= u * m * near.size)
        values = scipy_linalg.lapack.dgesdd(r / norms, compute_uv=0)[1]
        unknown = silent.any() or not (errors <= UNKNOWN).all()
        if unknown or not values[-1] > (m * u + MARGIN * length(errors)) * values[0]:
            return None
        condition, size = float(values[0] / values[-1]), float(values[0]) * near.far
        data = max(near.size, length(r @ near.x))
    removable = length(near.c)
    forward = float(near.size > 0)
    if size > 0:
        rounding = max(ROUNDINGS * u * (near.size + size), function.unexplained(near.x)) / size
        tilt = length(products) / size
        forward = estimated_error(near.relative, min(rate, SLOWEST), condition, rounding, tilt)
    return {
        "stationarity": removable / data if removable > 0 else 0.0,
        "condition": condition,
        "forward_error": forward,
    }
