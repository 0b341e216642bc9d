"""Small least-squares problems of Krylov methods, solved on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]


def ratio(a: Array, b: Array) -> Array:
    """``a / b``, 0 where both vanish."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((a == 0) & (b == 0), 0.0, a / b)


class ProjectedLeastSquares:
    """The least-squares problems ``min ||C - H Y||`` of GMRES, by reflections, on the host.

    C has the coefficients of right-hand sides in the basis, H those of images of its vectors. Vectors of the
    basis that are zero have none. All of it are arrays of a few hundred rows: NumPy works on them at once,
    where torch would wait for its threads.

    Attributes
    ----------
    rows : int
        Vectors of the basis.
    next : list of int
        Those that have no image yet.
    """

    def __init__(self) -> None:
        self.rows, self.next = 0, list[int]()
        self._zeros, self._used, self._images = set[int](), list[int](), 0
        # The product of all reflections so far, and the triangle that they have made of H, by columns.
        self._q: NDArray[Any] = np.zeros((0, 0))
        self._r: list[Array] = []

    def begin(self, coefficients: Array) -> Array:
        """Right-hand sides, and the vectors that they add to the basis; returns the relative residuals."""
        self._start = np.linalg.norm(coefficients, axis=0)
        self.next = self.next + self._grow(coefficients)
        self._rhs = self._q @ coefficients
        return self._residuals()

    def append(self, blocks: list[tuple[list[int], Array]]) -> Array:
        """Images of some vectors of the basis, and the vectors that they add to it, some blocks of them."""
        for columns, h in blocks:
            self._append(columns, h)
        return self._residuals()

    def _grow(self, h: Array) -> list[int]:
        """New vectors, whose coefficients are the last rows; returns those that are not zero."""
        k, first = h.shape[1], self.rows
        self.rows += k
        self._zeros |= {first + j for j in range(k) if h[first + j, j] == 0}
        q = np.eye(self.rows, dtype=h.dtype)
        q[:first, :first] = self._q
        self._q = q
        return [j for j in range(first, self.rows) if j not in self._zeros]

    def _append(self, columns: list[int], h: Array) -> None:
        self.next = self._grow(h)
        self._rhs = np.concatenate([self._rhs, np.zeros((len(columns), self._rhs.shape[1]), self._rhs.dtype)])
        places, size = [i for i, j in enumerate(columns) if j not in self._zeros], len(self._r)
        image = self._q @ h[:, places]
        rotation, triangle = np.linalg.qr(image[size:], mode="complete")
        self._q[size:] = rotation.conj().T @ self._q[size:]
        self._rhs[size:] = rotation.conj().T @ self._rhs[size:]
        image[size:] = triangle
        self._r += list(image.T)
        self._used += [self._images + i for i in places]
        self._images += len(columns)

    def _residuals(self) -> Array:
        sizes = np.linalg.norm(self._rhs[len(self._r) :], axis=0)
        return ratio(sizes, self._start)

    @np.errstate(over="ignore", invalid="ignore")  # not accepted unless finite
    def solve(self) -> Array:
        """Coefficients Y of all vectors that have images, shape (images, k)."""
        size = len(self._r)
        found, y = self._rhs[:size].copy(), np.zeros((self._images, self._rhs.shape[1]), self._rhs.dtype)
        for j in reversed(range(size)):  # LAPACK's has threads, which take longer to begin
            column = self._r[j]
            # Nothing is known in a direction that A maps to zero: any pivot will do.
            found[j] /= column[j] if column[j] != 0 else 1.0
            found[:j] -= column[:j, None] * found[j]
        y[self._used] = found
        return y
