"""The certificate of a QR factorization: residual and orthogonality, measured along random vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, overload

import numpy as np
import torch

from neula.certificates.bounds import measurement_error, orthogonality_bound, probing_error, residual_bound
from neula.certificates.probes import PROBES, gaussian_probes
from neula.certificates.verdict import within
from neula.engines import BF16, FP16, Format
from neula.engines.random_vectors import gaussian
from neula.engines.reduction import HERE, Reduction
from neula.errors import of_batch
from neula.kernels import probe_errors
from neula.kernels.thin import VECTORS, thin_product

SEED = 3
"""Of the random vectors that look for columns which are not orthonormal."""


@dataclass(frozen=True)
class QRCertificate:
    """Measured quality of a QR factorization, in the scaling in which every column has norm near 1.

    Of a small matrix on a GPU, which a kernel factorizes, both are norms that were computed, not estimated.

    Attributes
    ----------
    residual : float
        Estimate of ``||A - Q R||_F / ||A||_F`` from a few random vectors.
    orthogonality : float
        Estimate of ``||I - Q^T Q||_F / sqrt(n)`` from a few random vectors.
    residual_bound, orthogonality_bound : float
        What was asked for.
    """

    residual: float
    orthogonality: float
    residual_bound: float
    orthogonality_bound: float

    @property
    def accepted(self) -> bool:
        """Whether both measures meet their bounds (NaN never does)."""
        pairs = (self.residual, self.residual_bound), (self.orthogonality, self.orthogonality_bound)
        return bool(within(*pairs))

    @property
    def error(self) -> float:
        """The larger measure; infinite where one is not finite."""
        largest = max(self.residual, self.orthogonality)
        return largest if math.isfinite(self.residual + self.orthogonality) else math.inf

    @property
    def in_words(self) -> str:
        """What an attempt says of it."""
        return str(self)

    def __str__(self) -> str:
        return (
            f"residual {self.residual:.1e} (bound {self.residual_bound:.1e}), "
            f"orthogonality {self.orthogonality:.1e} (bound {self.orthogonality_bound:.1e})"
        )


@dataclass(frozen=True, eq=False)
class QRCertificates(Sequence[QRCertificate]):
    """A certificate for each matrix of a batch, made when it is asked for: thousands take milliseconds.

    Attributes
    ----------
    residual, orthogonality : array of float, shape (batch,)
    residual_bound, orthogonality_bound : float
        What was asked for.
    """

    residual: np.ndarray
    orthogonality: np.ndarray
    residual_bound: float
    orthogonality_bound: float

    @cached_property
    def accepted(self) -> np.ndarray:
        """Whether both measures of each matrix meet their bounds (NaN never does)."""
        pairs = (self.residual, self.residual_bound), (self.orthogonality, self.orthogonality_bound)
        return np.asarray(within(*pairs))

    @cached_property
    def error(self) -> np.ndarray:
        """The larger measure of each matrix; infinite where one is not finite."""
        error = np.maximum(self.residual, self.orthogonality)
        return np.where(np.isfinite(error), error, np.inf)

    @cached_property
    def rejected(self) -> int:
        """How many are not accepted."""
        return len(self) - int(np.count_nonzero(self.accepted))

    @cached_property
    def worst(self) -> QRCertificate:
        """The one with the largest error; NaN is larger than any number."""
        return self[int(self.error.argmax())]

    @property
    def in_words(self) -> str:
        """What an attempt says of them."""
        return of_batch(str(self.worst), self.rejected, len(self), "matrices")

    def __len__(self) -> int:
        return len(self.residual)

    @overload
    def __getitem__(self, index: int) -> QRCertificate: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[QRCertificate, ...]: ...
    def __getitem__(self, index: int | slice) -> QRCertificate | tuple[QRCertificate, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        return QRCertificate(
            residual=float(self.residual[index]),
            orthogonality=float(self.orthogonality[index]),
            residual_bound=self.residual_bound,
            orthogonality_bound=self.orthogonality_bound,
        )

    def __repr__(self) -> str:
        return f"<{len(self)} certificates, {len(self) - self.rejected} accepted>"


def qr_certificate(
    a: torch.Tensor, q: torch.Tensor, r: torch.Tensor, scales: torch.Tensor, target: Format
) -> QRCertificate:
    """Estimate residual and orthogonality with random vectors, in higher precision than the target.

    Parameters
    ----------
    a : Tensor, shape (m, n)
        The matrix as it was given.
    q : Tensor, shape (m, k)
    r : Tensor, shape (k, n)
        Factor of ``a``.
    scales : Tensor, shape (n,)
        Column scales: errors are measured in ``A diag(scales)``.
    target : Format

    Returns
    -------
    QRCertificate
    """
    measures = single_qr_measures(a, q, r, scales, target)
    return qr_certificates(measures[:, None], a.shape, target)[0]


def single_qr_measures(
    a: torch.Tensor,
    q: torch.Tensor,
    r: torch.Tensor,
    scales: torch.Tensor,
    target: Format,
    over_rows: Reduction = HERE,
) -> torch.Tensor:
    """What :func:`qr_certificate` needs to know, measured without synchronizing.

    A and Q may be the rows that one process has of them.

    Returns
    -------
    Tensor, shape (3,)
        Those of :func:`qr_measures`, in the precision of the measurement.
    """
    image = image_of(a, scales, certifying_dtype(torch.promote_types(a.dtype, q.dtype), target))
    return image_measures(image, q, r, scales, over_rows)


def image_of(a: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """``A diag(scales) G``, shape (m, probes), for the random vectors G: what a certificate knows of A."""
    return thin_product(a, _scaled_probes(scales, dtype))


def _scaled_probes(scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``diag(scales) G``."""
    return (scales[:, None] * gaussian_probes(len(scales), scales.device)).to(dtype)


