"""One least-squares problem by the corrected seminormal equations, in NumPy and LAPACK.

The algorithm and its bounds are those of :mod:`neula.algorithms.krylov.batched_lstsq`, with R of a Cholesky
factorization or reflections. What differs is the overhead: some eighty calls that take half a microsecond
each.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from neula.algorithms.krylov.batched_lstsq import FEW, MARGINS, PROBES, ROUNDING
from neula.algorithms.lapack.doubled import SlicedMatrix
from neula.algorithms.lapack.products import (
    WIDE,
    cholesky_factor,
    gram_matrix,
    in_double,
    passed,
    products,
    schatten_square,
)
from neula.algorithms.lapack.refinement import RefinedVectorSolution, ResidualEvaluation, length
from neula.algorithms.lapack.triangle import TriangularFactor
from neula.algorithms.lapack.vectors import probe_array
from neula.certificates.forward_error import (
    ESTIMATED,
    MAX_RATE,
    enlarged,
    least_squares_error,
    left_by_update,
)
from neula.certificates.residuals import projection_noise, quotient, residual_noise
from neula.engines import FP64
from neula.kernels.magnitudes import MODERATE

ALIKE = 4.0
"""Columns whose norms differ by less are not scaled before their products are doubled."""


class SeminormalFactor(NamedTuple):
    """R of a tall matrix, and what is known by it.

    Attributes
    ----------
    lower : array, shape (n, n)
        ``R^T``, float64, column-major.
    columns : array, shape (n,)
        Norms of the columns of A: the diagonal of D.
    norm, norm_bound : float
        ``||B||_2`` for ``B = A D^-1`` from below and from above.
    method : str
        What made it, and in which format.
    """

    lower: np.ndarray
    columns: np.ndarray
    norm: float
    norm_bound: float
    method: str


def by_gram(a: np.ndarray, *, large: bool = False) -> SeminormalFactor | None:
    """From the Gram matrix, in the precision of A.

    None where it is not positive definite, and where numbers are not moderate.
    """
    gram, large = gram_matrix(a, large=large), large and a.shape[1] >= WIDE
    squares = gram.diagonal().tolist()
    moderate = _moderate(a)
    if not (min(squares) >= moderate**-2 and max(squares) <= moderate**2):
        return None
    lower = cholesky_factor(gram, large=large)
    if lower is None:
        return None
    columns = np.sqrt(gram.diagonal())
    # The Schatten 4-norm of B is between ||B|| and n^(1/4) ||B||; its square is the norm of B^T B.
    square = math.sqrt(schatten_square(gram, 1 / gram.diagonal(), large=large))
    return SeminormalFactor(
        in_double(lower, large=large),
        in_double(columns, large=False),
        square / math.sqrt(len(gram)),
        math.sqrt(square),
        f"cholesky fp{8 * a.itemsize}",
    )


def by_reflections(a: np.ndarray, *, large: bool = False) -> SeminormalFactor | None:
    """By Householder's, in the precision of A; None where numbers are not moderate."""
    n, moderate = a.shape[1], _moderate(a)
    upper = torch.from_numpy(np.empty((n, n))).copy_(torch.geqrf(torch.from_numpy(a))[0][:n]).triu_()
    columns = torch.linalg.vector_norm(upper, dim=0).numpy()
    if not (columns.min() >= 1 / moderate and columns.max() <= moderate):
        return None
    r, v = products(upper.numpy(), large=large and n >= WIDE), probe_array(n, 1)[:, 0]
    image = r.times(v / columns)
    norm = length(r.transposed_times(image) / columns) / length(image)
    norm_bound = min(ESTIMATED * norm, math.sqrt(n))
    return SeminormalFactor(upper.numpy().T, columns, norm, norm_bound, f"householder fp{8 * a.itemsize}")


def _moderate(a: np.ndarray) -> float:
    """Norms of columns up to this, and down to its reciprocal, have squares that lose nothing."""
    return MODERATE if a.dtype == np.float64 else MODERATE**0.1


