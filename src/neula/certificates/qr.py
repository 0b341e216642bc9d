"""The certificate of a QR factorization: residual and orthogonality, measured along random vectors.

A Frobenius norm over the square root of n is the error in a typical direction. It hides a few directions in
which Q is far from orthonormal: these show in the 2-norm (``certificates.orthogonality``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neula.certificates.bounds import (
    measurement_error,
    orthogonality_2norm_bound,
    orthogonality_bound,
    probing_error,
    residual_bound,
)
from neula.certificates.forward_error import where
from neula.certificates.orthogonality import PROBES, directions, gaussian_probes, margin, measured_again
from neula.certificates.qr_evidence import QRCertificate, QRCertificates, QRErrors
from neula.engines import BF16, FP16, Format
from neula.engines.formats import double_of, matching_dtype
from neula.engines.random_vectors import gaussian, remembered
from neula.engines.reduction import HERE, Reduction
from neula.kernels import probe_errors
from neula.kernels.few_vectors.thin import VECTORS, thin_product
from neula.kernels.magnitudes import squares, two_norms
from neula.kernels.precision import exact_matmul

SEED = 3  # seed of the random vectors that detect columns which are not orthonormal


def qr_certificate(a: Tensor, q: Tensor, r: Tensor, scales: Tensor, target: Format) -> QRCertificate:
    """Estimate residual and orthogonality, in ``A diag(scales)``, in higher precision than the target."""
    measures = single_qr_measures(a, q, r, scales, target)
    found = certificate_of(measures.tolist(), measures.dtype, a.shape, target)
    if not found.doubtful:
        return found
    return replace(found, orthogonality_2norm=float(measured_again(q[None], found.orthogonality_2norm_bound)))


def single_qr_measures(
    a: Tensor, q: Tensor, r: Tensor, scales: Tensor, target: Format, over_rows: Reduction = HERE
) -> Tensor:
    """Measure the errors of one QR factorization as :func:`qr_measures`, in the precision of the
    measurement, without synchronizing: four numbers. A and Q may be the rows that one process has of them.
    """
    image = image_of(a, scales, certifying_dtype(torch.promote_types(a.dtype, q.dtype), target))
    return image_measures(image, q, r, scales, over_rows)


def image_of(a: Tensor, scales: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """``A diag(scales) G``, shape (m, probes), for the random vectors G: what a certificate knows of A."""
    return thin_product(a, _scaled_probes(scales, dtype))


def _scaled_probes(scales: Tensor, dtype: torch.dtype) -> Tensor:
    return (scales[:, None] * gaussian_probes(len(scales), scales.device, dtype)).to(dtype)


def image_measures(
    image: Tensor, q: Tensor, r: Tensor, scales: Tensor, over_rows: Reduction = HERE
) -> Tensor:
    """:func:`single_qr_measures` by what :func:`image_of` has kept of A, in its dtype."""
    high, k = image.dtype, len(r)
    rg = thin_product(r, _scaled_probes(scales, high))
    # Eight vectors, in a pass of their own: an estimate from four, in that of R G, is eight times as large.
    h = directions(k, q.device, high).to(high)
    qrg, qh = thin_product(q, rg), thin_product(q, h)
    # Few launches, since they take a part of the time of small factorizations, and one message.
    sums = squares(torch.stack([image - qrg, image])).sum((1, 2))
    sums, qqh = over_rows.totals(sums, thin_product(q.mH, qh))
    lost = h - qqh
    products = exact_matmul(lost.mH, lost)
    last = two_norms(products)
    found = torch.stack([*sums.unbind(), products.trace().real, last]).sqrt()
    return found * units(k, h.shape[1], high, q.device)


def units(k: int, vectors: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Factors that turn norms along 4 or 8 vectors of a dtype into the measures of :func:`qr_measures`."""

    def made() -> Tensor:
        host = torch.device("cpu")
        h = (gaussian_probes if vectors == PROBES else directions)(k, host, dtype)
        along = _gaussian_norm(k) / float(torch.linalg.matrix_norm(h))
        return torch.tensor([1.0, 1.0, along, margin(k, vectors)], dtype=dtype.to_real(), device=device)

    return remembered(("units of QR measures", k, vectors, dtype, device), made)


