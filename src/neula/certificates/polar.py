"""The certificate of a polar decomposition: is U orthonormal, and is it the factor of this matrix.

That ``I - U^H U`` is small says nothing of A, and its Frobenius norm, divided by the root of the order,
misses one bad singular value among thousands. So its extreme eigenvalues are found by a few Lanczos steps,
and ``A - U H`` is measured along random vectors for ``H = (U^H A + A^H U) / 2``. Neither sees a sign: U with
``-u v^H`` in place of ``u v^H`` has an H that is symmetric, and not positive. A polynomial has the wrong sign
for a singular value that is larger than it was made for, which is among the largest. So a few Lanczos steps
look for a negative eigenvalue of H, too.

Where U is a partial isometry, that is ``U U^H U = U``, singular values of 0 are right as well: then Lanczos
steps find the norm of the difference. Zero is right for zero. At the accuracy of bf16 singular values of A
below 1e-3 times the largest may end anywhere. A few steps do not tell their vectors from others, and errors
of ``2^-8`` in A would change them. There, what U lacks counts as much as A has of it: ``A - A U^H U``, by the
basis of the same steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from neula.certificates.bounds import measurement_error, orthogonality_bound, residual_bound
from neula.certificates.forward_error import where
from neula.certificates.orthogonality import PROBES
from neula.certificates.verdict import within
from neula.engines import BF16, FP16, Engine, Format
from neula.engines.formats import in_double
from neula.engines.random_vectors import gaussian
from neula.kernels.magnitudes import two_norms
from neula.kernels.polar.lanczos import advance, extreme_values
from neula.kernels.polar.svd import converged_eigvalsh
from neula.kernels.precision import ONE_THREAD, exact_matmul

STEPS = 10  # Lanczos steps: an eigenvalue ten times as large as all others is found in four

STEPS_OF_H = 6
"""Lanczos steps for H: a single negative eigenvalue among hundreds of positive ones is found in four, or in
six where it is a third of the largest."""

SLIGHTLY = 0.05  # negative eigenvalues of H that count, by the largest: those of a wrong sign are far from 0
LEAST = 16  # order of matrices whose eigenvalues take hardly longer than the call
SQUARINGS = 5  # squarings of a matrix of order at most 9, for the root of a norm of its 32nd power


@dataclass(frozen=True)
class PolarBounds:
    residual: float  # of ||A - U H|| / ||A||
    orthogonality: float  # of the distance of a singular value of U from 1

    @classmethod
    def for_shape(cls, target: Format, m: int, n: int) -> PolarBounds:
        """Bounds for an accuracy and a shape.

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
    w: torch.Tensor,
    x: torch.Tensor,
    engine: Engine,
    *,
    exactly: bool,
    within: bool,
    weighted: bool = False,
    whole: bool = False,
) -> torch.Tensor:
    """:class:`PolarNumbers` of wide matrices and their factors, shape (numbers, batch), float64, without
    synchronizing on a GPU; not accepted where it is NaN.

    ``w``, ``x``, shape (parts, batch, k, m), k <= m: the matrices and their factors, as the engine has them.
    ``exactly``: whether vectors are multiplied in the engine's storage precision, and not in its format.
    ``within``: whether X is to be a partial isometry. ``weighted``: whether what U lacks counts as much as A
    has of it. ``whole``: whether U is to be orthonormal even where A is zero.
    """
    count, k = engine.members(w), w.shape[2]
    over_rows = engine.over_rows
    matrix, factor = map(engine.joined, (w, x)) if exactly else (w, x)

    def multiply(a: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return exact_matmul(a, v) if exactly else engine.thin(a, v)

    def multiply_adjoint(a: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return exact_matmul(a.mH, v) if exactly else engine.thin(a, v, adjoint=True)

    def norm(v: torch.Tensor) -> torch.Tensor:
        return over_rows.total(two_norms(v, 1, 2).square()).sqrt()

    def across(a: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return over_rows.total(multiply(a, v))

    def random(columns: int) -> torch.Tensor:
        single = torch.complex64 if engine.is_complex else torch.float32
        found = gaussian(k, columns, single, w.device, seed=k + columns)
        return found.to(engine.storage).expand(count, -1, -1)

    g = random(PROBES)
    wg, xg = multiply_adjoint(matrix, g), multiply_adjoint(factor, g)
    hg = over_rows.total((multiply(matrix, xg) + multiply(factor, wg)) / 2)
    residual = norm(wg - multiply_adjoint(factor, hg))

    h, defect = engine.across(w, x), engine.across(x, x, factor=-1.0, shift=1.0)
    lost = engine.norms(defect).square()
    if engine.tuning.lapack and not weighted and count * max(k, LEAST) ** 3 <= ONE_THREAD:
        off = engine.joined(defect)
        if within:  # what is zero in X is zero in B, too
            b = exact_matmul(off, factor.to(off.dtype))
            off = over_rows.total(exact_matmul(b, b.mH))
        (lowest, highest), (smallest, largest) = map(_extremes, (engine.joined(h), off))
    else:

        def squared_defect(v: torch.Tensor) -> torch.Tensor:
            """``B B^H v`` of ``B = X - X X^H X``."""
            image = multiply_adjoint(factor, v)
            image = image - multiply_adjoint(factor, across(factor, image))
            back = across(factor, image)
            return back - across(factor, multiply_adjoint(factor, back))

        signs = lanczos(lambda v: engine.thin(h, v), random(1), min(k, STEPS_OF_H))
        operator = squared_defect if within else (lambda v: engine.thin(defect, v))
        steps = lanczos(operator, random(1), min(k, STEPS))
        (lowest, highest), (smallest, largest) = (extreme_values(*x.numbers) for x in (signs, steps))
    distance = orthogonality = largest.clamp_min(0.0).sqrt() / 2
    if not within:
        above = (1 - smallest).clamp_min(0.0).sqrt() - 1
        below = 1 - (1 - largest).clamp_min(0.0).sqrt()
        distance = orthogonality = torch.maximum(above, below).clamp_min(0.0)
    if weighted:
        images = multiply_adjoint(matrix, steps.basis)
        squares = in_double(over_rows.total(exact_matmul(images.mH, images)))
        part = _lacking(steps, squares) / torch.where(highest > 0, highest, 1.0)
        orthogonality = torch.maximum(above, torch.minimum(below, part / 2)).clamp_min(0.0)
    size = norm(wg)
    if not whole:
        orthogonality = torch.where((size == 0) & (norm(xg) == 0), 0.0, orthogonality)
    residual = residual / torch.where(size == 0, 1.0, size)
    found = PolarNumbers(residual, orthogonality, distance, lowest >= -SLIGHTLY * highest, k - lost)
    return over_rows.agree(torch.stack([x.double() for x in found]))


def measures_alone(w: np.ndarray, x: np.ndarray, *, within: bool) -> list[float]:
    """:func:`polar_measures` of one small wide matrix of full rank, by NumPy, in a fifth of the time."""
    single, k = torch.complex64 if w.dtype.kind == "c" else torch.float32, len(w)
    g = gaussian(k, PROBES, single, torch.device("cpu"), seed=k + PROBES).numpy()
    adjoint_x, adjoint_w = x.conj().T, w.conj().T
    wg, xg = adjoint_w @ g, adjoint_x @ g
    residual = np.linalg.norm(wg - adjoint_x @ ((w @ xg + x @ wg) / 2)) / np.linalg.norm(wg)
    h, off = w @ adjoint_x, np.eye(k) - x @ adjoint_x
    lost = np.vdot(off, off).real
    if within:
        off = off @ x
        off = off @ off.conj().T
    (low, high), (smallest, largest) = np.linalg.eigvalsh(np.stack([(h + h.conj().T) / 2, off]))[:, [0, -1]]
    distance = max(largest, 0.0) ** 0.5 / 2
    if not within:
        distance = max(max(1 - smallest, 0.0) ** 0.5 - 1, 1 - max(1 - largest, 0.0) ** 0.5, 0.0)
    return [float(x) for x in (residual, distance, distance, low >= -SLIGHTLY * high, k - lost)]


def _extremes(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest eigenvalues of a batch of matrices, symmetric up to roundings."""
    # LAPACK fails near the ends of the range. Residuals say where NaN and Inf are.
    a = a.nan_to_num(0.0, 0.0, 0.0)
    size = a.abs().amax((1, 2), keepdim=True).clamp(min=torch.finfo(a.dtype).tiny)
    found = converged_eigvalsh((a / size + (a / size).mH) / 2) * size.squeeze(-1)
    return found.amin(1), found.amax(1)


def _lacking(steps: LanczosDecomposition, squares: torch.Tensor) -> torch.Tensor:
    """``||A - A U^H U||``, as far as the basis sees, from ``V^H A A^H V`` for the basis V."""
    diagonal, off_diagonal = (x.double() for x in steps.numbers)
    count = diagonal.shape[1]
    lower = torch.diag_embed(off_diagonal[:, :-1], -1)
    # The last step has left the basis.
    image = (torch.diag_embed(diagonal) + lower + lower.mT)[:, :, : max(1, count - 1)].to(squares.dtype)
    return _largest(exact_matmul(image.mH, exact_matmul(squares, image))).sqrt()


def _largest(x: torch.Tensor) -> torch.Tensor:
    """Largest eigenvalue of small positive semidefinite matrices, up to 4 % too large."""
    logarithm = torch.zeros(len(x), dtype=x.dtype.to_real(), device=x.device)
    for i in range(SQUARINGS + 1):
        x = exact_matmul(x, x) if i else x
        length = two_norms(x, 1, 2)
        logarithm = logarithm + length.log() / 2**i
        x = x / torch.where(length == 0, 1.0, length)[:, None, None]
    return logarithm.exp()


class LanczosDecomposition(NamedTuple):
    """Tridiagonal matrices and bases of some Lanczos steps for a batch of symmetric matrices."""

    # Shape (batch, steps) each: diagonal and off-diagonal of the tridiagonal matrices; the last one of
    # these leads out of the basis.
    numbers: tuple[torch.Tensor, torch.Tensor]
    basis: torch.Tensor  # shape (batch, k, steps): zero from where an invariant subspace was found


def lanczos(
    multiply: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor, steps: int
) -> LanczosDecomposition:
    """A few Lanczos steps for a batch of symmetric matrices, with full orthogonalization."""
    count, k, _ = start.shape
    basis = start.new_empty(count, steps, k)
    basis[:, 0] = (start / two_norms(start, 1, keepdim=True))[..., 0]
    numbers = []
    for step in range(steps):
        image = multiply(basis[:, step, :, None])
        numbers.append(advance(image[..., 0].contiguous(), basis, step))
    diagonal, off_diagonal = (torch.stack(x, 1) for x in zip(*numbers, strict=True))
    return LanczosDecomposition((diagonal, off_diagonal), basis.mT)


class PolarNumbers(NamedTuple):
    """The measured numbers of a batch, on its device or on the host."""

    residual: Any  # shape (batch,): estimate of ||A - U H||_F / ||A||_F
    # Shape (batch,): estimate of the largest distance of a singular value of U from 1; of a partial isometry
    # half of ||U U^H U - U||; at the accuracy of bf16, of those that are too small, no more than half of ||A
    # - A U^H U|| / ||A||.
    orthogonality: Any
    distance: Any  # shape (batch,): the same without that exception
    positive: Any  # shape (batch,): 1 where H is positive semidefinite, as far as its Lanczos steps see
    # Shape (batch,): about how many singular values of U are near 1: their number without ||I - U^H U||_F^2.
    count: Any

    def accepted_by(self, bounds: PolarBounds, cut_off: Any = 0.0) -> Any:
        residual = self.residual, bounds.residual + cut_off
        return within(residual, (self.orthogonality, bounds.orthogonality)) & (self.positive == 1)

    def ranks(self, bounds: PolarBounds, full: int) -> Any:
        """How many singular values are 1: all of them where they are near 1, or about how many."""
        known = self.count == self.count  # not NaN
        counts = where(known, self.count.round(), 0.0).clip(0, full)
        return where(within((self.distance, bounds.orthogonality)), full, counts)
