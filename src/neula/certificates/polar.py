"""The certificate of a polar decomposition: is U orthonormal, and is it the factor of this matrix.

That ``I - U^T U`` is small says nothing of A, and its Frobenius norm, divided by the root of the order,
misses one bad singular value among thousands. So its extreme eigenvalues are found by a few Lanczos steps,
and ``A - U H`` is measured along random vectors for ``H = (U^T A + A^T U) / 2``. Both are blind for a sign: U
with ``-u v^T`` in place of ``u v^T`` has an H that is symmetric, and not positive. A polynomial has the wrong
sign for a singular value that is larger than it was made for, which is among the largest. So a few Lanczos
steps look for a negative eigenvalue of H, too.

Where U is a partial isometry, that is ``U U^T U = U``, singular values of 0 are right as well: then Lanczos
steps find the norm of the difference. At the accuracy of bf16 singular values of A below 1e-3 times the
largest may end anywhere. A few steps do not tell their vectors from others, and errors of ``2^-8`` in A would
change them. There, what U lacks counts as much as A has of it: ``A - A U^T U``, by the basis of the same
steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from neula.certificates.bounds import measurement_error, orthogonality_bound, residual_bound
from neula.certificates.probes import PROBES
from neula.engines import BF16, FP16, Engine, Format
from neula.engines.random_vectors import gaussian
from neula.kernels.precision import exact_matmul

STEPS = 10
"""Lanczos steps: an eigenvalue ten times as large as all others is found in four."""

STEPS_OF_H = 6
"""The same of H: a single negative eigenvalue beside hundreds of positive ones is found in four, or in six
where it is a third of the largest."""

SLIGHTLY = 0.05
"""Eigenvalues of H that are negative by so much of the largest count: those of a wrong sign are far from
zero."""

LEADING = 4
"""Numbers before those of the Lanczos steps."""


@dataclass(frozen=True)
class PolarBounds:
    """What is asked of a polar decomposition.

    Attributes
    ----------
    residual : float
        Of ``||A - U H|| / ||A||``.
    orthogonality : float
        Of the distance of a singular value of U from 1.
    """

    residual: float
    orthogonality: float

    @classmethod
    def of(cls, target: Format, m: int, n: int) -> PolarBounds:
        """Those of an accuracy, for matrices of this shape.

        For bf16 singular values are to be within ``2^-7``, twice the unit roundoff, whatever the shape;
        otherwise orthogonality is to be that of a QR. The residual may be twice that of a QR: polynomials
        that take large singular values down to a half double what errors of the steps before them count.
        For bf16 that is a QR in fp16, in which they are evaluated, and a singular value of U that is off by
        d adds 2 d.
        """
        k, noise = min(m, n), measurement_error(max(m, n), target.storage)
        if target is BF16:
            off = 2 * target.u
            return cls(2 * residual_bound(FP16, k) + 2 * off + noise, off + noise)
        return cls(2 * residual_bound(target, k) + noise, orthogonality_bound(target, k) + noise)


def polar_measures(
    w: torch.Tensor, x: torch.Tensor, engine: Engine, *, exactly: bool, within: bool
) -> torch.Tensor:
    """What :class:`PolarNumbers` needs to know of wide matrices and their factors, without synchronizing.

    Parameters
    ----------
    w : Tensor, shape (parts, batch, k, m), k <= m
        The matrices, as the engine has them.
    x : Tensor, shape (parts, batch, k, m)
        Their factors.
    engine : Engine
    exactly : bool
        Whether vectors are multiplied in the engine's storage precision, and not in its format.
    within : bool
        Whether X is to be a partial isometry: orthonormal on its range.

    Returns
    -------
    Tensor, shape (numbers, batch)
        float64.
    """
    _, count, k, _ = w.shape
    multiply = exact_matmul if exactly else (lambda a, v: engine.thin(a[None], v))
    matrix, factor = (engine.joined(y) if exactly else y[0] for y in (w, x))

    def random(columns: int) -> torch.Tensor:
        found = gaussian(k, columns, torch.float32, w.device, seed=k + columns)
        return found.to(engine.storage).expand(count, -1, -1)

    g = random(PROBES)
    norm = torch.linalg.matrix_norm
    wg, xg = multiply(matrix.mT, g), multiply(factor.mT, g)
    hg = (multiply(matrix, xg) + multiply(factor, wg)) / 2
    residual = norm(wg - multiply(factor.mT, hg))

    h = engine.product(w, x.mT, symmetric=True)
    signs = lanczos(lambda v: engine.thin(h, v), random(1), min(k, STEPS_OF_H))
    defect = engine.product(x, x.mT, factor=-1.0, shift=1.0, symmetric=True)
    lost = torch.linalg.vector_norm(defect[0], dim=(1, 2), dtype=engine.storage).square()

    def squared_defect(v: torch.Tensor) -> torch.Tensor:
        """``B B^T v`` of ``B = X - X X^T X``."""
        image = multiply(factor.mT, v)
        image = image - multiply(factor.mT, multiply(factor, image))
        back = multiply(factor, image)
        return back - multiply(factor, multiply(factor.mT, back))

    operator = squared_defect if within else (lambda v: engine.thin(defect, v))
    steps = lanczos(operator, random(1), min(k, STEPS))
    images = multiply(matrix.mT, steps.basis)
    numbers = torch.stack([residual, norm(wg), k - lost, torch.full_like(lost, within)], 1)
    squares = exact_matmul(images.mT, images).flatten(1)
    return torch.cat([numbers, *signs.numbers, *steps.numbers, squares], 1).double().T


class Lanczos(NamedTuple):
    """What a few Lanczos steps have made of a batch of symmetric matrices.

    Attributes
    ----------
    numbers : tuple of Tensor, shape (batch, steps) each
        Diagonal of the tridiagonal matrices, and what is beside it; the last one of these leads out of the
        basis.
    basis : Tensor, shape (batch, k, steps)
        Zero from where an invariant subspace was found.
    """

    numbers: tuple[torch.Tensor, torch.Tensor]
    basis: torch.Tensor


def lanczos(multiply: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor, steps: int) -> Lanczos:
    """A few Lanczos steps for a batch of symmetric matrices, with full orthogonalization.

    Parameters
    ----------
    multiply : callable
        The matrices times vectors, shape (batch, k, 1).
    start : Tensor, shape (batch, k, 1)
    steps : int
        At most k.
    """
    basis: list[torch.Tensor] = []
    diagonal, beside, v = [], [], start
    for _ in range(steps):
        length = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        v = torch.where(length > 0, v / length, 0.0)
        basis.append(v)
        known = torch.cat(basis, 2)
        image = multiply(v)
        diagonal.append((v * image).sum((1, 2)))
        size = torch.linalg.vector_norm(image, dim=1, keepdim=True)
        for _ in range(2):
            image = image - exact_matmul(known, exact_matmul(known.mT, image))
        beside.append(torch.linalg.vector_norm(image, dim=(1, 2)))
        # What is left of rounding errors is no new direction.
        v = torch.where(torch.linalg.vector_norm(image, dim=1, keepdim=True) > 1e-3 * size, image, 0.0)
        beside[-1] = torch.where(v.any(1)[:, 0], beside[-1], 0.0)
    return Lanczos((torch.stack(diagonal, 1), torch.stack(beside, 1)), torch.cat(basis, 2))


@dataclass(frozen=True)
class PolarNumbers:
    """The measured numbers of a batch, on the host.

    Attributes
    ----------
    residual : array of float, shape (batch,)
        Estimate of ``||A - U H||_F / ||A||_F``.
    orthogonality : array of float, shape (batch,)
        Estimate of the largest distance of a singular value of U from 1; of a partial isometry half of
        ``||U U^T U - U||``; at the accuracy of bf16, of those that are too small, no more than half of
        ``||A - A U^T U|| / ||A||``.
    distance : array of float, shape (batch,)
        The same without that exception.
    positive : array of bool, shape (batch,)
        Whether H is, as far as its Lanczos steps see.
    count : array of float, shape (batch,)
        About how many singular values of U are near 1: their number without ``||I - U^T U||_F^2``.
    """

    residual: np.ndarray
    orthogonality: np.ndarray
    distance: np.ndarray
    positive: np.ndarray
    count: np.ndarray

    @classmethod
    def of(cls, numbers: np.ndarray, *, weighted: bool) -> PolarNumbers:
        """Evaluate what was measured, shape (numbers, batch).

        ``weighted`` says that what U lacks counts as much as A has of it.
        """
        residual, size, count, within = numbers[:LEADING]
        with np.errstate(invalid="ignore", over="ignore"):
            residual = residual / np.where(size == 0, 1.0, size)
        orthogonality, distance = np.full_like(residual, np.nan), np.full_like(residual, np.nan)
        usable = np.isfinite(numbers).all(0)
        steps, signs = _steps_of(numbers[LEADING:, usable])
        spectrum = np.linalg.eigvalsh(signs)
        low, high = spectrum.min(1, initial=0.0), spectrum.max(1, initial=0.0)
        positive = usable.copy()
        positive[usable] = low >= -SLIGHTLY * high
        above, below = steps.distances()
        of_isometry = steps.root_of_largest() / 2
        distance[usable] = np.where(within[usable] == 1, of_isometry, np.maximum(above, below))
        if weighted:
            below = np.minimum(below, steps.lacking() / np.where(high > 0, high, 1.0) / 2)
        orthogonality[usable] = np.where(within[usable] == 1, of_isometry, np.maximum(above, below))
        return cls(residual, orthogonality, distance, positive, count)


def _tridiagonal(diagonal: np.ndarray, beside: np.ndarray) -> np.ndarray:
    steps = diagonal.shape[1]
    matrices = np.zeros((len(diagonal), steps, steps))
    i = np.arange(steps)
    matrices[:, i, i] = diagonal
    matrices[:, i[1:], i[:-1]] = matrices[:, i[:-1], i[1:]] = beside[:, : steps - 1]
    return matrices


def _steps_of(numbers: np.ndarray) -> tuple[_Steps, np.ndarray]:
    """Steps with ``I - U^T U``, and the tridiagonal matrices of those with H."""
    # Of matrices of an order below both numbers of steps there are as many of both.
    count = next(n for n in range(1, STEPS + 1) if 2 * min(n, STEPS_OF_H) + 2 * n + n * n == len(numbers))
    few = min(count, STEPS_OF_H)
    parts = np.split(numbers.T, np.cumsum([few, few, count, count]), axis=1)
    squares = parts[4].reshape(-1, count, count)
    return _Steps(_tridiagonal(parts[2], parts[3]), squares), _tridiagonal(parts[0], parts[1])


@dataclass(frozen=True)
class _Steps:
    """What Lanczos steps have come to.

    Attributes
    ----------
    tridiagonal : array of float, shape (batch, steps, steps)
    squares : array of float, shape (batch, steps, steps)
        ``V^T A A^T V`` for the basis V.
    """

    tridiagonal: np.ndarray
    squares: np.ndarray

    def root_of_largest(self) -> np.ndarray:
        """Root of the largest Ritz value."""
        values = np.linalg.eigvalsh(self.tridiagonal)
        return np.sqrt(np.clip(values, 0.0, None).max(1, initial=0.0))

    def distances(self) -> tuple[np.ndarray, np.ndarray]:
        """How far singular values are above 1, and below, by Ritz values of ``I - U^T U``."""
        values = np.linalg.eigvalsh(self.tridiagonal)
        off = 1.0 - np.sqrt(np.clip(1.0 - values, 0.0, None))
        return np.clip(-off, 0, None).max(1, initial=0.0), np.clip(off, 0, None).max(1, initial=0.0)

    def lacking(self) -> np.ndarray:
        """``||A - A U^T U||``, as far as the basis sees."""
        # The last step has left the basis.
        image = self.tridiagonal[:, :, : max(1, self.tridiagonal.shape[2] - 1)]
        squares = np.linalg.eigvalsh(image.swapaxes(1, 2) @ self.squares @ image)
        return np.sqrt(np.clip(squares, 0.0, None).max(1, initial=0.0))
