"""Odd polynomials whose composition takes all singular values near 1, in as few products as that takes.

Amsel, Persson, Musco, Gower, "The Polar Express" (2025): of all compositions of odd polynomials of given
degrees that which is nearest to 1 on ``[l, 1]`` is found greedily, each polynomial being the minimax one on
the interval that the last one leaves. The first of these bring large singular values down to where the
smallest ones have come to, and rounding errors, which are relative to the largest, take their vectors: the
result is orthogonal, and not the polar factor. Nakatsukasa and Higham, "Backward stability of iterations for
computing the polar decomposition" (2012), say what is needed: ``p(x) >= x / d`` with a small d, where the
largest value of p is 1. So as long as the minimax polynomial would go below, that takes its place which
has the largest slope at zero with ``x / 2 <= p(x) <= 1``. It costs little: a slope of 7.0 instead of 7.6 for
degree 9.

All coefficients are computed here, when they are first asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np

FLOOR = 0.5  # ``p(x) / x`` is at least this, of polynomials whose largest value is 1

NEAR = 0.05
"""Numbers that are so near 1 on both sides go to the polynomial of degree 5 that touches 1, whose error is of
third order. The minimax polynomial would win next to nothing."""


@dataclass(frozen=True)
class OddPolynomial:
    """``p(x) = x q(x^2)`` with q made of squares, each of which is one product of a symmetric matrix.

    ``w = g - center``, then ``w = factor w^2 + shift`` for each square, and q is the last w. Where q has the
    form ``shift + factor w^2`` with positive numbers, rounding errors do not make it indefinite.
    """

    center: float
    squares: tuple[tuple[float, float], ...]  # factor and shift: one for degree 5, two for degree 9

    @property
    def degree(self) -> int:
        return 1 + 2 ** (len(self.squares) + 1)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        w = x * x - self.center
        for factor, shift in self.squares:
            w = factor * w * w + shift
        return x * w

    def times(self, size: float) -> OddPolynomial:
        *first, (factor, shift) = self.squares
        return OddPolynomial(self.center, (*first, (size * factor, size * shift)))


@lru_cache(maxsize=32)
def composition(smallest: float, error: float, margin: float) -> tuple[OddPolynomial, ...]:
    """Polynomials one after the other, after which numbers in ``[smallest, 1]`` differ from 1 by at most
    ``error``.

    Values on the way stay below 1 by the ``margin``, for rounding errors.

    Examples
    --------
    >>> import numpy as np
    >>> steps = composition(1e-3, 2e-3, 0.0)
    >>> x = np.geomspace(1e-3, 1, 1000)
    >>> for p in steps:
    ...     x = p(x)
    >>> [p.degree for p in steps], bool(abs(x - 1).max() <= 2e-3)
    ([9, 9, 9, 5, 5], True)
    """
    steps: list[OddPolynomial] = []
    low, largest = smallest, 1.0 - margin
    while True:
        step, off = _minimax(low)
        if off <= NEAR:
            break
        if (1 - off) / (1 + off) < FLOOR:
            step = _steepest().times(largest)
            low = _least(step, low)
        else:
            step = step.times(largest / (1 + off))
            low = largest * (1 - off) / (1 + off)
        steps.append(step)
    steps.append(step)
    while off > error:
        steps.append(TOUCHING_ONE)
        off = off**3 * (8 + 9 * (1 + off) + 3 * (1 + off) ** 2) / 8
    return tuple(steps)


def image(steps: Sequence[OddPolynomial], x: float) -> float:
    return float(reduce(lambda y, step: step(y), steps, np.array(x)))


def _least(step: OddPolynomial, low: float) -> float:
    """Smallest value on ``[low, 1]``."""
    return float(step(np.concatenate([[low], np.linspace(low, 1.0, 10_000)])).min())


def _minimax(low: float) -> tuple[OddPolynomial, float]:
    """The odd polynomial of degree 5 nearest to 1 on ``[low, 1]``, by Remez's algorithm; its error."""
    inner = low + (1 - low) * np.array([0.25, 0.75])
    for _ in range(50):
        x = np.array([low, *inner, 1.0])
        equations = np.stack([x, x**3, x**5, [1.0, -1.0, 1.0, -1.0]], 1)
        a, b, c, off = np.linalg.solve(equations, np.ones(4))
        # Where the derivative a + 3 b x^2 + 5 c x^4 vanishes.
        inner = np.sqrt(np.sort(np.roots([5 * c, 3 * b, a]).real))
    return _of_degree_5(a, b, c), abs(float(off))


def _of_degree_5(a: float, b: float, c: float) -> OddPolynomial:
    center = -b / (2 * c)
    return OddPolynomial(float(center), ((float(c), float(a - c * center**2)),))


TOUCHING_ONE = _of_degree_5(15 / 8, -10 / 8, 3 / 8)  # ``1 - p(x) = (1 - x)^3 (8 + 9 x + 3 x^2) / 8``


@lru_cache(maxsize=1)
def _steepest() -> OddPolynomial:
    """``p(x) = x (f + c ((x^2 - m)^2 - h)^2)`` with ``p(1) = 1`` and two maxima of 1 between 0 and 1.

    That is the largest slope at zero of a polynomial of degree 9 with ``f x <= p(x) <= 1``: it touches its
    bounds at five points, as often as it has coefficients.
    """
    m, h = 0.594, 0.0913
    for _ in range(50):  # Newton's method
        off, there = _overshoot(m, h), 1e-7
        columns = [_overshoot(m + there, h) - off, _overshoot(m, h + there) - off]
        change = np.linalg.solve(np.stack(columns, 1) / there, off)
        m, h = m - float(change[0]), h - float(change[1])
        if abs(change).max() < 1e-13:
            break
    return _touching(m, h)


def _touching(m: float, h: float) -> OddPolynomial:
    c = (1 - FLOOR) / ((1 - m) ** 2 - h) ** 2
    return OddPolynomial(m, ((1.0, -h), (c, FLOOR)))


def _overshoot(m: float, h: float) -> np.ndarray:
    """Excess of the two maxima over 1."""
    step = _touching(m, h)
    quadratic = np.poly1d([1.0, -2 * m, m * m - h])
    q = FLOOR + step.squares[1][0] * quadratic * quadratic
    slope = q + 2 * np.poly1d([1.0, 0.0]) * q.deriv()  # of p, as a polynomial of x^2
    extremes = np.sort(slope.roots.real)
    return step(np.sqrt(extremes[[0, 2]])) - 1.0  # maxima and minima take turns
