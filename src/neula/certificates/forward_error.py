"""Forward errors of solutions, from condition numbers and backward errors.

All errors are those of ``D x``, D being the norms of the columns of A: ``||D (x - x*)|| / ||D x*||``, x* the
exact solution for A and b as they are stored. Columns in small units then count as much as others, and the
condition number that counts is that of ``B = A D^-1``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from neula.certificates.residuals import X, quotient
from neula.engines import FP64, format_of

SURE = 0.1  # forward error up to which at least one digit is guaranteed
ESTIMATED = 3.0  # factor between an estimate of a norm by some power steps and a bound on it
RARE = 1e-6  # probability that a norm exceeds its estimate from random vectors by more than the margin

NOISE = 2.0
"""Unit roundoffs of double precision that a backward error is taken to be at least: those of the residual
that it is measured by."""

MAX_RATE = 0.25
"""Rate of convergence above which updates are not trusted to show the error: it may be larger by
``1 / (1 - rate)`` along the vectors where they are small."""

COMPUTED = 1 + 2.0**-20  # for the rounding errors of a bound


def enlarged(x: X, rate: X | float) -> X:
    """``x / (1 - rate)``, since ``||(I - E)^-1|| <= 1 / (1 - rate)`` if ``||E|| <= rate``; infinite from a
    rate of 1 on, where nothing is known.

    >>> enlarged(1.0, 0.5), enlarged(0.0, 1.0)
    (2.0, inf)
    """
    remaining = 1 - rate
    if isinstance(remaining, float):
        return x / remaining if remaining > 0 else where(False, x, math.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        return where(remaining > 0, x / remaining, math.inf)


def inverse_margin(count: int) -> float:
    """Bound on ``||A^-1||_2 / ||A^-1 Z||_F`` for random vectors Z, Gaussian / sqrt(count).

    If A is nearly singular, its inverse maps all vectors to multiples of one, and ``||A^-1 Z||_F^2`` is
    ``||A^-1||^2`` times the mean of the squares of ``count`` normal numbers: below t^-2 with a probability of
    at most ``(count / (2 t^2))^(count/2) / Gamma(count/2 + 1)``. Other singular values make it larger. The
    margin is the t for which that is ``RARE``.

    >>> [round(inverse_margin(count)) for count in (2, 4, 8)]
    [1000, 38, 8]
    """
    half = count / 2
    return float(half**0.5 / (RARE * math.gamma(half + 1)) ** (1 / count))


def left_by_update(rate: X, *, lifted: bool = False) -> X:
    """``rate / (1 - rate)``: what the last update leaves of the error, relative to this update.

    It is ``p = (I - E) d`` for the error d and ``||E|| <= rate``, so ``||d - p|| = ||E (I - E)^-1 p||``. If
    ``lifted``, errors are those of ``W p`` for ``W^T W = I - E``, whose norm is at most ``sqrt(1 + rate)``:
    of solutions in the space of the rows.

    >>> left_by_update(0.25), left_by_update(1.5)
    (0.3333333333333333, inf)
    """
    left = enlarged(rate, rate)
    return (1 + rate) ** 0.5 * left if lifted else left


def measured_error(left: X, size: X | float, rounding: X | float = 0.0, rate: X | float = 0.0) -> X:
    """Forward error by what is left after the last update, relative to the exact solution.

    ``left`` bounds ``||D (x - x*)||``, including the difference of x and a refined sum, ``size`` is ``||D
    x||``, ``rounding`` the relative rounding error of x in its dtype, and ``rate`` that of convergence. As
    ``refining.relative_error`` has it, which is one launch; infinite where updates are not trusted to show
    errors, and where only errors are left.

    >>> round(measured_error(0.1, 1.0), 4), measured_error(1.0, 1.0), measured_error(0.1, 1.0, rate=0.3)
    (0.1111, inf, inf)
    """
    error = quotient(left, size)
    error = rounded_error(enlarged(COMPUTED * error, error), COMPUTED * rounding)
    return where(rate <= MAX_RATE, error, math.inf)


def wedin_factor(condition: X | float, ratio: X) -> X:
    """``2 + (kappa + 1) ||r|| / (||B|| ||D x||)``, of least squares: by how much the condition number counts
    (Wedin, 1973).

    The condition number of B, from above, may be infinite where nothing is left of b; the ratio is
    :func:`residual_ratio`.
    """
    return 2 + where(ratio != 0, (condition + 1) * ratio, 0.0)


def least_squares_error(condition: X | float, backward_error: X, ratio: X) -> X:
    """``kappa eta (2 + (kappa + 1) ||r|| / (||B|| ||D x||))``, to first order (Wedin, 1973).

    The condition number of B is from above, the backward error as it is measured, relative to B and b, and
    the ratio :func:`residual_ratio`. Infinite from 1 on: x and r then tell nothing of the exact ones.
    """
    error = condition * (backward_error + NOISE * FP64.u) * wedin_factor(condition, ratio)
    return where(error >= 1, math.inf, error)


def rounded_error(error: X, rounding: X | float) -> X:
    """Forward error of x as it is returned: of what was computed, and of rounding it to a narrower dtype.

    The first is relative to the exact solution, which may be shorter than x, ``||D x|| <= (1 + error) ||D
    x*||``; the second relative to x.

    >>> rounded_error(0.5, 0.25)
    0.875
    """
    return error * (1 + rounding) + rounding


def residual_ratio(residual: X, norm: X | float, size: X) -> X:
    """``||r|| / (||B|| ||D x||)``; infinite where only x vanishes."""
    return quotient(residual, norm * size)


def where(condition: Any, x: Any, other: Any) -> Any:
    """x, or another number where a condition does not hold."""
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, x, other)
    if isinstance(condition, np.ndarray):
        return np.where(condition, x, other)
    if isinstance(x, torch.Tensor):
        return x if condition else torch.full_like(x, other)
    if isinstance(x, np.ndarray):
        return x if condition else np.full_like(x, other)
    return x if condition else other


def digits_of(forward_error: float, dtype: torch.dtype) -> float:
    """Decimal digits that rounding errors leave correct: the negative logarithm, at most those of the dtype.

    >>> digits_of(1e-8, torch.float64), digits_of(10.0, torch.float64)
    (8.0, -1.0)
    >>> round(digits_of(0.0, torch.float64), 2), round(digits_of(1e-12, torch.float32), 2)
    (15.95, 7.22)
    """
    return -math.log10(max(forward_error, format_of(dtype).u))
