"""Norms of residuals compared with those of right-hand sides, and their rounding errors.

All functions take numbers, arrays and tensors, and none synchronizes. NaN ends a refinement: no comparison
holds for it.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
import torch

from neula.engines import FP64
from neula.kernels.small_problems.refining import over

X = TypeVar("X", float, np.ndarray, torch.Tensor)  # norms: of one vector, or of each of many
DOUBLED = 2.0**-104  # relative error of one operation in doubled products, with some room


def quotient(a: X, b: X | float) -> X:
    """``a / b`` for norms: 0 where both vanish, infinite where only b does.

    >>> quotient(1.0, 4.0), quotient(0.0, 0.0), quotient(1.0, 0.0)
    (0.25, 0.0, inf)
    """
    if isinstance(a, torch.Tensor):
        return over(a, b)
    if isinstance(a, np.ndarray):
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(a == 0, 0.0, a / b)
    if a == 0:
        return 0.0
    return a / b if b else a * math.inf


def residual_noise(terms: float, *, doubled: bool, random: bool = False) -> float:
    """Relative error of a residual whose elements are sums of so many products, ``doubled`` or not.

    Signs of rounding errors are random, and so they add up as the square root of their number (Higham and
    Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41, 2019). In twice
    the working precision there is room for the worst case, unless a large condition number is to leave all
    digits of a large problem: then they are taken to be ``random``, too.

    Each part of a sum of complex products is one of twice as many real ones, and so many terms are to be
    counted (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.6).
    """
    unit = DOUBLED if doubled else 2 * FP64.u
    return unit * (terms if doubled and not random else terms**0.5)


def projection_noise(noise: float, norm: X | float, condition: X | float, size: X, b: X, residual: X) -> X:
    """Bound on the rounding error of ``||R^-H A^H r||``: that of r, and that of the gradient times ``B^+``.

    ``noise`` is :func:`residual_noise`; ``||B||`` and the condition number of B are from above. The last
    three are ``||D x||``, ``||b||`` and ``||r||``.
    """
    return noise * (norm * size + b + condition * residual)


STAGNATION = 0.5  # an update that does not at least halve the error is the last one
SLOW = 0.1  # a step of classical refinement that leaves more than this part of the error is followed by GMRES

FLOOR = 2.0
"""Multiple of the rounding errors of the residual from which on refinement has little to gain. They are part
of the bound on the error, which is never less than once as much."""


def improves(error: X, before: X | float, stagnation: float = STAGNATION) -> Any:
    """Whether an update has left less than some part of the error."""
    return error < stagnation * before


def goes_on(
    error: X,
    before: X | float,
    tolerance: X | float,
    floor: X | float = 0.0,
    *,
    stagnation: float = STAGNATION,
) -> Any:
    """Whether another update is worthwhile: the error is too large, was at least halved, and is not that
    of rounding alone (``neula.kernels.small_problems.refining.progress``).

    >>> goes_on(1e-3, 1.0, 1e-6), goes_on(1e-9, 1.0, 1e-6), goes_on(0.7, 1.0, 1e-6)
    (True, False, False)
    """
    return (error > tolerance) & improves(error, before, stagnation) & (error > FLOOR * floor)


def settled(error: X, floor: X) -> Any:
    """Whether hardly more is left than the rounding errors of the residual, which no update makes smaller."""
    return error <= FLOOR * floor
