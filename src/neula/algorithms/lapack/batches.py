"""What batches of small problems share in NumPy: norms, and products in twice the working precision.

What counts are passes over the batch, and calls. NumPy takes a part of the time of torch for products of many
small matrices, and torch a part of its time for reductions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from neula.algorithms.lapack.doubled import ROUNDED, Pair, bits_of, difference, error_of

ELEMENTS = 1 << 18
"""Elements of the matrices that are worked on together: more do not stay in a cache, and fewer take less time
than the calls for them."""


COPIED = 32
"""Columns of matrices that are copied for a product with themselves, since that takes less time."""


def lengths(x: np.ndarray) -> np.ndarray:
    """Norms of the columns of each matrix of a batch, shape (batch, k)."""
    found: np.ndarray = np.sqrt(np.einsum("pik,pik->pk", x, x))
    return found


def largest(x: np.ndarray) -> np.ndarray:
    """Largest magnitudes of the columns of each matrix of a batch, shape (batch, k)."""
    return most(np.abs(x))


def most(x: np.ndarray) -> np.ndarray:
    """Largest elements along the second dimension; NaN comes through."""
    found: np.ndarray = torch.from_numpy(x).amax(1).numpy()
    return found


def least(x: np.ndarray) -> np.ndarray:
    """Smallest elements along the second dimension; NaN comes through."""
    found: np.ndarray = torch.from_numpy(x).amin(1).numpy()
    return found


def transposed_times(a: np.ndarray, x: np.ndarray) -> np.ndarray:
    """``A^T X``; vectors are rows, which takes half the time."""
    return np.matmul(x.transpose(0, 2, 1), a).transpose(0, 2, 1)


def gram(x: np.ndarray) -> np.ndarray:
    """``X^T X``; products of small matrices with themselves take NumPy twice the time of others."""
    return np.matmul(x.transpose(0, 2, 1), x.copy() if x.shape[2] <= COPIED else x)


class SlicedBatch:
    """Matrices as sums of three slices each: :class:`neula.algorithms.lapack.doubled.Sliced` of a batch.

    Parameters
    ----------
    a : array, shape (batch, m, n)
        float64.
    largest : array, shape (batch,)
        No element of the matrix is larger.

    Attributes
    ----------
    error : array, shape (batch, 1)
        Bounds on the errors of products with vectors of norm 1, before they are rounded.

    Examples
    --------
    >>> import numpy as np
    >>> third = SlicedBatch(np.full((1, 1, 1), 1 / 3), np.ones(1))
    >>> high, low = third.residual(np.full((1, 1, 1), 3.0), np.ones((1, 1, 1)))
    >>> high.item() * 2**54, low.item()
    (1.0, 0.0)
    """

    def __init__(self, a: np.ndarray, largest: np.ndarray) -> None:
        self._bits = bits_of(a.shape[1:])
        self._slices = _cut(a, largest[:, None, None], self._bits)
        self.error = error_of(a.shape[1:]) * largest[:, None]

    def residual(self, x: np.ndarray, b: np.ndarray) -> Pair:
        """``b - A x``, shape (batch, m, k)."""
        high, low = self._product(x, None, np.matmul)
        return difference(b, high, low)

    def gradient(self, high: np.ndarray, low: np.ndarray) -> np.ndarray:
        """``A^T (high + low)``, rounded once; the numbers are those of a residual."""
        high, low = self._product(high, low, transposed_times)
        high += low
        return high

    def _product(self, x: np.ndarray, x_low: np.ndarray | None, times: Callable[..., np.ndarray]) -> Pair:
        """The sum of the products of three slices with three slices, the first two of which are exact."""
        k = x.shape[2]
        one, two, three = _cut(x, largest(x)[:, None], self._bits)
        if x_low is not None:
            three += x_low
        of_first = times(self._slices[0], np.concatenate([one, two, three], 2))
        of_second = times(self._slices[1], np.concatenate([one, two + three], 2))
        rest = times(self._slices[2], x)
        rest += of_second[..., k:]
        rest += of_first[..., 2 * k :]
        second = of_first[..., k : 2 * k] + of_second[..., :k]
        high = of_first[..., :k] + second
        # The larger one is a multiple of the unit of the smaller, so this is the rounding error of the sum.
        second -= high - of_first[..., :k]
        second += rest
        return high, second


def _cut(v: np.ndarray, largest: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slices whose sum is v, no element being larger than ``largest``: two of so many bits, and the rest."""
    anchor = np.ldexp(1.5 * 2.0 ** (52 - bits), np.frexp(ROUNDED * largest)[1])
    first = v + anchor
    first -= anchor
    rest = v - first
    anchor = anchor * 2.0**-bits
    second = rest + anchor
    second -= anchor
    rest -= second
    return first, second, rest
