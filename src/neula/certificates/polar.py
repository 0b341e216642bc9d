"""The certificate of a polar decomposition: is U orthonormal, and is it the factor of this matrix.

That ``I - U^T U`` is small says nothing of A, and its Frobenius norm, divided by the root of the order,
misses one bad singular value among thousands. So its extreme eigenvalues are found by a few Lanczos steps,
and ``A - U H`` is measured along random vectors for ``H = (U^T A + A^T U) / 2``. Both are blind for a sign: U
with ``-u v^T`` in place of ``u v^T`` has an H that is symmetric, and not positive. A polynomial has the wrong
sign for a singular value that is larger than it was made for, which is among the largest. So ``y^T H y`` has
to be positive for random vectors after a step of the power method.

Where U is a partial isometry, that is ``U U^T U = U``, singular values of 0 are right as well: then Lanczos
steps find the norm of the difference. At the accuracy of bf16 singular values of A below 1e-3 times the
largest may end anywhere. A few steps do not tell their vectors from others, and errors of ``2^-8`` in A would
change them. There, what U lacks counts as much as A has of it: ``A - A U^T U``, by the basis of the same
steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from neula.certificates.bounds import measurement_error, orthogonality_bound, residual_bound
from neula.certificates.probes import gaussian_probes
from neula.engines import BF16, Engine, Format
from neula.engines.random_vectors import gaussian

STEPS = 12
"""Lanczos steps: an eigenvalue ten times as large as all others is found in four."""

LEADING = 6
"""Numbers before those of the Lanczos steps."""

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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
        """
        noise = measurement_error(max(m, n), target.storage)
        orthogonality = 2 * target.u if target is BF16 else orthogonality_bound(target, min(m, n))
        return cls(2 * residual_bound(target, min(m, n)) + noise, orthogonality + noise)


def polar_measures(
    w: torch.Tensor, x: torch.Tensor, multiply: Multiply, engine: Engine, *, within: bool
) -> torch.Tensor:
    """What :class:`PolarNumbers` needs to know of wide matrices and their factors, without synchronizing.

    Parameters
    ----------
    w : Tensor, shape (batch, k, m), k <= m
        The matrices.
    x : Tensor, shape (parts, batch, k, m)
        Their factors, as the engine has them.
    multiply : callable
        Multiplies a batch of matrices and a batch of vectors, more accurately than what is certified.
    engine : Engine
        Multiplies X by itself.
    within : bool
        Whether X is to be a partial isometry: orthonormal on its range.

    Returns
    -------
    Tensor, shape (numbers, batch)
        float64.
    """
    count, k, _ = w.shape
    factor = engine.joined(x).to(w.dtype) if len(x) > 1 else x[0]
    g = gaussian_probes(k, w.device).to(engine.storage).expand(count, -1, -1)
    norm = torch.linalg.matrix_norm
    wg, xg = multiply(w.mT, g), multiply(factor.mT, g)
    wwg = multiply(w, wg)
    hg = (multiply(w, xg) + multiply(factor, wg)) / 2
    residual = norm(wg - multiply(factor.mT, hg))
    y = wwg / torch.linalg.vector_norm(wwg, dim=(1, 2), keepdim=True).clamp_min(1e-30)
    image = multiply(w.mT, y)
    lengths = torch.linalg.vector_norm(y, dim=1).clamp_min(1e-30)
    top = (torch.linalg.vector_norm(image, dim=1) / lengths).amax(1)
    sign = (image * multiply(factor.mT, y)).sum(1).amin(1)

    defect = engine.product(x, x.mT, factor=-1.0, shift=1.0, symmetric=True)
    start = gaussian(k, 1, torch.float32, w.device, seed=k + 1).to(engine.storage).expand(count, -1, -1)

    def squared_defect(v: torch.Tensor) -> torch.Tensor:
        """``B B^T v`` of ``B = X - X X^T X``."""
        image = multiply(factor.mT, v)
        image = image - multiply(factor.mT, multiply(factor, image))
        back = multiply(factor, image)
        return back - multiply(factor, multiply(factor.mT, back))

    operator = squared_defect if within else (lambda v: engine.thin(defect, v))
    diagonal, beside, basis = lanczos(operator, start, min(k, STEPS))
    images = multiply(w.mT, basis)
    lost = torch.linalg.vector_norm(defect[0], dim=(1, 2), dtype=engine.storage).square()
    numbers = [residual, norm(wg), sign, top, k - lost, torch.full_like(lost, within)]
    squares = (images.mT @ images).flatten(1)
    return torch.cat([torch.stack(numbers, 1), diagonal, beside, squares], 1).double().T


