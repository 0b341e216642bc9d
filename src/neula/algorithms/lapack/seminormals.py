"""A batch of least-squares problems by the corrected seminormal equations, in a few passes over it.

The bounds are those of :mod:`neula.algorithms.krylov.batched_lstsq`, with R of a Cholesky factorization. What
differs is that the inverse of the Gram matrix is formed: products with it take less time than solves, and its
norm bounds what the rounding errors of the Gram matrix do to the rate of convergence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from neula.algorithms.lapack.batches import doubled, gram, least, lengths, most, transposed_times
from neula.algorithms.lapack.doubled import error_of, two_sum
from neula.algorithms.lapack.seminormal import ALIKE
from neula.certificates.forward_error import (
    MAX_RATE,
    enlarged,
    least_squares_error,
    left_by_update,
    measured_error,
)
from neula.certificates.residuals import projection_noise, quotient, residual_noise
from neula.certificates.stagnation import contracts, settled
from neula.engines import FP64
from neula.kernels.magnitudes import MODERATE


@dataclass(frozen=True)
class SeminormalBatchSolution:
    """Solutions of a batch, with arrays of shape (batch, k) for each right-hand side.

    Attributes
    ----------
    x : array, shape (batch, n, k)
        As they are given back.
    left : array
        Bound on ``||D (x - x*)|| / ||D x||`` for the sum that was refined, D being the norms of A's columns.
    settled : array of bool
        Whether another update would gain nothing: what is left are rounding errors of the residual.
    contracts : array of bool
        Whether the update has reduced the projected residual as it has to.
    forward_error : array
        Bound on ``||D (x - x*)|| / ||D x*||``, before x was rounded to another dtype.
    low, rounding : array
        What x lacks of the sum, and what rounding it to another dtype has lost, relative to it.
    backward_error, optimality : array
        Of x before it was rounded.
    residual_norm, b_norm : array
        The first of x as it is given back.
    """

    x: np.ndarray
    left: np.ndarray
    settled: np.ndarray
    contracts: np.ndarray
    forward_error: np.ndarray
    low: np.ndarray
    rounding: np.ndarray | float
    backward_error: np.ndarray
    optimality: np.ndarray
    residual_norm: np.ndarray
    b_norm: np.ndarray


class Seminormals:
    """``min ||A x - b||`` for tall matrices.

    Parameters
    ----------
    a : array, shape (batch, m, n), m >= n
        float64.
    slices : int
        Of A in products beyond the working precision (:class:`~neula.algorithms.lapack.batches.SlicedBatch`);
        0 for residuals in working precision.

    Attributes
    ----------
    good : array of bool, shape (batch, 1)
        Where numbers are moderate and the inverse is good enough: nothing is said of others.
    condition, condition_bound : array, shape (batch, 1)
        Condition number of ``B = A D^-1``, estimated and from above.
    """

    def __init__(self, a: np.ndarray, slices: int) -> None:
        self._a, (m, n) = a, a.shape[1:]
        square_of_b = gram(a)
        sizes = np.sqrt(square_of_b.diagonal(axis1=1, axis2=2))
        self._columns = np.ascontiguousarray(sizes)[..., None]
        largest_column, smallest = most(self._columns), least(self._columns)
        good = (smallest >= 1 / MODERATE) & (largest_column <= MODERATE)
        self._scales = np.where(good[..., None], 1 / self._columns, 1.0)
        square_of_b *= self._scales
        square_of_b *= self._scales.transpose(0, 2, 1)
        self._inverse, definite = _inverse(square_of_b)
        # Schatten 4-norms of B and of its pseudoinverse, whose squares are the norms of these.
        square, inverse_square = _norm(square_of_b), _norm(self._inverse)
        self._norm, self._norm_bound = square / n**0.5, np.sqrt(square)
        self._inverse_norm = np.sqrt(inverse_square)
        self.condition = np.maximum(self._norm * self._inverse_norm, 1.0)
        self.condition_bound = self._norm_bound * self._inverse_norm
        # Rounding errors of the Gram matrix and of its factorization, in units of columns of norm 1.
        self._rate = 2 * (m + n) * n * FP64.u * inverse_square
        self.good = good & definite[:, None] & (self._rate <= MAX_RATE)
        self._slices, self._units = slices, None
        alike = largest_column <= ALIKE * smallest
        if slices and not alike.all():  # columns of a matrix are sliced at the same places
            exponents = np.frexp(np.where((alike | ~good)[..., None], 0.5, self._columns))[1]
            self._units, largest_column = np.ldexp(1.0, -exponents), np.where(alike, largest_column, 1.0)
            self._a = a * self._units.transpose(0, 2, 1)
            self._columns, self._scales = self._columns * self._units, self._scales / self._units
        self._largest = largest_column[:, 0]

    def refined(self, b: np.ndarray, dtype: type[Any]) -> SeminormalBatchSolution:
        """Solve, update and measure.

        Parameters
        ----------
        b : array, shape (batch, m, k)
            float64.
        dtype : type
            Of x as it is given back.
        """
        x, b_norm = self._solved(transposed_times(self._a, b))[0], lengths(b)
        residual, update, before, left, floor = self._evaluated(x, b, b_norm)
        x, low = two_sum(x, update)
        given = x if dtype is np.float64 else self._rounded(x, dtype)
        steps = [update - low] if given is x else [update - low, x - given]
        images = np.matmul(self._a, np.concatenate(steps, 2))
        residual = residual - images[..., : b.shape[2]]
        gradient = transposed_times(self._a, residual)
        size, residual_norm = lengths(self._columns * x), lengths(residual)
        image = self._norm * size
        after = self._solved(gradient)[1]
        noise = self._floor(size, b_norm, residual_norm, doubled=False)
        projected = enlarged(after, self._rate)
        optimality = quotient(lengths(gradient * self._scales), self._norm * residual_norm)
        consistent = residual_norm / (image + b_norm)
        backward_error = np.minimum(np.minimum(optimality, consistent), projected / image)
        lost = lengths(self._columns * low)
        forward_error = measured_error(left + lost, size)
        if not self._slices:
            by_formula = least_squares_error(self.condition_bound, backward_error, residual_norm / image)
            forward_error = np.fmin(forward_error, by_formula)
        rounding: np.ndarray | float = 0.0
        if given is not x:
            rounding = lengths(self._columns * steps[1]) / size
            residual_norm = lengths(residual + images[..., b.shape[2] :])
        return SeminormalBatchSolution(
            x=given if self._units is None else given * self._units,
            left=left / size,
            settled=settled(left, floor),
            contracts=contracts(after, before, noise),
            forward_error=forward_error,
            low=lost / size,
            rounding=rounding,
            backward_error=backward_error,
            optimality=optimality,
            residual_norm=residual_norm,
            b_norm=b_norm,
        )

    def _rounded(self, x: np.ndarray, dtype: type[Any]) -> np.ndarray:
        if self._units is None:
            return x.astype(dtype).astype(np.float64)
        return (x * self._units).astype(dtype) / self._units

    def _solved(self, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``(A^T A)^-1 g`` and ``||R^-T g||``."""
        scaled = self._scales * gradient
        found = np.matmul(self._inverse, scaled)
        size = np.sqrt(np.maximum(np.einsum("pik,pik->pk", scaled, found), 0.0))
        found *= self._scales
        return found, size

    def _evaluated(
        self, x: np.ndarray, b: np.ndarray, b_norm: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Residual, update, ``||R^-T A^T r||``, bound on ``||D (x - x*)||`` then, and its rounding errors."""
        if not self._slices:
            residual = b - np.matmul(self._a, x)
            gradient = transposed_times(self._a, residual)
        else:
            residual, gradient = doubled(self._a, self._largest, x, b, self._slices, gradients=True)
        update, projected = self._solved(gradient)
        of_residual = lengths(residual)
        floor = self._floor(lengths(self._columns * x), b_norm, of_residual, doubled=self._slices > 0)
        if self._slices:
            through = self._inverse_norm / least(self._columns)
            of_slices = error_of(self._a.shape[1:], self._slices) * self._largest[:, None]
            floor += of_slices * (lengths(x) + through * of_residual)
        left = left_by_update(self._rate) * projected + floor
        return residual, update, projected, self._inverse_norm * left, self._inverse_norm * floor

    def _floor(self, *sizes: np.ndarray, doubled: bool) -> np.ndarray:
        noise = residual_noise(sum(self._a.shape[1:]), doubled=doubled)
        return projection_noise(noise, self._norm_bound, self.condition_bound, *sizes)


def _norm(a: np.ndarray) -> np.ndarray:
    """Frobenius norms, shape (batch, 1)."""
    return lengths(a.reshape(len(a), -1, 1))


def _inverse(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inverses of positive definite matrices, and where they are."""
    lower, info = torch.linalg.cholesky_ex(torch.from_numpy(a))
    identity = torch.eye(a.shape[1], dtype=lower.dtype, device="cpu").expand_as(lower)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False).numpy()
    return gram(inverse), (info == 0).numpy()
