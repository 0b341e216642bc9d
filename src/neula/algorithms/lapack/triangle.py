"""R of a tall matrix: solves with it, and the norm of its inverse."""

from __future__ import annotations

import math

import numpy as np
from scipy.linalg import lapack

from neula.algorithms.lapack.products import MatrixProducts, gram_matrix, products
from neula.algorithms.lapack.refinement import length
from neula.algorithms.lapack.vectors import probe_array
from neula.algorithms.spectra.inverse_norm import EXPLICIT, STEPS
from neula.certificates.forward_error import ESTIMATED


class TriangularFactor:
    """``R = L^T``, and the norm of ``diag(rows) R^-1``.

    Parameters
    ----------
    lower : array, shape (n, n)
        L, float64, column-major: LAPACK is a quarter faster with it than with R.
    rows : array, shape (n,)
    large : bool
        Of the matrix whose R it is (:mod:`neula.algorithms.lapack.products`).

    Attributes
    ----------
    inverse_norm : float
        From above: its Schatten 4-norm, and for large ones three times an estimate.
    margin : float
        By how much that may exceed the norm because it is estimated: 1 or 3.
    """

    def __init__(self, lower: np.ndarray, rows: np.ndarray, *, large: bool = False) -> None:
        self._inverse: MatrixProducts | None = None
        self._lower, self.margin = lower, 1.0
        if len(lower) <= EXPLICIT:
            inverse, _ = lapack.dtrtri(lower, lower=1)
            self._inverse = products(inverse, large=large)
            gram = gram_matrix((inverse * rows).T, large=large)
            self.inverse_norm = math.sqrt(length(gram.ravel()))
            return
        v = probe_array(len(lower), 1)[:, 0]
        for _ in range(STEPS):
            image = rows * self.solve(v / length(v))
            v = self.solve_transposed(rows * (image / length(image)))
        self.inverse_norm, self.margin = ESTIMATED * length(v), ESTIMATED

    def solve(self, y: np.ndarray) -> np.ndarray:
        """``R^-1 y``."""
        if self._inverse is None:
            return self._each(y, trans=1)
        return self._inverse.transposed_times(y)

    def solve_transposed(self, y: np.ndarray) -> np.ndarray:
        """``R^-T y``."""
        if self._inverse is None:
            return self._each(y, trans=0)
        return self._inverse.times(y)

    def _each(self, y: np.ndarray, trans: int) -> np.ndarray:
        """The library takes longer for a few vectors together than for one after another."""
        if y.ndim == 2:
            return np.array([self._each(column, trans) for column in np.ascontiguousarray(y.T)]).T
        found: np.ndarray = lapack.dtrtrs(self._lower, y, lower=1, trans=trans)[0]
        return found
