"""Products of one matrix and vectors in twice the working precision, in a few calls of NumPy.

The scheme is that of :mod:`neula.kernels.doubled`: numbers are cut into slices so short that sums of their
products are exact. There it serves batches and large matrices; here a call takes as long as the arithmetic.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch

Pair = tuple[np.ndarray, np.ndarray]
"""A vector as a sum of two that is not evaluated, the larger first."""

SELECTED = np.zeros((3, 9))
"""Which products of slices are added: those of the first two are exact, and so is the next sum."""
SELECTED[0, 0] = SELECTED[1, [1, 3]] = SELECTED[2, [2, 4, 5, 6, 7, 8]] = 1.0


MOST_BITS = 25
"""Of a slice: sums with an anchor for twice as many stay in one binade."""

ROUNDINGS = 32
"""Unit roundoffs of products with third slices, and of their sums, that a product errs by at most: in
a hundred thousand products 4.7 are seen with numbers and 3 with matrices, 16 in sums of 4096 products."""

ROUNDED = 1.001
"""Bounds on elements are norms, which rounding may have made smaller."""


def difference(b: np.ndarray, high: np.ndarray, low: np.ndarray) -> Pair:
    """``b - (high + low)`` as a pair of numbers, D. E. Knuth's sum with a remainder that is known."""
    total = b - high
    of_b = total - b
    error = b - (total - of_b)
    error -= high + of_b
    error -= low
    return two_sum(total, error)


class SlicedMatrix:
    """A matrix as the sum of three slices.

    Parameters
    ----------
    a : array, shape (m, n)
        float64.
    largest : float
        No element is larger.
    large : bool, optional
        Whether torch multiplies with it (:mod:`neula.algorithms.lapack.products`).

    Attributes
    ----------
    error : float
        Bound on the error of a product with a vector of norm 1, before it is rounded.

    Examples
    --------
    >>> import numpy as np
    >>> third = SlicedMatrix(np.full((1, 1), 1 / 3), 1.0)
    >>> high, low = third.residual(np.array([3.0]), np.zeros(1), np.ones(1))
    >>> high.item() * 2**54, low.item()
    (1.0, 0.0)
    """

    def __init__(self, a: np.ndarray, largest: float, *, large: bool = False) -> None:
        self._product = _by_torch if large else np.matmul
        self._bits = bits_of(a.shape)
        self._slices = _cut(a, largest, self._bits)
        self.error = error_of(a.shape) * largest
        self._rows = self._slices.reshape(-1, a.shape[1]).T

    def residual(self, x: np.ndarray, x_low: np.ndarray, b: np.ndarray) -> Pair:
        """``b - A (x + x_low)``, x_low being of the size of the rounding errors of x at most."""
        factors = self._cut(x, x_low)
        high, low = _added(self._product(factors, self._rows).reshape(9, -1))
        return difference(b, high, low)

    def gradient(self, high: np.ndarray, low: np.ndarray) -> np.ndarray:
        """``A^T (high + low)``, rounded once; the numbers are those of a residual."""
        high, low = self.transposed_pair(high, low)
        high += low
        return high

    def transposed_pair(self, high: np.ndarray, low: np.ndarray) -> Pair:
        """``A^T (high + low)``, low being of the size of the rounding errors of high at most."""
        return _added(self._product(self._cut(high, low), self._slices).reshape(9, -1))

    def _cut(self, x: np.ndarray, x_low: np.ndarray) -> np.ndarray:
        slices = _cut(x, math.sqrt(x.dot(x)), self._bits)
        slices[2] += x_low
        return slices


def _by_torch(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    found: np.ndarray = torch.matmul(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    return found


def bits_of(shape: tuple[int, ...]) -> int:
    """So many bits of a slice that sums of products of two are exact in 53 bits."""
    return min(MOST_BITS, int((53 - math.log2(max(shape))) // 2))


def error_of(shape: tuple[int, ...], slices: int = 3) -> float:
    """Bound on the error of a product of slices with as many slices, largest element and vector being 1.

    Of three each exact are products of the first two but the second with the second, of two those of the
    first. What is rounded is below ``2^(-2 bits)``, or ``2^-bits``, and its rounding errors are independent.
    """
    exact = (slices - 1) * bits_of(shape)
    return ROUNDINGS * 2.0 ** (-53 - exact) * math.sqrt(math.prod(shape))


def _cut(v: np.ndarray, largest: float, bits: int) -> np.ndarray:
    """Three slices whose sum is v, no element being larger than ``largest``: two of so many bits, the rest.

    A sum with an anchor is rounded to multiples of its unit.
    """
    anchors = _anchors(bits, v.ndim) * 2.0 ** math.frexp(ROUNDED * largest)[1]
    rounded = v + anchors
    rounded -= anchors
    return rounded[1:] - rounded[:-1]


@lru_cache(maxsize=64)
def _anchors(bits: int, dimensions: int) -> np.ndarray:
    """At which numbers below 1 are rounded to 0, to so many bits, to twice as many, and not at all."""
    exponents = np.array([1.0, -bits, -2 * bits])
    return np.append(1.5 * 2.0 ** (52 + exponents), 0.0).reshape(4, *(1,) * dimensions)


def _added(products: np.ndarray) -> Pair:
    """The sum of the products of three slices with three slices."""
    first, second, rest = SELECTED.dot(products)
    high = first + second
    # The larger one is a multiple of the unit of the smaller, so this is the rounding error of the sum.
    second -= high - first
    second += rest
    return high, second


def two_sum(a: np.ndarray, b: np.ndarray) -> Pair:
    """``a + b`` and its rounding error (Knuth)."""
    total = a + b
    of_b = total - a
    error = a - (total - of_b)
    error += b - of_b
    return total, error