def image_measures(
    image: torch.Tensor,
    q: torch.Tensor,
    r: torch.Tensor,
    scales: torch.Tensor,
    over_rows: Reduction = HERE,
) -> torch.Tensor:
    """:func:`single_qr_measures` by what :func:`image_of` has kept of A, in its dtype."""
    high = image.dtype
    h = gaussian_probes(len(r), q.device).to(high)
    rg = thin_product(r, _scaled_probes(scales, high))
    qrg, qh = thin_product(q, torch.cat([rg, h], 1)).split(PROBES, dim=1)
    # Few launches, since they take a part of the time of small factorizations, and one message.
    squares = torch.stack([image - qrg, image]).square().sum((1, 2))
    squares, qqh = over_rows.totals(squares, thin_product(q.T, qh))
    return torch.cat([squares.sqrt(), torch.linalg.vector_norm(qqh - h)[None]])


def leading_losses(q: torch.Tensor, counts: Sequence[int], over_rows: Reduction = HERE) -> torch.Tensor:
    """Estimates of ``||I - Q_k^T Q_k||_F / sqrt(k)`` for the first k columns, without synchronizing.

    Parameters
    ----------
    q : Tensor, shape (m, n)
    counts : sequence of int
        The k, so few that all random vectors together are multiplied while Q is read once.
    over_rows : Reduction

    Returns
    -------
    Tensor, shape (len(counts),)
        float64.

    Examples
    --------
    >>> import torch
    >>> from neula.certificates.qr import leading_losses
    >>> q = torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.5]))
    >>> leading_losses(q, [3, 4])[0]
    tensor(0., dtype=torch.float64)
    """
    n, each = q.shape[1], VECTORS // len(counts)
    place = torch.arange(n, device=q.device)
    within = torch.stack([place < k for k in counts], 1).repeat_interleave(each, 1)
    g = gaussian(n, len(counts) * each, torch.float64, q.device, seed=SEED) * within
    lost = (over_rows.total(thin_product(q.T, thin_product(q, g))) - g) * within
    sizes = (x.unflatten(1, (len(counts), each)).square().sum((0, 2)) for x in (lost, g))
    return torch.div(*sizes).sqrt()


def certifying_dtype(given: torch.dtype, target: Format) -> torch.dtype:
    """Higher precision than the target's, and than that of what is measured."""
    wide = given == torch.float64 or target not in (FP16, BF16)
    return torch.float64 if wide else torch.float32


