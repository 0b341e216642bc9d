"""A batch of linear systems by the factors of LAPACK, in as few passes over it as their evidence takes.

What differs from :mod:`neula.algorithms.lapack.square` is how the error of a solution is bounded: by the
residual that its update leaves, and by the norm of the inverse, from a few random vectors with a margin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from neula.algorithms.krylov.batched_lstsq import FEW, PROBES, ROUNDING
from neula.algorithms.lapack.batches import doubled, largest, least, lengths, most, transposed_times
from neula.algorithms.lapack.doubled import error_of, two_sum
from neula.algorithms.lapack.square import ALIKE
from neula.algorithms.lapack.vectors import probe_array
from neula.certificates.forward_error import MAX_RATE, enlarged, inverse_margin, measured_error
from neula.certificates.residuals import quotient, residual_noise
from neula.certificates.stagnation import contracts, settled
from neula.engines import FP64
from neula.kernels.magnitudes import MODERATE

Solve = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class SquareBatchFactors:
    """What is solved with.

    Attributes
    ----------
    solve : callable
        ``A^-1 X`` for arrays of shape (batch, n, k).
    most : array, shape (batch,), or None
        Largest elements of U; None where no element grows.
    """

    solve: Solve
    most: np.ndarray | None = None


def lu(a: np.ndarray) -> SquareBatchFactors:
    """LU with partial pivoting, of the transposes where rows are contiguous; solutions are not finite where a
    pivot vanishes.
    """
    given, transposed = torch.from_numpy(a), a.strides[2] <= a.strides[1]
    factors, pivots, _ = torch.linalg.lu_factor_ex(given.mT if transposed else given)

    def solve(b: np.ndarray) -> np.ndarray:
        found: np.ndarray = torch.linalg.lu_solve(
            factors, pivots, torch.from_numpy(b), adjoint=transposed
        ).numpy()
        return found

    sizes = _largest(factors)
    if not (sizes > 1).all():  # those may be elements of L
        sizes = _largest(factors.triu())
    return SquareBatchFactors(solve, sizes)


def _largest(x: torch.Tensor) -> np.ndarray:
    elements = x.mT.flatten(1)
    found: np.ndarray = np.maximum(elements.amax(1).numpy(), -elements.amin(1).numpy())
    return found


def cholesky(a: np.ndarray) -> SquareBatchFactors:
    """Cholesky factors; solutions are not finite where A is not positive definite."""
    lower, info = torch.linalg.cholesky_ex(torch.from_numpy(a))
    if bool(info.any()):
        lower = lower.masked_fill((info > 0)[:, None, None], torch.nan)

    def solve(b: np.ndarray) -> np.ndarray:
        found: np.ndarray = torch.cholesky_solve(torch.from_numpy(b), lower).numpy()
        return found

    return SquareBatchFactors(solve)


@dataclass(frozen=True)
class SquareBatchSolution:
    """Solutions of a batch, with arrays of shape (batch, k) for each right-hand side.

    Attributes
    ----------
    x : array, shape (batch, n, k)
        As they are given back.
    left : array
        Bound on ``||D (x - x*)|| / ||D x||`` for the sum that was refined, D being the norms of A's columns.
    low, rounding : array
        What x lacks of that sum, and what rounding x to another dtype has lost, relative to it.
    backward_error, first_error : array
        Of x before it was rounded, and of what the factors gave, in the infinity norm; the first is the
        componentwise one where rows or columns of A differ in size.
    settled : array of bool
        Whether another update would gain nothing: what is left are rounding errors of the residual.
    good : array of bool
        Whether all of this is to be trusted: numbers are moderate, and factors solve.
    residual : array
        ``||b - A x|| / ||b||`` of x as it is given back.
    condition : array, shape (batch, 1)
        Condition number of ``A D^-1``, estimated.
    """

    x: np.ndarray
    left: np.ndarray
    low: np.ndarray | float
    rounding: np.ndarray | float
    backward_error: np.ndarray
    first_error: np.ndarray
    settled: np.ndarray
    good: np.ndarray
    residual: np.ndarray
    condition: np.ndarray

    @property
    def forward_error(self) -> np.ndarray:
        """For x as it is given back, bound on ``||D (x - x*)|| / ||D x*||``."""
        return measured_error(self.left + self.low, 1.0, self.rounding)


class Squares:
    """``A x = b`` with factors of each A.

    Parameters
    ----------
    a : array, shape (batch, n, n)
        float64.
    factorize : callable
    slices : int
        Of A in residuals beyond the working precision
        (:class:`~neula.algorithms.lapack.batches.SlicedBatch`); 0 for residuals in working precision.
    updates : bool
        Whether what the factors give is updated once.

    Attributes
    ----------
    growth : array, shape (batch,)
        Of the elements, relative to the largest of A.
    """

    def __init__(
        self,
        a: np.ndarray,
        factorize: Callable[[np.ndarray], SquareBatchFactors],
        *,
        slices: int,
        updates: bool,
    ) -> None:
        self._a, self._updates, n = a, updates, a.shape[1]
        magnitudes, ones = np.abs(a), np.ones(n)
        rows, of_a = np.matmul(magnitudes, ones), most(magnitudes.reshape(len(a), -1))
        np.multiply(magnitudes, magnitudes, out=magnitudes)
        sizes = np.sqrt(np.matmul(ones, magnitudes))
        self._sizes, self._norm = sizes[..., None], lengths(sizes[..., None])
        self._infinity_norm, self._smallest = most(rows)[:, None], least(sizes)[:, None]
        norm, smallest_row, largest_column = self._infinity_norm, least(rows)[:, None], most(sizes)[:, None]
        alike = (norm <= ALIKE * smallest_row) & (largest_column <= ALIKE * self._smallest)
        self._graded = np.flatnonzero(~alike)
        self._moderate = (np.minimum(smallest_row, self._smallest) >= 1 / MODERATE) & (norm <= MODERATE)
        factors = factorize(a)
        self.growth = np.ones(len(a)) if factors.most is None else factors.most / of_a
        self._solve, self._largest, self._slices = factors.solve, of_a, slices

    def refined(self, b: np.ndarray, dtype: type[Any]) -> SquareBatchSolution:
        """Solve, update, and measure.

        Parameters
        ----------
        b : array, shape (batch, n, k)
            float64.
        dtype : type
            Of x as it is given back.
        """
        x, inverse_norm, estimate = self._start(b)
        n, of_b, steps, low = b.shape[1], lengths(b), list[np.ndarray](), None
        if self._slices:
            (before,) = doubled(self._a, self._largest, x, b, self._slices, gradients=False)
        else:
            before = b - np.matmul(self._a, x)
        if self._updates:
            update = self._solve(before)
            x, low = two_sum(x, update)
            steps = [update, low]
        given = x if dtype is np.float64 else x.astype(dtype).astype(np.float64)
        if given is not x:
            steps.append(x - given)
        condition, images = self._condition(steps, estimate)
        after, of_before, size = before, lengths(before), lengths(self._sizes * x)
        unit = residual_noise(n, doubled=self._slices > 0, random=True)
        floor = unit * (self._norm * lengths(x) + of_b)
        if self._slices:
            floor += error_of((n, n), self._slices) * self._largest[:, None] * lengths(x)
        noise = floor
        if self._updates:
            after = before - images[0]
            noise = floor + (n + 2) * FP64.u * (of_before + self._norm * lengths(update))
        of_x = after + images[1] if self._updates else after
        left, scale = lengths(after), self._infinity_norm * largest(x) + largest(b)
        backward_error = largest(of_x) / scale
        if len(self._graded):
            backward_error[self._graded] = self._by_rows(x, b, of_x)
        solves = contracts(left, of_before, noise) if self._updates else True
        rate = ROUNDING * FP64.u * self._norm * inverse_norm / self._smallest
        solves &= rate <= MAX_RATE
        of_given = of_x if given is x else of_x + images[-1]
        moderate = (of_b >= 1 / MODERATE) & (of_b <= MODERATE)
        return SquareBatchSolution(
            x=given,
            left=enlarged(inverse_norm, rate) * (left + noise) / size,
            low=0.0 if low is None else lengths(self._sizes * low) / size,
            rounding=0.0 if given is x else lengths(self._sizes * steps[-1]) / size,
            backward_error=backward_error,
            first_error=largest(before) / scale,
            settled=settled(left + floor, floor),  # the residual as it is, without its rounding errors
            good=self._moderate & solves & moderate,
            residual=lengths(of_given) / of_b,
            condition=condition,
        )

    def _by_rows(self, x: np.ndarray, b: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """Backward errors where rows or columns differ in size: ``max |r| / (|A| |x| + |b|)``.

        That is the componentwise one (Oettli and Prager, 1964), and no less than the normwise one of A with
        rows and columns scaled in any way.
        """
        some = self._graded
        sizes = np.matmul(np.abs(self._a[some]), np.abs(x[some])) + np.abs(b[some])
        return most(quotient(np.abs(residual[some]), sizes))

    def _start(self, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """``A^-1 b``, and ``||D A^-1||`` from above and as it is estimated, shape (batch, 1)."""
        batch, n, k = b.shape
        count = PROBES if self._updates else FEW
        z = probe_array(n, count, unit=n <= PROBES)
        if n <= PROBES:
            unit = np.empty((batch, n, n))
            unit[:] = z
            inverse = self._solve(unit)
            first, images, margin = np.matmul(inverse, b), inverse, 1.0
            self._solve = lambda x: np.matmul(inverse, x)
        else:
            rows = np.empty((batch, k + count, n))
            rows[:, :k], rows[:, k:] = b.transpose(0, 2, 1), z.T
            found = self._solve(rows.transpose(0, 2, 1))
            first, images, margin = found[..., :k], found[..., k:], inverse_margin(count)
        images = self._sizes * images
        estimate = np.sqrt(np.einsum("pik,pik->p", images, images))[:, None]
        return first, margin * estimate, estimate

    def _condition(
        self, steps: list[np.ndarray], inverse_norm: np.ndarray
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """The condition number, ``||A D^-1||`` by a step of the power method; images of other vectors."""
        v = probe_array(self._a.shape[1], 1) / self._sizes
        images = np.matmul(self._a, np.concatenate([v, *steps], 2))
        image = images[..., :1]
        norm = lengths(transposed_times(self._a, image) / self._sizes) / lengths(image)
        k = (images.shape[2] - 1) // max(1, len(steps))
        of_steps = [images[..., 1 + i * k : 1 + (i + 1) * k] for i in range(len(steps))]
        return np.maximum(np.maximum(norm, 1.0) * inverse_norm, 1.0), of_steps  # columns have norm 1
