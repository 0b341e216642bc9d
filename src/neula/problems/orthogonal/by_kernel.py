"""QR on a CPU by the compiled core, of one matrix or a batch: from Gram matrices, by one call of a kernel.

LAPACK factorizes the matrices whose factors are not accepted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from neula.algorithms.scaling import SAFE_NORMS
from neula.certificates.bounds import orthogonality_bound
from neula.certificates.qr import QRCertificate, QRCertificates, certificate_of, certificates_of
from neula.certificates.verdict import within
from neula.engines import Format
from neula.kernels.cholesky_qr_host import cholesky_qr

LABEL = "cholesky-qr fp64, repeated"
"""Of kernels that do this, on a host and on a GPU."""

COLUMNS = 128
"""Up to so many the factor of a Gram matrix stays in a cache, and LAPACK's reflections take more time."""

PART = 0.5
"""Of the bound on orthogonality, that may be lost by what is not repeated."""


class KernelQRFactors(NamedTuple):
    """Factors by a kernel.

    Attributes
    ----------
    q, r : Tensor
    measures : array, shape (5, batch)
        As of :func:`neula.kernels.probes_host.reflected_errors`.
    certificate : QRCertificate or QRCertificates
    accepted : bool or array of bool
    """

    q: torch.Tensor
    r: torch.Tensor
    measures: np.ndarray
    certificate: QRCertificate | QRCertificates
    accepted: bool | np.ndarray

    @property
    def all_accepted(self) -> bool:
        """Whether there is nothing left to do."""
        return self.accepted is True or bool(np.all(self.accepted))  # in a tenth of its time


def factorized_by_kernel(a: torch.Tensor, g: np.ndarray, target: Format) -> KernelQRFactors | None:
    """Factors of which some may not be accepted; None where there is no way to them.

    Parameters
    ----------
    a : Tensor, shape (m, n) or (batch, m, n), m >= n
        On the host, in the dtype of the target.
    g : array, shape (n, 4)
        Random vectors.
    target : Format
        float64 or float32.
    """
    n = a.shape[-1]
    if n > COLUMNS:
        return None
    found = cholesky_qr(a, g, PART * orthogonality_bound(target, n))
    if found is None:
        return None
    q, r, measures = found
    return KernelQRFactors(q, r, measures, *certified(measures, a.shape, target))


def certified(
    measures: np.ndarray, shape: torch.Size, target: Format
) -> tuple[QRCertificate | QRCertificates, bool | np.ndarray]:
    """Certificates of what was measured, and which are accepted: none whose squares of columns are not to be
    trusted.
    """
    low, high = SAFE_NORMS[torch.promote_types(target.dtype, torch.float32)]
    if len(shape) == 2:
        residual, size, loss, smallest, largest = measures[:, 0].tolist()
        one = certificate_of(residual, size, loss, shape, target)
        return one, one.accepted and bool(within((low, smallest), (largest, high)))
    several = certificates_of(measures[:3], torch.float64, shape[-2:], target)
    return several, several.accepted & within((low, measures[3]), (measures[4], high))