def qr_measures(
    a: torch.Tensor, q: torch.Tensor, r: torch.Tensor, scales: torch.Tensor, over_rows: Reduction = HERE
) -> torch.Tensor:
    """What :func:`qr_certificates` needs to know, measured without synchronizing.

    Parameters
    ----------
    a : Tensor, shape (batch, m, n)
        The matrices as they were given.
    q : Tensor, shape (batch, m, k)
    r : Tensor, shape (batch, k, n)
    scales : Tensor, shape (batch, n)
        Where one is NaN, that matrix will not be accepted.
    over_rows : Reduction

    Returns
    -------
    Tensor, shape (3, batch)
        Norms of ``A D G - Q R D G``, of ``A D G`` and of ``Q^T Q H - H`` with random vectors G and H and the
        diagonal matrix D of the scales.
    """
    k, n = r.shape[1:]
    if over_rows.spread:
        wide = torch.float64
        found = [
            image_measures(image_of(*one[:2], wide), one[2], one[3], one[1], over_rows)
            for one in zip(a, scales, q, r, strict=True)
        ]
        return over_rows.agree(torch.stack(found, 1))
    g, h = gaussian_probes(n, a.device), gaussian_probes(k, a.device)
    return torch.stack(probe_errors(a, q, r, scales, g, h))


def qr_certificates(measures: torch.Tensor, shape: Sequence[int], target: Format) -> QRCertificates:
    """The certificates of a batch, as accurate as :mod:`neula.kernels.probes` says.

    Parameters
    ----------
    measures : Tensor, shape (3, batch)
        From :func:`qr_measures`, in the precision of the measurement.
    shape : (int, int)
        Of each matrix.
    target : Format

    Returns
    -------
    QRCertificates
        The measures of a matrix that is not finite are NaN or infinite.
    """
    return certificates_of(measures.cpu().numpy(), measures.dtype, shape, target)


def certificates_of(
    measures: np.ndarray, measured_in: torch.dtype, shape: Sequence[int], target: Format
) -> QRCertificates:
    """The same of numbers that were read already, which have been measured in some precision."""
    # NumPy takes a tenth of torch's time for some thousand numbers, a part of that of small batches.
    with np.errstate(invalid="ignore", over="ignore"):
        residual, orthogonality = _relative(*measures.astype(np.float64), where=np.where, shape=shape)
    return QRCertificates(residual, orthogonality, *_bounds(*shape, measured_in, target))


def certificate_of(
    residual: float,
    size: float,
    loss: float,
    shape: Sequence[int],
    target: Format,
    *,
    measured_in: torch.dtype = torch.float64,
) -> QRCertificate:
    """The certificate of a single matrix: numbers as of :func:`qr_measures`."""
    relative = _relative(residual, size, loss, where=lambda empty, one, x: one if empty else x, shape=shape)
    return QRCertificate(*relative, *_bounds(*shape, measured_in, target))


def exact_certificate(
    residual: float, orthogonality: float, shape: Sequence[int], target: Format
) -> QRCertificate:
    """The certificate of a single matrix whose norms were computed in double precision, not estimated."""
    return QRCertificate(residual, orthogonality, *_bounds(*shape, torch.float64, target))


def exact_certificates(norms: np.ndarray, shape: Sequence[int], target: Format) -> QRCertificates:
    """The same of a batch, two norms for each."""
    return QRCertificates(norms[:, 0], norms[:, 1], *_bounds(*shape, torch.float64, target))


def accepted_by(measures: torch.Tensor, shape: Sequence[int], target: Format) -> torch.Tensor:
    """Which factorizations meet the bounds, shape (batch,), without synchronizing.

    Parameters
    ----------
    measures : Tensor, shape (3, batch)
        From :func:`qr_measures`, in the precision of the measurement.
    shape : (int, int)
        Of each matrix.
    target : Format
    """
    relative = _relative(*measures.double(), where=torch.where, shape=shape)
    accepted: torch.Tensor = within(*zip(relative, _bounds(*shape, measures.dtype, target), strict=True))
    return accepted


def _relative(residual: Any, size: Any, loss: Any, *, where: Any, shape: Sequence[int]) -> tuple[Any, Any]:
    """Residual and loss of orthogonality, of arrays or tensors."""
    return residual / where(size == 0, 1.0, size), loss / (_gaussian_norm(min(shape)) or 1.0)


@lru_cache(maxsize=128)
def _bounds(m: int, n: int, measured_in: torch.dtype, target: Format) -> tuple[float, float]:
    """Bounds on the residual and on the loss of orthogonality."""
    noise = measurement_error(m, measured_in) if measured_in == torch.float64 else probing_error(max(m, n))
    return residual_bound(target, n) + noise, orthogonality_bound(target, n) + noise


@lru_cache(maxsize=128)
def _gaussian_norm(n: int) -> float:
    return float(torch.linalg.matrix_norm(gaussian_probes(n, torch.device("cpu"))))
