"""Error measures and certificates: what "accurate" means here, and how it is found out.

An accuracy is the name of a format. A result has it when its measured error is a small multiple of that
format's unit roundoff, the multiple growing as theory and LAPACK's own tests let it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import overload

import numpy as np
import torch

from neula.engines import BF16, FORMATS, FP16, FP64, Format, format_of
from neula.engines.precision import exact_matmul
from neula.engines.random_vectors import gaussian
from neula.errors import unknown_name
from neula.kernels import probe_errors
from neula.kernels.thin import thin_product
from neula.pipeline.result import QRCertificate

PROBES = 4
"""Random vectors in a certificate. With one dominant direction the estimate of a norm is at least a third of
it in 98% of all cases and a tenth in 99.98% (chi-squared with 4 degrees of freedom); where many directions
contribute it is far closer."""

_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Elements that are converted at a time: what a cache holds, and what fills a GPU."""


def target_format(accuracy: str | None, dtype: torch.dtype) -> Format:
    """The format whose accuracy is asked for; that of the input when nothing is.

    Raises
    ------
    ValueError
        For an unknown name, and for an accuracy that the dtype of the result cannot hold.
    """
    if accuracy is None:
        return format_of(dtype)
    if accuracy not in FORMATS:
        raise unknown_name("accuracy", accuracy, FORMATS)
    target, kept = FORMATS[accuracy], format_of(dtype)
    if target.u < kept.u:
        raise ValueError(
            f"accuracy {accuracy!r} is finer than the dtype of the result, {dtype}: pass A in a wider dtype"
        )
    return target


def residual_bound(target: Format, n: int) -> float:
    """What the residual of a QR may be: ``3 u (2 + log2 n)``.

    A recursion of depth ``log2 n`` adds an error of order u at every level.
    """
    return 3 * target.u * (2 + math.log2(n))


def orthogonality_bound(target: Format, n: int) -> float:
    """What ``||I - Q^T Q||`` may be: ``6 u (2 + log2 n)``, since it counts an error of Q twice."""
    return 2 * residual_bound(target, n)


def measurement_error(m: int, high: torch.dtype) -> float:
    """What the measurement adds by itself: sums of m products in ``high`` precision err by ``sqrt(m) u``."""
    return math.sqrt(m) * torch.finfo(high).eps / 2


def lstsq_bound(target: Format, n: int) -> float:
    """What the backward error of a least-squares solution may be: ``8 u + 8 sqrt(n) u64``.

    Solutions are refined in double precision, whatever the accuracy: what grows with n are the rounding
    errors of that. Householder QR in double guarantees a multiple of ``m n u64`` and is observed between 1
    and 5 times ``sqrt(n) u64``.
    """
    return 8 * target.u + 8 * math.sqrt(n) * FP64.u


def solve_bound(target: Format, n: int) -> float:
    """What the backward error of a linear system may be, in the infinity norm: ``4 u + sqrt(n) u64``.

    LU with partial pivoting in double precision is observed at 0.5 to 1.2 times ``sqrt(n) u64``. Refined
    solutions are below 1 u64, but where A and x have one sign: there the rounding errors of the residual
    itself come to a third of ``sqrt(n) u64``.
    """
    return 4 * target.u + math.sqrt(n) * FP64.u


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
    a: torch.Tensor, q: torch.Tensor, r: torch.Tensor, scales: torch.Tensor, target: Format
) -> torch.Tensor:
    """What :func:`qr_certificate` needs to know, measured without waiting for the device.

    Returns
    -------
    Tensor, shape (3,)
        Those of :func:`qr_measures`, in the precision of the measurement.
    """
    image = image_of(a, scales, certifying_dtype(torch.promote_types(a.dtype, q.dtype), target))
    return image_measures(image, q, r, scales)


