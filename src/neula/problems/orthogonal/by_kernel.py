"""QR of few columns, one matrix or a batch, by one call of the compiled core: repeated Cholesky QR.

LAPACK factorizes the matrices whose factors are not accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from neula.certificates.bounds import orthogonality_bound
from neula.certificates.qr import certificate_of, certificates_of
from neula.certificates.qr_evidence import QRCertificate, QRCertificates
from neula.engines import FP32, FP64, Format
from neula.kernels.qr.cholesky_qr_host import cholesky_qr
from neula.problems.orthogonal.on_host import probe_vectors, trusted
from neula.problems.orthogonal.problem import QRValues

LABEL = "cholesky-qr fp64, repeated"
"""Of kernels that do this, on a host and on a GPU."""

COLUMNS = 128
"""Up to so many the factor of a Gram matrix stays in a cache, and LAPACK's reflections take more time."""

PART = 0.5
"""Of the bound on orthogonality, that may be lost by what is not repeated."""


class MeasuredFactors(NamedTuple):
    """Factors with what was measured of them.

    Attributes
    ----------
    q, r : Tensor, shape (m, n) and (n, n), or with a batch before them
    measures : array, shape (4, batch)
        As of :func:`neula.certificates.qr.qr_measures`.
    certificate : QRCertificate or QRCertificates
    """

    q: torch.Tensor
    r: torch.Tensor
    measures: np.ndarray
    certificate: QRCertificate | QRCertificates

    @classmethod
    def certified(
        cls, q: torch.Tensor, r: torch.Tensor, measures: np.ndarray, target: Format
    ) -> MeasuredFactors:
        """Factors with their certificates, of matrices that are not wide."""
        found = cls(q, r, measures, _certificate(q, measures, target))
        if found.all_accepted:
            return found
        which = np.ravel(found.certificate.doubtful)
        if not which.any():
            return found
        measures[3, which] = found.values.norms(which, found.certificate)
        return found._replace(certificate=_certificate(q, measures, target))

    @property
    def all_accepted(self) -> bool:
        """Whether there is nothing left to do."""
        known = self.certificate
        return known.accepted if isinstance(known, QRCertificate) else not known.rejected

    @property
    def certificates(self) -> Sequence[QRCertificate]:
        """One for each matrix."""
        return (self.certificate,) if isinstance(self.certificate, QRCertificate) else self.certificate

    @property
    def values(self) -> QRValues:
        """The same of a batch, which may have one matrix."""
        q, r = (x if x.ndim == 3 else x[None] for x in (self.q, self.r))
        return QRValues(q, r, torch.from_numpy(self.measures).T)


def _certificate(q: torch.Tensor, measures: np.ndarray, target: Format) -> QRCertificate | QRCertificates:
    shape = q.shape[-2:]
    if q.ndim == 2:  # without arrays of one number, which take longer than the numbers
        return certificate_of(measures[:, 0].tolist(), shape, target)
    return certificates_of(measures, torch.float64, shape, target)


def is_for_core(m: int, n: int, target: Format) -> bool:
    """Whether the core factorizes matrices of this shape to this accuracy."""
    return m >= n > 0 and n <= COLUMNS and target in (FP32, FP64)


def factorized_by_core(a: torch.Tensor, target: Format) -> MeasuredFactors | None:
    """Factors of which some may not be accepted; None without the core, and for matrices of another dtype.

    Parameters
    ----------
    a : Tensor, shape (m, n) or (batch, m, n)
        On the host.
    target : Format
    """
    m, n = a.shape[-2:]
    if a.dtype != target.dtype or not is_for_core(m, n, target):
        return None
    found = cholesky_qr(a, probe_vectors(n), PART * orthogonality_bound(target, n))
    if found is None:
        return None
    q, r, numbers = found
    return MeasuredFactors.certified(q, r, trusted(numbers, target), target)