def lanczos(
    multiply: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor, steps: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A few Lanczos steps for a batch of symmetric matrices, with full orthogonalization.

    Parameters
    ----------
    multiply : callable
        The matrices times vectors, shape (batch, k, 1).
    start : Tensor, shape (batch, k, 1)
    steps : int
        At most k.

    Returns
    -------
    diagonal, beside : Tensor, shape (batch, steps)
        Of the tridiagonal matrices; the last number of the second is not used.
    basis : Tensor, shape (batch, k, steps)
        Zero from where an invariant subspace was found.
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
            image = image - known @ (known.mT @ image)
        beside.append(torch.linalg.vector_norm(image, dim=(1, 2)))
        # What is left of rounding errors is no new direction.
        v = torch.where(torch.linalg.vector_norm(image, dim=1, keepdim=True) > 1e-3 * size, image, 0.0)
        beside[-1] = torch.where(v.any(1)[:, 0], beside[-1], 0.0)
    return torch.stack(diagonal, 1), torch.stack(beside, 1), torch.cat(basis, 2)


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
    positive : array of bool, shape (batch,)
        Whether H is, along the vectors that were tried.
    count : array of float, shape (batch,)
        About how many singular values of U are near 1: their number without ``||I - U^T U||_F^2``.
    """

    residual: np.ndarray
    orthogonality: np.ndarray
    positive: np.ndarray
    count: np.ndarray

    @classmethod
    def of(cls, numbers: np.ndarray, *, weighted: bool) -> PolarNumbers:
        """Evaluate what was measured, shape (numbers, batch).

        ``weighted`` says that what U lacks counts as much as A has of it.
        """
        residual, size, sign, top, count, within = numbers[:LEADING]
        with np.errstate(invalid="ignore", over="ignore"):
            residual = residual / np.where(size == 0, 1.0, size)
        orthogonality = np.full_like(residual, np.nan)
        usable = np.isfinite(numbers).all(0)
        steps = _Steps.of(numbers[LEADING:, usable])
        off = steps.distances(top[usable] if weighted else None)
        orthogonality[usable] = np.where(within[usable] == 1, steps.root_of_largest() / 2, off)
        return cls(residual, orthogonality, usable & (sign >= 0), count)


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

    @classmethod
    def of(cls, numbers: np.ndarray) -> _Steps:
        """From the numbers of each matrix: diagonal, what is beside it, squares."""
        steps = round((len(numbers) + 1) ** 0.5) - 1
        diagonal, beside, squares = np.split(numbers.T, [steps, 2 * steps], axis=1)
        matrices = np.zeros((len(diagonal), steps, steps))
        i = np.arange(steps)
        matrices[:, i, i] = diagonal
        matrices[:, i[1:], i[:-1]] = matrices[:, i[:-1], i[1:]] = beside[:, : steps - 1]
        return cls(matrices, squares.reshape(matrices.shape))

    def root_of_largest(self) -> np.ndarray:
        """Root of the largest Ritz value."""
        values = np.linalg.eigvalsh(self.tridiagonal)
        return np.sqrt(np.clip(values, 0.0, None).max(1, initial=0.0))

    def distances(self, top: np.ndarray | None) -> np.ndarray:
        """How far singular values are from 1, by Ritz values of ``I - U^T U``; see :class:`PolarNumbers`.

        ``top`` is the norm of A where what U lacks is weighted.
        """
        values = np.linalg.eigvalsh(self.tridiagonal)
        off = 1.0 - np.sqrt(np.clip(1.0 - values, 0.0, None))
        above, below = np.clip(-off, 0, None).max(1, initial=0.0), np.clip(off, 0, None).max(1, initial=0.0)
        if top is not None:
            # The last step has left the basis.
            image = self.tridiagonal[:, :, : max(1, self.tridiagonal.shape[2] - 1)]
            lacking = np.linalg.eigvalsh(image.swapaxes(1, 2) @ self.squares @ image).max(1, initial=0.0)
            below = np.minimum(below, np.sqrt(np.clip(lacking, 0.0, None)) / np.where(top > 0, top, 1.0) / 2)
        return np.maximum(above, below)