def image_of(a: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """``A diag(scales) G``, shape (m, probes), for the random vectors G: what a certificate knows of A."""
    return thin_product(a, scales[:, None].to(dtype) * _gaussian_on(a.shape[1], a.device).to(dtype))


def image_measures(
    image: torch.Tensor, q: torch.Tensor, r: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """:func:`single_qr_measures` by what :func:`image_of` has kept of A, in its dtype."""
    high = image.dtype
    k, n = r.shape
    g, h = (_gaussian_on(size, q.device).to(high) for size in (n, k))
    dg = scales[:, None].to(high) * g
    qrg, qh = thin_product(q, torch.cat([thin_product(r, dg), h], 1)).split(PROBES, dim=1)
    norm = torch.linalg.matrix_norm
    return torch.stack([norm(image - qrg), norm(image), norm(thin_product(q.T, qh) - h)])


def certifying_dtype(given: torch.dtype, target: Format) -> torch.dtype:
    """Higher precision than the target's, and than that of what is measured."""
    wide = given == torch.float64 or target not in (FP16, BF16)
    return torch.float64 if wide else torch.float32


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
        return (self.residual <= self.residual_bound) & (self.orthogonality <= self.orthogonality_bound)

    @cached_property
    def error(self) -> np.ndarray:
        """The larger measure of each matrix; infinite where one is not finite."""
        larger = np.maximum(self.residual, self.orthogonality)
        return np.where(np.isfinite(larger), larger, np.inf)

    @cached_property
    def rejected(self) -> int:
        """How many are not accepted."""
        return len(self) - int(np.count_nonzero(self.accepted))

    @cached_property
    def worst(self) -> QRCertificate:
        """The one with the largest error; NaN is larger than any number."""
        return self[int(np.maximum(self.residual, self.orthogonality).argmax())]

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


def qr_measures(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What :func:`qr_certificates` needs to know, measured without waiting for the device.

    Parameters
    ----------
    a : Tensor, shape (batch, m, n)
        The matrices as they were given.
    q : Tensor, shape (batch, m, k)
    r : Tensor, shape (batch, k, n)
    scales : Tensor, shape (batch, n)
        Where one is NaN, that matrix will not be accepted.

    Returns
    -------
    Tensor, shape (3, batch)
        Norms of ``A D G - Q R D G``, of ``A D G`` and of ``Q^T Q H - H`` with random vectors G and H and the
        diagonal matrix D of the scales.
    """
    k, n = r.shape[1:]
    g, h = _gaussian_on(n, a.device), _gaussian_on(k, a.device)
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
    m, n = shape
    # NumPy takes a tenth of torch's time for some thousand numbers, a part of that of small batches.
    residual, size, loss = measures.astype(np.float64, copy=False)
    noise = measurement_error(m, measured_in)
    with np.errstate(invalid="ignore", over="ignore"):
        relative = residual / np.where(size == 0, 1.0, size)
    return QRCertificates(
        residual=relative,
        orthogonality=loss / (_gaussian_norm(min(m, n)) or 1.0),
        residual_bound=residual_bound(target, n) + noise,
        orthogonality_bound=orthogonality_bound(target, n) + noise,
    )


def _gaussian_on(n: int, device: torch.device) -> torch.Tensor:
    return gaussian(n, PROBES, torch.float64, device, seed=n)


@lru_cache(maxsize=128)
def _gaussian_norm(n: int) -> float:
    return float(torch.linalg.matrix_norm(_gaussian_on(n, torch.device("cpu"))))


def componentwise_backward_error(
    a: torch.Tensor, x: torch.Tensor, b: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor
) -> float:
    """The smallest ``e`` with ``(A + dA) x = b`` and ``|dA| <= e (|A| + |L| |U|)``, in float64.

    Lopez and Mary (2022), formula 2.2, by the theorem of Oettli and Prager; the worst right-hand side counts.

    Parameters
    ----------
    a : Tensor, shape (n, n)
        With the rows in the order of L: ``A[permutation]`` after pivoting.
    x : Tensor, shape (n, k)
    b : Tensor, shape (n, k)
        Rows as in ``a``.
    lower, upper : Tensor, shape (n, n)
        L and U.

    Returns
    -------
    float
        NaN if x is not finite.

    Examples
    --------
    >>> a, one = torch.tensor([[4.0, 0.0], [0.0, 4.0]]), torch.ones(2, 1)
    >>> componentwise_backward_error(a, one, 4.5 * one, torch.eye(2), a)
    0.0625
    """
    high = torch.float64
    x = x.to(high)
    residual = (thin_product(a, x) - b.to(high)).abs()
    size = _abs_matmul(a, x.abs()) + _abs_matmul(lower, _abs_matmul(upper, x.abs()))
    return float(torch.where(residual == 0, 0.0, residual / size).max())


def lu_bound(
    variant: str,
    n: int,
    *,
    panel: int,
    inner_panel: int | None = None,
    low: Format = FP16,
    storage: Format | None = None,
) -> float:
    """The dominant term of f in ``A + dA = L U``, ``|dA| <= f (|A| + |L| |U|)``.

    Lopez and Mary (2022), Tables 1 and 2; for the standard algorithms ``n u``. What rounding A to the low
    format adds (u, for Algorithms 4.1 to 5.2) is not in it.

    Parameters
    ----------
    variant : str
        ``"2.1"``, ``"2.2"``, ``"3.1"``, ``"4.1"``, ``"5.1"``, ``"5.2/4.1"`` or ``"5.2/5.1"``.
    n : int
    panel, inner_panel : int
        Widths r and s.
    low : Format
        Of the operands of products.
    storage : Format, optional
        Of the matrix, for Algorithm 3.1: ``low`` by default.

    Raises
    ------
    ValueError
        For an unknown variant, and for 5.2/4.1 without an inner panel.

    Examples
    --------
    >>> ratio = lu_bound("4.1", 1000, panel=256) / lu_bound("5.1", 1000, panel=256)
    >>> 100 < ratio < 256
    True
    """
    u, high = low.u, format_of(low.storage).u
    if variant == "5.2/4.1" and inner_panel is None:
        raise ValueError("the bound of '5.2/4.1' depends on the width of the inner panels: pass inner_panel")
    bounds = {
        "2.1": n * u,
        "2.2": n * u,
        "3.1": n * u / 4 if storage in (None, low) else 2 * u + n * high,
        "4.1": u + max(n * high, panel * u),
        "5.1": 2 * u + n * high,
        "5.2/4.1": (inner_panel or 0) * u + n * high,
        "5.2/5.1": 2 * u + n * high,
    }
    if variant not in bounds:
        raise unknown_name("variant", variant, bounds)
    return bounds[variant]


def low_rank_error(a: torch.Tensor, u: torch.Tensor, s: torch.Tensor, vh: torch.Tensor) -> float:
    """Estimate ``||A - U diag(s) Vh||_F / ||A||_F`` with random vectors, in float64."""
    g = _gaussian_on(a.shape[1], a.device)
    ag = thin_product(a, g)
    approximation = thin_product(u, s.double()[:, None] * thin_product(vh, g))
    size = float(torch.linalg.matrix_norm(ag))
    return float(torch.linalg.matrix_norm(ag - approximation)) / size if size > 0 else 0.0


def _row_blocks(a: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Blocks small enough that a copy in a wider dtype does not hurt; the matrix itself if none is needed."""
    return (a,) if a.dtype == dtype else a.split(max(1, _CHUNK[a.device.type] // a.shape[1]))


def _abs_matmul(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([exact_matmul(block.to(x.dtype).abs(), x) for block in _row_blocks(a, x.dtype)])
