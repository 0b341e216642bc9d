"""What batches of small problems share in NumPy: norms, and products in twice the working precision.

What counts are passes over the batch, and calls. NumPy takes a part of the time of torch for products of many
small matrices, and torch a part of its time for reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from neula.algorithms.lapack.doubled import ROUNDED, Pair, bits_of, difference

ELEMENTS = 1 << 18
"""Elements of the matrices that are worked on together: more do not stay in a cache, and fewer take less time
than the calls for them."""


BLOCK = 1 << 15
"""The same of what several passes are made over one after the other."""


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


def _step(x: np.ndarray) -> int:
    return max(1, BLOCK // x[0].size)


def _blocks(x: np.ndarray) -> Iterator[slice]:
    """Parts of a batch that are in the cache while several passes are made over them."""
    step = _step(x)
    return (slice(start, start + step) for start in range(0, len(x), step))


def doubled(
    a: np.ndarray, largest: np.ndarray, x: np.ndarray, b: np.ndarray, slices: int, *, gradients: bool
) -> tuple[np.ndarray, ...]:
    """Residuals ``b - A x`` beyond the working precision, and gradients ``A^T (b - A x)``.

    Slices are made of some matrices at a time, in the same memory: what is new costs more than a pass.

    Parameters
    ----------
    a, largest : array
        As of :class:`SlicedBatch`.
    x, b : array, shape (batch, n, k) and (batch, m, k)
    slices : int
    gradients : bool
        Whether to compute them.
    """
    room, found = np.empty((slices, min(len(a), _step(a)), *a.shape[1:])), []
    for part in _blocks(a):
        some = a[part]
        sliced = SlicedBatch(some, largest[part], room[:, : len(some)])
        high, low = sliced.residual(x[part], b[part])
        found.append((high, sliced.gradient(high, low)) if gradients else (high,))
    if len(found) == 1:
        return found[0]
    return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))


class SlicedBatch:
    """Matrices as sums of slices: :class:`neula.algorithms.lapack.doubled.SlicedMatrix` of a batch.

    With three the error of an element of a product is that of a single matrix. Two take half the time, and
    are enough where the solution is well determined: rounding errors of what is left beside products of the
    first slices are as small as those are long.

    Parameters
    ----------
    a : array, shape (batch, m, n)
        float64.
    largest : array, shape (batch,)
        No element of the matrix is larger.
    room : array, shape (2, batch, m, n) or (3, batch, m, n)
        Where slices are to be.

    Examples
    --------
    >>> import numpy as np
    >>> third = SlicedBatch(np.full((1, 1, 1), 1 / 3), np.ones(1), np.empty((3, 1, 1, 1)))
    >>> high, low = third.residual(np.full((1, 1, 1), 3.0), np.ones((1, 1, 1)))
    >>> high.item() * 2**54, low.item()
    (1.0, 0.0)
    """

    def __init__(self, a: np.ndarray, largest: np.ndarray, room: np.ndarray) -> None:
        self._bits, self._slices = bits_of(a.shape[1:]), room
        _cut(a, largest[:, None, None], self._bits, room)

    def residual(self, x: np.ndarray, b: np.ndarray) -> Pair:
        """``b - A x``, shape (batch, m, k)."""
        high, low = self._product(x, None, np.matmul)
        return difference(b, high, low)

    def gradient(self, high: np.ndarray, low: np.ndarray) -> np.ndarray:
        """``A^T (high + low)``, rounded once; the numbers are those of a residual."""
        high, low = self._product(high, low, transposed_times)
        return high + low

    def _product(self, x: np.ndarray, x_low: np.ndarray | None, times: Callable[..., np.ndarray]) -> Pair:
        """The sum of the products of slices with slices, those of the first being exact."""
        k, parts = x.shape[2], np.empty((len(self._slices), *x.shape))
        _cut(x, largest(x)[:, None], self._bits, parts)
        if x_low is not None:
            parts[-1] += x_low
        of_first = times(self._slices[0], np.concatenate(parts, 2))
        high, second = of_first[..., :k], of_first[..., k : 2 * k]
        if len(parts) == 2:
            return high, times(self._slices[1], x) + second
        of_second = times(self._slices[1], np.concatenate([parts[0], parts[1] + parts[2]], 2))
        rest = times(self._slices[2], x)
        rest += of_second[..., k:]
        rest += of_first[..., 2 * k :]
        second += of_second[..., :k]
        total = high + second
        # The larger one is a multiple of the unit of the smaller, so this is the rounding error of the sum.
        second -= total - high
        second += rest
        return total, second


def _cut(v: np.ndarray, largest: np.ndarray, bits: int, room: np.ndarray) -> None:
    """Put slices where there is room whose sum is v, no element being larger than ``largest``.

    All but the last have so many bits: a sum with an anchor is rounded to multiples of its unit.
    """
    anchor = np.ldexp(1.5 * 2.0 ** (52 - bits), np.frexp(ROUNDED * largest)[1])
    for part in room[:-1]:
        np.add(v, anchor, out=part)
        part -= anchor
        v = np.subtract(v, part, out=room[-1])
        anchor = anchor * 2.0**-bits
