"""The shortest solution of one problem with fewer rows than columns, in NumPy and LAPACK.

``x = T w`` for ``T = A^T``, with R of T: the seminormal equations of the second kind, ``R^T R w = b``
(Björck, "Numerical Methods for Least Squares Problems", SIAM, 1996). Steps refine w and x, and bounds are
those of :mod:`neula.algorithms.lapack.seminormal`, whose factors are taken. They go on until the backward
error for ``B = A D^-1`` is small, too: rows of T in large units are dependent when rows of B are not.
"""

from __future__ import annotations

import math

import numpy as np

from neula.algorithms.lapack.doubled import Pair, SlicedMatrix, difference
from neula.algorithms.lapack.products import WIDE, gram_matrix, in_double, products
from neula.algorithms.lapack.refinement import RefinedVectorSolution, ResidualEvaluation, length
from neula.algorithms.lapack.seminormal import SeminormalProblem, by_gram
from neula.algorithms.lapack.triangle import TriangularFactor
from neula.certificates.forward_error import MAX_RATE, left_by_update
from neula.certificates.residuals import residual_noise
from neula.engines import FP64
from neula.kernels.magnitudes import MODERATE


class Wide:
    """``min ||x||`` subject to ``A x = b``.

    Parameters
    ----------
    a : array, shape (m, n), m <= n
        float64.
    columns : array, shape (n,)
        Norms of the columns of A, 1 for zero columns: the diagonal of D.
    of_rows : SeminormalProblem
        Of T, with products in twice the working precision.
    bound : float
        What the backward error may be.
    large : bool
        Whether A is large (:mod:`neula.algorithms.lapack.products`).

    Attributes
    ----------
    scales : None
        No columns are scaled.
    doubled : SlicedMatrix
        T for products in twice the working precision.
    condition, condition_bound : float
        Condition number of ``B = A D^-1``, estimated and from above.
    """

    scales = None

    def __init__(
        self,
        a: np.ndarray,
        columns: np.ndarray,
        of_rows: SeminormalProblem,
        bound: float,
        *,
        large: bool = False,
    ) -> None:
        assert of_rows.doubled is not None
        self.shape, self.method, self._of_rows = a.shape, of_rows.method, of_rows
        self.doubled: SlicedMatrix = of_rows.doubled
        self._a, self._columns, self._largest = products(a, large=large), columns, float(columns.max())
        self._smallest = float(of_rows.columns.min())
        self._norm_of_rows = float(of_rows.columns.max()) * of_rows.norm_bound
        self._scales = np.ones(len(a)) if of_rows.scales is None else of_rows.scales
        self.condition = self.condition_bound = np.inf
        self._norm, self._bound = 1.0, bound  # of B, whose columns have this norm
        factor = by_gram((a / columns).T, large=large)
        if factor is not None:  # its rows as they are, however small: by them the rank is decided
            triangle = TriangularFactor(factor.lower, np.ones(len(a)), large=large and len(a) >= WIDE)
            square, size = length(gram_matrix(factor.lower, large=large).ravel()), length(factor.columns)
            # Singular values beyond the rounding errors of the Gram matrix and of its factor.
            lost = (sum(self.shape) + 5) * FP64.u * (size * triangle.inverse_norm) ** 2
            if 4 * lost <= 1:
                self._norm = square / size
                self.condition = max(1.0, self._norm * triangle.inverse_norm / triangle.margin)
                self.condition_bound = math.sqrt(square / (1 - lost)) * triangle.inverse_norm

    @classmethod
    def factorize(cls, given: np.ndarray, bound: float = math.inf, *, large: bool = False) -> Wide | None:
        """Factorize; None where rows are nearly dependent, and where numbers are not moderate."""
        a = in_double(given, large=large)
        columns = np.sqrt(np.einsum("ij,ij->j", a, a))
        factor = by_gram(a.T, large=large)
        if factor is None or not columns.max() <= MODERATE:
            return None
        of_rows = SeminormalProblem(a.T, factor, doubled=True, large=large)
        if not of_rows.rate <= MAX_RATE:
            return None
        return cls(a, np.where(columns > 0, columns, 1.0), of_rows, bound, large=large)

    def start(self, b: np.ndarray) -> np.ndarray:
        """``R^-1 R^-T b``."""
        triangle = self._of_rows.triangle
        return triangle.solve(triangle.solve_transposed(self._scales * b))

    def lift(self, w: np.ndarray) -> Pair:
        """``T w``."""
        high, low = self.doubled.residual(w, np.zeros(len(w)), np.zeros(self.shape[1]))
        return -high, -low

    def evaluate(self, b: np.ndarray, w: np.ndarray, high: np.ndarray, low: np.ndarray) -> ResidualEvaluation:
        """``R^-1 R^-T (b - A x)``."""
        scaled, rate, triangle = self._scales * b, self._of_rows.rate, self._of_rows.triangle
        residual, rest = difference(scaled, *self.doubled.transposed_pair(high, low))
        residual += rest
        projected = triangle.solve_transposed(residual)
        # Errors of the residual reach x through R^-T, those of T w are its own.
        noise = residual_noise(sum(self.shape), doubled=True)
        of_products = noise * self._norm_of_rows + self.doubled.error
        of_residual = of_products * length(high) + noise * length(scaled)
        floor = triangle.inverse_norm / self._smallest * of_residual + of_products * length(w)
        wrong = left_by_update(rate, lifted=True) * length(projected) + floor
        update = triangle.solve(projected)
        return ResidualEvaluation(
            residual / self._scales, update, self._largest * wrong, self._largest * floor
        )

    def change(self, x: np.ndarray) -> np.ndarray:
        """``A x``."""
        return self._a.times(x)

    def size(self, x: np.ndarray) -> float:
        """``||D x||``."""
        return length(self._columns * x)

    def error(self, b: np.ndarray, residual: np.ndarray, size: float) -> float:
        """Backward error for B (Rigal and Gaches, 1967)."""
        return length(residual) / (self._norm * size + length(b))

    def solves(self, b: np.ndarray, residual: np.ndarray, size: float) -> bool:
        """Whether the backward error is small enough."""
        return not self.error(b, residual, size) > self._bound

    def errors(self, b: np.ndarray, found: RefinedVectorSolution) -> tuple[float, float, float]:
        """Backward error, which is the optimality as well, and forward error."""
        error = self.error(b, found.residual, found.size)
        return error, error, found.forward_error
