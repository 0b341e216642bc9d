"""One linear system by the factors of LAPACK, in NumPy.

The bounds are those of ``problems.systems.direct``. What differs is the overhead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import lapack
from scipy.linalg.blas import idamax, isamax

from neula.algorithms.krylov.batched_lstsq import MARGIN, PROBES, ROUNDING
from neula.algorithms.krylov.doubled_refinement import DOUBLED, MAX_RATE
from neula.algorithms.lapack.doubled import Sliced
from neula.algorithms.lapack.products import (
    Products,
    cholesky_factor,
    lu_factors,
    products,
)
from neula.algorithms.lapack.refinement import LONG, Evaluation, Refined, length
from neula.algorithms.lapack.triangle import ESTIMATED
from neula.algorithms.lapack.vectors import probe_array
from neula.algorithms.spectra.inverse_norm import EXPLICIT, STEPS
from neula.engines import FP32, FP64

VECTORS = 3
"""Random vectors that show how well factors solve."""

MODERATE = 2.0**200
"""Numbers up to this, and down to its reciprocal, have squares and quotients that float64 holds."""

SAFE = 900
"""Exponents between this and its negative are those of numbers with finite reciprocals."""

ALIKE = 16.0
"""Rows, and columns, whose largest elements differ by less are not scaled."""

BLOCK = 1 << 16
"""Elements that are looked at together, while they are in the cache."""

Solve = Callable[[np.ndarray], np.ndarray]


class Factors(NamedTuple):
    """What is solved with.

    Attributes
    ----------
    solve, solve_transposed : callable
        ``A^-1 x`` and ``A^-T x``.
    inverse : callable
        ``A^-1``, from factors in double precision.
    growth : float
        Of the elements, relative to the largest of A.
    u : float
        Unit roundoff.
    """

    solve: Solve
    solve_transposed: Solve
    inverse: Callable[[], np.ndarray]
    growth: float
    u: float


def lu(a: np.ndarray, largest: float, *, single: bool = False, large: bool = False) -> Factors | None:
    """LU with partial pivoting, of the transpose where rows are contiguous; None where a pivot vanishes."""
    transposed = int(a.flags.c_contiguous)
    given = (a.T if transposed else a).astype(_dtype(single), copy=False)
    solve = lapack.sgetrs if single else lapack.dgetrs  # of one vector: without threads
    found = lu_factors(given, large=large)
    if found is None:
        return None
    factors, pivots = found
    most = _largest_element(factors)
    if most <= 1:  # that may be an element of L
        most = _largest_element(np.triu(factors))
    return Factors(
        lambda x: solve(factors, pivots, x, trans=transposed)[0],
        lambda x: solve(factors, pivots, x, trans=1 - transposed)[0],
        lambda: lapack.dgetri(factors, pivots)[0].T if transposed else lapack.dgetri(factors, pivots)[0],
        float(most / largest),
        (FP32 if single else FP64).u,
    )


def cholesky(a: np.ndarray, *, single: bool = False, large: bool = False) -> Factors | None:
    """Cholesky factors; None where A is not positive definite."""
    library = lapack.spotrs if single else lapack.dpotrs
    given = a.T if a.flags.c_contiguous else a
    factors = cholesky_factor(given.astype(_dtype(single), copy=False), large=large, clean=False)

    def solve(x: np.ndarray) -> np.ndarray:
        found: np.ndarray = library(factors, x, lower=1)[0]
        return found

    def inverse() -> np.ndarray:
        lower = np.tril(lapack.dpotri(factors, lower=1)[0])
        return lower + np.tril(lower, -1).T

    return None if factors is None else Factors(solve, solve, inverse, 1.0, (FP32 if single else FP64).u)


def _dtype(single: bool) -> type[np.floating[Any]]:
    return np.float32 if single else np.float64


class Square:
    """``A x = b`` with factors.

    Parameters
    ----------
    a : array, shape (n, n)
        float64.
    sizes : array, shape (n,)
        Norms of its columns: the diagonal of D.
    norm : float
        ``||A||`` in the infinity norm.
    factors : Factors
    doubled : float
        No element is larger, where residuals are in twice the working precision; 0 elsewhere.
    large : bool
        Whether A is large (:mod:`neula.algorithms.lapack.products`).

    Attributes
    ----------
    rate : float
        By how much one update reduces the error, at least.
    condition, condition_bound : float
        Condition number of ``B = A D^-1``, estimated and from above.
    shape, scales, doubled
        As of :class:`neula.algorithms.lapack.seminormal.Seminormal`.
    history : list of float
        Backward errors of what was evaluated.
    """

    def __init__(
        self,
        a: np.ndarray,
        sizes: np.ndarray,
        norm: float,
        factors: Factors,
        doubled: float,
        *,
        large: bool = False,
    ) -> None:
        self._a, self._sizes, self._infinity_norm = products(a, large=large), sizes, norm
        self.shape, self.scales = a.shape, None
        self._solve = factors.solve
        self.history: list[float] = []
        self._single = factors.u > FP64.u
        n, norm_of_columns = len(a), sizes.tolist()
        largest, least = max(norm_of_columns), min(norm_of_columns)
        self._norm = length(sizes)
        explicit = n <= EXPLICIT and not large
        if explicit:
            inverse = factors.inverse()
            self._solve = inverse.dot
            scaled_norm, inverse_norm = _schatten(a / sizes)[0], _schatten(sizes[:, None] * inverse)[1]
        else:
            scaled_norm, inverse_norm = _norm_along(self._a, sizes), _inverse_norm(factors, sizes)
        self._scaled_norm = scaled_norm
        self.condition = max(1.0, inverse_norm * scaled_norm)
        norm_bound = min(n**0.5, ESTIMATED * scaled_norm)  # B has columns of norm 1
        self.condition_bound = norm_bound * inverse_norm * (1 if explicit else ESTIMATED)
        z = probe_array(n, VECTORS, unit=n <= PROBES)
        images = self._a.times(z)
        missed = z.T - (self._solve(images).T if explicit else self._each(images))
        # Rounding errors of a solve, also where none happen to be in what is measured.
        rounding = (
            ROUNDING * factors.u * min(self._norm, ESTIMATED * scaled_norm * largest) * inverse_norm / least
        )
        self.rate = MARGIN * length(missed.ravel()) + rounding
        self.doubled = Sliced(a, doubled) if doubled else None
        self._largest = largest
        self._noise = (DOUBLED if doubled else 2 * FP64.u) * n**0.5 * inverse_norm
        self._noise_of_slices = self.doubled.error * inverse_norm if self.doubled else 0.0

    @classmethod
    def of(
        cls, given: np.ndarray, *, positive: bool, single: bool, doubled: bool, large: bool = False
    ) -> tuple[Square, float] | None:
        """Factorize; the system, and the growth of the elements.

        None where numbers are not moderate or rows or columns not alike, and where factors are no good.
        """
        a = given.astype(np.float64, copy=False)
        rows, squares, largest = _magnitudes(a, large=large)
        columns, most = squares.tolist(), max(rows)
        alike = most <= ALIKE * min(rows) and max(columns) <= ALIKE**2 * min(columns)
        moderate = MODERATE**0.2 if single else MODERATE
        if not (alike and 1 / moderate <= most <= moderate and largest > 0):  # which NaN leaves at 0
            return None
        if positive:
            factors = cholesky(given, single=single, large=large)
        else:
            factors = lu(given, largest, single=single, large=large)
        if factors is None:
            return None
        found = cls(a, np.sqrt(squares), most, factors, largest if doubled else 0.0, large=large)
        return (found, factors.growth) if found.rate <= MAX_RATE else None

    def _each(self, right: np.ndarray) -> np.ndarray:
        """Solutions as rows: a few vectors together take the library longer than one after another."""
        return np.array([self._solve(b) for b in np.ascontiguousarray(right.T)])

    def start(self, b: np.ndarray) -> np.ndarray:
        """``A^-1 b`` by the factors."""
        if not self._single:
            return self._solve(b)
        # Updates in single precision would underflow, and seem to be exact.
        unit = 2.0 ** max(-SAFE, min(SAFE, math.frexp(largest_of(b))[1]))
        return self._solve(b / unit).astype(np.float64, copy=False) * unit

    def size(self, x: np.ndarray) -> float:
        """``||D x||``."""
        return length(self._sizes * x)

    def change(self, x: np.ndarray) -> np.ndarray:
        """``A x``."""
        return self._a.times(x)

    def evaluate(self, b: np.ndarray, high: np.ndarray, low: np.ndarray) -> Evaluation:
        """``A^-1 r`` by the factors."""
        # Without doubled products low is below the rounding errors of the residual.
        residual = b - self._a.times(high) if self.doubled is None else self.doubled.residual(high, low, b)[0]
        self.history.append(self.backward_error(b, high, residual))
        update = self.start(residual)
        of_x = length(high)
        floor = self._noise * (self._norm * of_x + length(b)) + self._noise_of_slices * of_x
        wrong = self._largest * self.rate / (1 - self.rate) * length(update) + floor
        return Evaluation(residual, update, wrong, floor)

    def errors(self, b: np.ndarray, found: Refined) -> tuple[float, float, float]:
        """Backward error, optimality and forward error of a refined solution of least squares."""
        residual, image = length(found.residual), self._scaled_norm * found.size
        gradient = self._a.transposed_times(found.residual)
        optimality = length(gradient / self._sizes) / (self._scaled_norm * residual) if residual else 0.0
        return min(optimality, residual / (image + length(b))), optimality, found.forward_error

    def backward_error(self, b: np.ndarray, x: np.ndarray, residual: np.ndarray) -> float:
        """``||r|| / (||A|| ||x|| + ||b||)`` in the infinity norm (Rigal and Gaches, 1967)."""
        return float(largest_of(residual) / (self._infinity_norm * largest_of(x) + largest_of(b)))


def _magnitudes(a: np.ndarray, *, large: bool) -> tuple[list[float], np.ndarray, float]:
    """Sums of rows of ``|A|``, of squares of columns, and the largest element, in one pass."""
    n = len(a)
    ones, rows, squares, largest = np.ones(n), list[float](), np.zeros(n), 0.0
    step = max(1, BLOCK // n)
    for start in range(0, n, step):
        block = np.abs(a[start : start + step])
        rows += (block.sum(1) if large else block.dot(ones)).tolist()
        largest = max(largest, float(block.max()))
        block *= block
        squares += block.sum(0) if large else ones[: len(block)].dot(block)
    return rows, squares, largest


def largest_of(x: np.ndarray) -> float:
    """The largest magnitude of a vector."""
    found: float = abs(x[idamax(x) if x.dtype == np.float64 else isamax(x)])
    return found


def _largest_element(a: np.ndarray) -> float:
    """The same of a column-major matrix."""
    return largest_of(a.T.ravel()) if a.size <= LONG else float(max(a.max(), -a.min()))


def _schatten(a: np.ndarray) -> tuple[float, float]:
    """``||A||_2`` from below and above (:func:`neula.algorithms.krylov.batched_lstsq.schatten_bounds`)."""
    square = length(a.T.dot(a).ravel())
    return square / length(a.ravel(order="K")), math.sqrt(square)


def _norm_along(a: Products, sizes: np.ndarray) -> float:
    """``||A D^-1||_2``, estimated."""
    image = a.times(probe_array(len(sizes), 1)[:, 0] / sizes)
    return length(a.transposed_times(image) / sizes) / length(image)


def _inverse_norm(factors: Factors, sizes: np.ndarray) -> float:
    """``||D A^-1||_2`` by the power method, from below."""
    v = probe_array(len(sizes), 1)[:, 0]
    for _ in range(STEPS):
        image = sizes * factors.solve(v / length(v)).astype(np.float64, copy=False)
        v = factors.solve_transposed(sizes * (image / length(image))).astype(np.float64, copy=False)
    return length(v)
