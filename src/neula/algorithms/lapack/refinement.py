"""Refinement of one right-hand side, as in :mod:`neula.algorithms.krylov.doubled_refinement`.

The same steps and the same bounds, for vectors of NumPy and numbers of Python.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from neula.algorithms.krylov.doubled_refinement import MAX_STEPS
from neula.algorithms.lapack.doubled import two_sum
from neula.certificates.forward_error import measured_error
from neula.certificates.stagnation import goes_on


class ResidualEvaluation(NamedTuple):
    """What the residual of x says of x.

    Attributes
    ----------
    residual : array, shape (m,)
        What is left of it after the update.
    update : array, shape (n,)
        What to add to x.
    left : float
        Bound on ``||D (x - x*)||`` after that.
    floor : float
        What of it is due to the rounding errors of the residual.
    """

    residual: np.ndarray
    update: np.ndarray
    left: float
    floor: float


class FactoredProblem(Protocol):
    """A problem with factors to solve it approximately."""

    def start(self, b: np.ndarray) -> np.ndarray:
        """A first solution."""

    def evaluate(self, b: np.ndarray, high: np.ndarray, low: np.ndarray) -> ResidualEvaluation:
        """How good ``high + low`` is, and what makes it better."""

    def size(self, x: np.ndarray) -> float:
        """``||D x||``."""


@dataclass(slots=True)
class RefinedVectorSolution:
    """A solution.

    Attributes
    ----------
    x, x_low : array, shape (n,)
        As an unevaluated sum.
    residual : array, shape (m,)
        Of the sum.
    size : float
        ``||D x||``.
    low : float
        What x alone lacks of the sum, relative to it.
    forward_error : float
        For x alone, bound on ``||D (x - x*)|| / ||D x*||``.
    steps : int
    """

    x: np.ndarray
    x_low: np.ndarray
    residual: np.ndarray
    size: float
    low: float
    forward_error: float
    steps: int


def refine(
    system: FactoredProblem,
    b: np.ndarray,
    tolerance: float,
    max_steps: int = MAX_STEPS,
    first: np.ndarray | None = None,
) -> RefinedVectorSolution | None:
    """Refine until the forward error meets the tolerance, or stagnates; None where x vanishes.

    Parameters
    ----------
    system : FactoredProblem
    b : array, shape (m,)
    tolerance : float
    max_steps : int, optional
    first : array, shape (n,), optional
        A solution, where there is one already.
    """
    high = system.start(b) if first is None else first
    low = np.zeros(len(high))
    left, steps = math.inf, 0
    while steps < max_steps:
        steps += 1
        residual, update, wrong, floor = system.evaluate(b, high, low)
        before, left = left, wrong
        low += update
        high, low = two_sum(high, low)
        size = system.size(high)
        if not goes_on(left, before, tolerance * size, floor):
            break
    return _refined(system, high, low, residual, left, steps)


def _refined(
    system: FactoredProblem,
    high: np.ndarray,
    low: np.ndarray,
    residual: np.ndarray,
    left: float,
    steps: int,
) -> RefinedVectorSolution | None:
    size = system.size(high)
    if not 0 < size < math.inf:
        return None
    lost = system.size(low)
    return RefinedVectorSolution(
        high, low, residual, size, lost / size, measured_error(left + lost, size), steps
    )


LONG = 10_000
"""Elements of a vector beyond which the BLAS of NumPy takes several threads
(:mod:`neula.algorithms.lapack.products`)."""


def length(x: np.ndarray) -> float:
    """Norm of a vector whose elements are near 1."""
    return math.sqrt(x.dot(x) if len(x) <= LONG else np.einsum("i,i->", x, x))