class SeminormalProblem:
    """``min ||A x - b||`` for a tall matrix.

    Parameters
    ----------
    a : array, shape (m, n), m >= n
        float64, or float32 where residuals are in working precision.
    factor : SeminormalFactor
    doubled : bool
        Whether residuals are in twice the working precision.
    large : bool
        Whether A is large (:mod:`neula.algorithms.lapack.products`).

    Attributes
    ----------
    scales : array, shape (n,), or None
        Powers of two with which the columns of A were multiplied.
    columns : array, shape (n,)
        Norms of the columns, scaled: the diagonal of D.
    norm_bound : float
        ``||B||_2`` from above.
    triangle : TriangularFactor
        R.
    doubled : SlicedMatrix or None
        A for residuals in twice the working precision.
    rate : float
        ``||I - W^T W||_F`` for ``W = A R^-1`` from above.
    condition, condition_bound : float
        Condition number of B, estimated and from above.
    method : str
        As of :class:`SeminormalFactor`.
    """

    def __init__(
        self, a: np.ndarray, factor: SeminormalFactor, *, doubled: bool, large: bool = False
    ) -> None:
        lower, self.columns, self._norm, self.norm_bound, self.method = factor
        self.shape, self.scales, n = a.shape, None, len(lower)
        sizes = self.columns.tolist()
        if doubled and max(sizes) > ALIKE * min(sizes):  # all are cut into slices at the same places
            scales = self.scales = np.ldexp(1.0, -np.frexp(self.columns)[1])
            a, lower, self.columns = a * scales, lower * scales[:, None], self.columns * scales
            sizes = self.columns.tolist()
        self._smallest = min(sizes)
        self._a = products(a, large=large)
        self.triangle = TriangularFactor(lower, self.columns, large=large and n >= WIDE)
        inverse_norm, margin = self.triangle.inverse_norm, self.triangle.margin
        self.condition = max(1.0, self._norm * inverse_norm / margin)
        self.condition_bound = self.norm_bound * inverse_norm
        if margin > 1:
            self.condition_bound = min(self.condition_bound, margin * self.condition)
        count = PROBES if doubled and not large else FEW
        z = probe_array(n, count, unit=n <= PROBES)
        images = self.triangle.solve_transposed(self._a.gram_times(self.triangle.solve(z)))
        rounding = ROUNDING * FP64.u * n * self.triangle.inverse_norm
        self.rate = MARGINS[count] * length((z - images).ravel(order="K")) + rounding
        self.doubled = SlicedMatrix(a, max(sizes), large=large) if doubled else None

    @classmethod
    def factorize(
        cls,
        given: np.ndarray,
        *,
        doubled: bool,
        single: bool,
        large: bool = False,
        refused: list[SeminormalFactor] | None = None,
    ) -> SeminormalProblem | None:
        """Factorize, first in single precision where that will do; None where no R is good enough.

        Parameters
        ----------
        given : array, shape (m, n)
        doubled, single, large : bool
        refused : list of SeminormalFactor, optional
            Those that are not good enough are put there.
        """
        m, n = given.shape
        a = given if passed(given) and not doubled else in_double(given, large=large)
        # Reflections are for condition numbers beyond some 1e7.
        tried = [
            lambda: by_gram(in_double(a, large=large), large=large),
            lambda: by_reflections(in_double(a, large=large), large=large),
        ]
        if single:
            narrow = given.astype(np.float32, copy=False)
            tried.insert(
                0, lambda: by_gram(narrow, large=large) if m >= 2 * n else by_reflections(narrow, large=large)
            )
        for factorize in tried:
            factor = factorize()
            found = None if factor is None else cls(a, factor, doubled=doubled, large=large)
            if found is not None and found.rate <= MAX_RATE:
                return found
            if refused is not None and factor is not None:
                refused.append(factor)
        return None

    def start(self, b: np.ndarray) -> np.ndarray:
        """``R^-1 R^-T A^T b``."""
        return self.triangle.solve(self.triangle.solve_transposed(self._a.transposed_times(b)))

    def size(self, x: np.ndarray) -> float:
        """``||D x||``."""
        return length(self.columns * x)

    def change(self, x: np.ndarray) -> np.ndarray:
        """``A x``."""
        return self._a.times(x)

    def evaluate(self, b: np.ndarray, high: np.ndarray, low: np.ndarray) -> ResidualEvaluation:
        """``R^-1 R^-T A^T (b - A x)``."""
        # Errors of the residual reach x through B^+, and those of the gradient through (B^T B)^-1.
        through, bound = self.triangle.inverse_norm, self.norm_bound
        if self.doubled is None:
            residual, gradient = self._a.residual(b, high)
            of_slices = 0.0
        else:
            residual, rest = self.doubled.residual(high, low, b)
            gradient = self.doubled.gradient(residual, rest)
            of_slices = self.doubled.error * (length(high) + through * length(residual) / self._smallest)
        projected = self.triangle.solve_transposed(gradient)
        noise = residual_noise(sum(self.shape), doubled=self.doubled is not None)
        sizes = self.size(high), length(b), length(residual)
        floor = projection_noise(noise, bound, bound * through, *sizes) + of_slices
        wrong = left_by_update(self.rate) * length(projected) + floor
        update = self.triangle.solve(projected)
        return ResidualEvaluation(residual - self.change(update), update, through * wrong, through * floor)

    def errors(self, b: np.ndarray, found: RefinedVectorSolution) -> tuple[float, float, float]:
        """Backward error, optimality and forward error of a refined solution.

        The first is the least of three bounds (:mod:`neula.certificates.backward_error`), the last what the
        update says, or, with residuals in working precision, Wedin's bound where that is less
        (:mod:`neula.certificates.forward_error`).
        """
        gradient = self._a.transposed_times(found.residual)
        residual, image = length(found.residual), self._norm * found.size
        projected = enlarged(length(self.triangle.solve_transposed(gradient)), self.rate)
        optimality = quotient(length(gradient / self.columns), self._norm * residual)
        backward_error = min(optimality, residual / (image + length(b)), projected / image)
        if self.doubled is not None:
            return backward_error, optimality, found.forward_error
        by_formula = least_squares_error(self.condition_bound, backward_error, residual / image)
        return backward_error, optimality, min(found.forward_error, by_formula)
