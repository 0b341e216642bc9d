"""One linear system by the factors of LAPACK, in NumPy.

The bounds are those of ``problems.systems.direct``. What differs is the overhead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.linalg import lapack
from scipy.linalg.blas import idamax, isamax

from neula.algorithms.krylov.batched_lstsq import FEW, MARGINS, ROUNDING
from neula.algorithms.lapack.doubled import SlicedMatrix
from neula.algorithms.lapack.products import (
    MatrixProducts,
    cholesky_factor,
    in_double,
    lu_factors,
    passed,
    products,
)
from neula.algorithms.lapack.refinement import LONG, RefinedVectorSolution, ResidualEvaluation, length
from neula.algorithms.lapack.vectors import probe_array
from neula.algorithms.spectra.inverse_norm import EXPLICIT
from neula.certificates.forward_error import COMPUTED, ESTIMATED, MAX_RATE, enlarged
from neula.certificates.residuals import quotient, residual_noise
from neula.certificates.stagnation import contracts
from neula.engines import FP32, FP64
from neula.kernels.magnitudes import MODERATE

SAFE = 900
"""Exponents between this and its negative are those of numbers with finite reciprocals."""

ALIKE = 16.0
"""Rows, and columns, whose lengths differ by less are not scaled."""

BLOCK = 1 << 17
"""Elements that are looked at together, while they are in the cache."""

Solve = Callable[[np.ndarray], np.ndarray]


class SquareFactors(NamedTuple):
    """What is solved with.

    Attributes
    ----------
    solve, solve_transposed : callable
        ``A^-1 x`` and ``A^-T x`` of one vector.
    several : callable
        ``A^-1 X``.
    inverse : callable
        ``A^-1``, from factors in double precision.
    growth : float
        Of the elements, relative to the largest of A.
    u : float
        Unit roundoff.
    """

    solve: Solve
    solve_transposed: Solve
    several: Solve
    inverse: Callable[[], np.ndarray]
    growth: float
    u: float


def lu(a: np.ndarray, *, single: bool = False, large: bool = False) -> SquareFactors | None:
    """LU with partial pivoting, of the transpose where rows are contiguous; None where a pivot vanishes."""
    transposed = int(a.flags.c_contiguous)
    given = (a.T if transposed else a).astype(_dtype(single), copy=False)
    found = lu_factors(given, large=large)
    if found is None:
        return None
    return factors_of(*found, _largest_element(given, large=large), transposed=transposed, large=large)


def factors_of(
    factors: np.ndarray, pivots: np.ndarray, largest: float, *, transposed: int = 0, large: bool = False
) -> SquareFactors:
    """LU factors in the form of SciPy, of a matrix with elements up to ``largest``, or of its transpose."""
    single = factors.dtype == np.float32
    solve = lapack.sgetrs if single else lapack.dgetrs  # of one vector: without threads
    most = _largest_element(factors, large=large)
    if most <= 1:  # that may be an element of L
        most = _largest_element(np.triu(factors), large=large)

    def several(x: np.ndarray) -> np.ndarray:
        given, places = torch.from_numpy(x.astype(factors.dtype, copy=False)), torch.from_numpy(pivots + 1)
        return torch.linalg.lu_solve(
            torch.from_numpy(factors), places, given, adjoint=bool(transposed)
        ).numpy()

    def one(x: np.ndarray) -> np.ndarray:
        found: np.ndarray = solve(factors, pivots, x, trans=transposed)[0]
        return found

    return SquareFactors(
        one,
        lambda x: solve(factors, pivots, x, trans=1 - transposed)[0],
        several if large else lambda x: _each(one, x),
        lambda: lapack.dgetri(factors, pivots)[0].T if transposed else lapack.dgetri(factors, pivots)[0],
        most / largest,
        (FP32 if single else FP64).u,
    )


def cholesky(a: np.ndarray, *, single: bool = False, large: bool = False) -> SquareFactors | None:
    """Cholesky factors; None where A is not positive definite."""
    library = lapack.spotrs if single else lapack.dpotrs
    given = a.T if a.flags.c_contiguous else a
    lower = cholesky_factor(given.astype(_dtype(single), copy=False), large=large, clean=False)
    if lower is None:
        return None
    factors = lower

    def solve(x: np.ndarray) -> np.ndarray:
        found: np.ndarray = library(factors, x, lower=1)[0]
        return found

    def several(x: np.ndarray) -> np.ndarray:
        given = torch.from_numpy(x.astype(factors.dtype, copy=False))
        return torch.cholesky_solve(given, torch.from_numpy(factors)).numpy()

    def inverse() -> np.ndarray:
        half = np.tril(lapack.dpotri(factors, lower=1)[0])
        return half + np.tril(half, -1).T

    together = several if large else lambda x: _each(solve, x)
    return SquareFactors(solve, solve, together, inverse, 1.0, (FP32 if single else FP64).u)


def _each(solve: Solve, right: np.ndarray) -> np.ndarray:
    """Of one library: a few vectors together take it longer than one after another."""
    return np.array([solve(b) for b in right.T]).T


def _dtype(single: bool) -> type[np.floating[Any]]:
    return np.float32 if single else np.float64


class SquareSystem:
    """``A x = b`` with factors.

    Parameters
    ----------
    a : array, shape (n, n)
        float64, or float32 where residuals are in working precision.
    right : list of array, shape (n,)
        Right-hand sides.
    sizes : array, shape (n,)
        Norms of its columns: the diagonal of D.
    norm : float
        ``||A||`` in the infinity norm.
    factors : SquareFactors
    doubled : float
        No element is larger, where residuals are in twice the working precision; 0 elsewhere.
    large : bool
        Whether A is large (:mod:`neula.algorithms.lapack.products`).

    Attributes
    ----------
    first : list of array, shape (n,)
        Solutions by the factors.
    rate : float
        By how much one update reduces the error, at least.
    condition, condition_bound : float
        Condition number of ``B = A D^-1``, estimated and from above.
    shape, scales, doubled
        As of :class:`neula.algorithms.lapack.seminormal.SeminormalProblem`.
    history : list of float
        Backward errors of what was evaluated.
    """

    def __init__(
        self,
        a: np.ndarray,
        right: list[np.ndarray],
        sizes: np.ndarray,
        norm: float,
        factors: SquareFactors,
        doubled: float,
        *,
        large: bool = False,
    ) -> None:
        self._a, self._sizes, self._infinity_norm = products(a, large=large), sizes, norm
        self.shape, self.scales = a.shape, None
        self._solve = factors.solve
        self.history: list[float] = []
        self._single = factors.u > FP64.u
        n, (least, largest) = len(a), _range(sizes)
        self._norm = length(sizes)
        if n <= EXPLICIT and not large:
            inverse = factors.inverse()
            self._solve = inverse.dot
            scaled_norm, inverse_norm = _schatten(a / sizes)[0], _schatten(sizes[:, None] * inverse)[1]
            missed = a.dot(inverse)
            missed.ravel()[:: n + 1] -= 1.0
            through, lost = inverse_norm, length(missed.ravel())
            self.first = [inverse.dot(b) for b in right]
        else:
            scaled_norm = _norm_along(self._a, sizes)
            units, z = [self._unit_of(b) for b in right], probe_array(n, FEW).T
            known = np.array([*(b / unit for b, unit in zip(right, units, strict=True)), *z])
            found = factors.several(known.T).T.astype(np.float64, copy=False)
            self.first = [x * unit for x, unit in zip(found, units, strict=False)]
            inverse_norm, lost = self._inverse_norm(factors, z, found[len(right) :])
            through = MARGINS[FEW] * inverse_norm
        self._scaled_norm = scaled_norm
        self.condition = max(1.0, inverse_norm * scaled_norm)
        # Rounding errors of a solve, also where none happen to be in what is measured.
        rounding = (
            ROUNDING * factors.u * min(self._norm, ESTIMATED * scaled_norm * largest) * inverse_norm / least
        )
        self.rate = lost + rounding
        self.doubled = SlicedMatrix(a, doubled) if doubled else None
        self._through = enlarged(through, self.rate)
        # B has columns of norm 1.
        self.condition_bound = min(n**0.5, ESTIMATED * scaled_norm) * self._through
        self._unit = residual_noise(n, doubled=bool(doubled), random=True)

    @classmethod
    def factorize(
        cls,
        given: np.ndarray,
        right: list[np.ndarray],
        *,
        positive: bool,
        single: bool,
        doubled: bool,
        large: bool = False,
        factors: SquareFactors | None = None,
    ) -> tuple[SquareSystem, float] | None:
        """Factorize, unless there are factors; the system, and the growth of the elements.

        None where numbers are not moderate or rows or columns not alike, and where factors are no good.
        """
        a = given if single and passed(given) and not doubled else in_double(given, large=large)
        # Squares of what single precision is tried for do not overflow in it.
        seen = given if single and given.dtype == np.float32 else a
        rows, columns = _squares(seen, large=large)
        spread, moderate = ALIKE**2, (MODERATE**0.2 if single else MODERATE) ** 2
        (least, most), (narrowest, widest) = _range(rows), _range(columns)
        alike = most <= spread * least and widest <= spread * narrowest
        if not (alike and 1 / moderate <= most <= moderate):  # nor is NaN
            return None
        if factors is None:
            factors = (cholesky if positive else lu)(given if single else a, single=single, large=large)
        if factors is None:
            return None
        # From below, unless another row of less length has a larger sum.
        norm = float(np.abs(a[rows.argmax()]).sum(dtype=np.float64))
        largest = _largest_element(a, large=large) if doubled else 0.0
        found = cls(a, right, np.sqrt(columns), norm, factors, largest, large=large)
        return (found, factors.growth) if found.rate <= MAX_RATE else None

    def _inverse_norm(self, factors: SquareFactors, z: np.ndarray, found: np.ndarray) -> tuple[float, float]:
        """``||D X||_2`` for the inverse X that the factors are, by a step of the power method from the best
        of some random vectors, whose solutions are known; and ``||I - A X||_2``.

        Factors of A + E err by ``E X``, which is largest where X is. If E is what has made a singular A
        regular, then nothing is left of the vector there.
        """
        images = self._sizes * found
        sizes = [length(x) for x in images]
        best = max(range(len(sizes)), key=sizes.__getitem__)
        v = factors.solve_transposed(self._sizes * (images[best] / sizes[best])).astype(
            np.float64, copy=False
        )
        norm, missed = length(v), z[best] - self._a.times(found[best])
        return norm, length(missed) * norm / sizes[best]

    def _unit_of(self, b: np.ndarray) -> float:
        """What to divide b by: in single precision updates would underflow, and seem to be exact."""
        return 2.0 ** max(-SAFE, min(SAFE, math.frexp(largest_of(b))[1])) if self._single else 1.0

    def start(self, b: np.ndarray) -> np.ndarray:
        """``A^-1 b`` by the factors."""
        if not self._single:
            return self._solve(b)
        unit = self._unit_of(b)
        return self._solve(b / unit).astype(np.float64, copy=False) * unit

    def size(self, x: np.ndarray) -> float:
        """``||D x||``."""
        return length(self._sizes * x)

    def change(self, x: np.ndarray) -> np.ndarray:
        """``A x``."""
        return self._a.times(x)

    def longest(self, residual: np.ndarray, lost: np.ndarray, most: float) -> float:
        """Norm of the residual once x has lost so much: from above where that is at most ``most``."""
        bound = length(residual) + COMPUTED * self._norm * length(lost)
        return bound if bound <= most else length(residual + self.change(lost))

    def evaluate(self, b: np.ndarray, high: np.ndarray, low: np.ndarray) -> ResidualEvaluation:
        """``A^-1 r`` by the factors."""
        # Without doubled products low is below the rounding errors of the residual.
        residual = b - self._a.times(high) if self.doubled is None else self.doubled.residual(high, low, b)[0]
        self.history.append(self.backward_error(b, high, residual))
        update = self.start(residual)
        after = residual - self._a.times(update)
        size, left = length(residual), length(after)
        of_x = length(high)
        floor = self._unit * (self._norm * of_x + length(b))
        if self.doubled is not None:
            floor += self.doubled.error * of_x
        noise = floor + (len(b) + 2) * FP64.u * (size + self._norm * length(update))
        if not contracts(left, size, noise):
            return ResidualEvaluation(after, update, math.inf, self._through * floor)
        return ResidualEvaluation(after, update, self._through * (left + noise), self._through * floor)

    def errors(self, b: np.ndarray, found: RefinedVectorSolution) -> tuple[float, float, float]:
        """Backward error, optimality and forward error of a refined solution of least squares."""
        residual, image = length(found.residual), self._scaled_norm * found.size
        gradient = self._a.transposed_times(found.residual)
        optimality = quotient(length(gradient / self._sizes), self._scaled_norm * residual)
        return min(optimality, residual / (image + length(b))), optimality, found.forward_error

    def backward_error(self, b: np.ndarray, x: np.ndarray, residual: np.ndarray) -> float:
        """``||r|| / (||A|| ||x|| + ||b||)`` in the infinity norm (Rigal and Gaches, 1967)."""
        return float(largest_of(residual) / (self._infinity_norm * largest_of(x) + largest_of(b)))


def _squares(a: np.ndarray, *, large: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Sums of the squares of rows, and of columns."""
    if a.flags.f_contiguous and not a.flags.c_contiguous:
        columns, rows = _squares(a.T, large=large)
        return rows, columns
    n = len(a)
    rows, columns = np.empty(n), np.zeros(n)
    step = max(1, BLOCK // n)
    for start in range(0, n, step):
        part = slice(start, start + step)
        block = a[part]
        columns += np.einsum("ij,ij->j", block, block)
        if not large:
            rows[part] = np.matmul(block[:, None], block[:, :, None])[:, 0, 0]
    if large:  # by all threads
        rows = torch.linalg.vector_norm(torch.from_numpy(a), dim=1).double().square_().numpy()
    return rows, columns


def _range(x: np.ndarray) -> tuple[float, float]:
    """The least and the largest element; NaN comes through."""
    if len(x) > EXPLICIT:
        return float(x.min()), float(x.max())
    known = x.tolist()
    return (min(known), max(known)) if math.isfinite(sum(known)) else (math.nan, math.nan)


def largest_of(x: np.ndarray) -> float:
    """The largest magnitude of a vector."""
    found: float = abs(x[idamax(x) if x.dtype == np.float64 else isamax(x)])
    return found


def _largest_element(a: np.ndarray, *, large: bool) -> float:
    """The same of a matrix without gaps."""
    elements = a.ravel(order="K")  # of others torch takes ten times as long
    if a.size <= LONG:
        return largest_of(elements)
    least, most = torch.aminmax(torch.from_numpy(elements)) if large else (a.min(), a.max())
    return max(float(most), -float(least))


def _schatten(a: np.ndarray) -> tuple[float, float]:
    """``||A||_2`` from below and above (:func:`neula.algorithms.krylov.batched_lstsq.schatten_bounds`)."""
    square = length(a.T.dot(a).ravel())
    return square / length(a.ravel(order="K")), math.sqrt(square)


def _norm_along(a: MatrixProducts, sizes: np.ndarray) -> float:
    """``||A D^-1||_2``, estimated: at least 1, the norm of a column."""
    image = a.times(probe_array(len(sizes), 1)[:, 0] / sizes)
    return max(1.0, length(a.transposed_times(image) / sizes) / length(image))