def leading_losses(q: Tensor, counts: Sequence[int], over_rows: Reduction = HERE, powers: int = 0) -> Tensor:
    """Estimates of ``||I - Q_k^H Q_k||_F / sqrt(k)`` for the first k columns, float64, without synchronizing;
    after some steps of the power method instead of the 2-norm, from below.

    There are so few k that all random vectors together are multiplied while Q is read once a step.

    >>> q = torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.5]))
    >>> leading_losses(q, [3, 4])[0]
    tensor(0., dtype=torch.float64)
    >>> leading_losses(q, [3, 4], powers=4)
    tensor([0.0000, 0.7500], dtype=torch.float64)
    """
    n, each = q.shape[1], VECTORS // len(counts)
    place = torch.arange(n, device=q.device)
    within = torch.stack([place < k for k in counts], 1).repeat_interleave(each, 1)
    v = gaussian(n, len(counts) * each, double_of(q.dtype), q.device, seed=SEED) * within
    lost = _lost(q, v, within, over_rows)
    for _ in range(powers):
        size = two_norms(lost, 0)
        v = torch.where(size == 0, v, lost / size)
        lost = _lost(q, v, within, over_rows)
    sizes = (squares(x).unflatten(1, (len(counts), each)).sum((0, 2)) for x in (lost, v))
    return torch.div(*sizes).sqrt()


def _lost(q: Tensor, v: Tensor, within: Tensor, over_rows: Reduction) -> Tensor:
    return (over_rows.total(thin_product(q.mH, thin_product(q, v))) - v) * within


def certifying_dtype(given: torch.dtype, target: Format) -> torch.dtype:
    """Higher precision than the target's, and than that of what is measured."""
    wide = given.to_real() == torch.float64 or target not in (FP16, BF16)
    return matching_dtype(torch.float64 if wide else torch.float32, given)


def qr_measures(a: Tensor, q: Tensor, r: Tensor, scales: Tensor, over_rows: Reduction = HERE) -> Tensor:
    """Measure the errors of QR factorizations for :func:`certificates_of`, without synchronizing, shape (4,
    batch): norms of ``A D G - Q R D G``, of ``A D G`` and of ``Q^H Q H - H`` with random vectors G and H and
    the diagonal matrix D of the scales; and an estimate of ``||I - Q^H Q||_2``. Where a scale is NaN, that
    matrix will not be accepted.
    """
    k, n = r.shape[1:]
    if over_rows.spread:
        wide = double_of(a.dtype)
        found = [
            image_measures(image_of(*one[:2], wide), one[2], one[3], one[1], over_rows)
            for one in zip(a, scales, q, r, strict=True)
        ]
        return over_rows.agree(torch.stack(found, 1))
    g, h = (gaussian_probes(size, a.device, a.dtype) for size in (n, k))
    errors = torch.stack(probe_errors(a, q, r, scales, g, h))
    return errors * units(k, PROBES, matching_dtype(errors.dtype, a.dtype), a.device)[:, None]


def certificates_of(
    measures: np.ndarray, measured_in: torch.dtype, shape: Sequence[int], target: Format
) -> QRCertificates:
    """Certificates of a batch from :func:`qr_measures` on the host, taken in some precision."""
    # NumPy takes a tenth of torch's time for some thousand numbers, a part of that of small batches.
    with np.errstate(invalid="ignore", over="ignore"):
        return QRCertificates(*_errors(measures.astype(np.float64), shape, measured_in, target))


def certificate_of(
    numbers: Sequence[float], measured_in: torch.dtype, shape: Sequence[int], target: Format
) -> QRCertificate:
    """The certificate of a single matrix, from four numbers as of :func:`qr_measures`."""
    return QRCertificate(*_errors(numbers, shape, measured_in, target))


def accepted_by(measures: Tensor, shape: Sequence[int], target: Format) -> Tensor:
    """Which factorizations meet the bounds, shape (batch,), by :func:`qr_measures`, without synchronizing."""
    found: Tensor = QRErrors(*_errors(measures.double(), shape, measures.dtype, target)).accepted
    return found


def _errors(measures: Any, shape: Sequence[int], measured_in: torch.dtype, target: Format) -> tuple[Any, ...]:
    residual, size, loss, norm = measures
    relative = residual / where(size == 0, 1.0, size), loss / (_gaussian_norm(min(shape)) or 1.0)
    return *relative, *_bounds(*shape, measured_in, target), norm


@lru_cache(maxsize=128)
def _bounds(m: int, n: int, measured_in: torch.dtype, target: Format) -> tuple[float, float, float]:
    noise = measurement_error(m, measured_in) if measured_in == torch.float64 else probing_error(max(m, n))
    # The 2-norm of independent errors is twice their Frobenius norm over the square root of n.
    last = min(orthogonality_2norm_bound(target, min(m, n)) + 2 * noise, 0.1)
    return residual_bound(target, n) + noise, orthogonality_bound(target, n) + noise, last


@lru_cache(maxsize=128)
def _gaussian_norm(n: int) -> float:
    return float(torch.linalg.matrix_norm(gaussian_probes(n, torch.device("cpu"))))
