"""Certificates of QR factorizations, of one matrix and of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np

from neula.certificates.verdict import within
from neula.errors import of_batch


@dataclass(frozen=True)
class QRCertificate:
    """Measured errors of a QR factorization of A with columns scaled to norms near 1.

    For a small matrix on a GPU, ``residual`` and ``orthogonality`` are computed norms instead of estimates.
    For float16 and bfloat16 they are those of the factors in float32, before these are rounded.

    Attributes
    ----------
    residual : float
        Estimate of ``||A - Q R||_F / ||A||_F`` from a few random vectors.
    orthogonality : float
        Estimate of ``||I - Q^H Q||_F / sqrt(n)`` from a few random vectors.
    residual_bound, orthogonality_bound : float
        Largest accepted values.
    orthogonality_2norm_bound : float
        The largest accepted value, at most 0.1.
    orthogonality_2norm : float
        Estimate of ``||I - Q^H Q||_2`` from above: with a probability below 1e-6 it is less than the norm,
        or, of batches, of tall matrices and on a CPU, less than half of it. It may be eleven times
        ``sqrt(n)`` too large; if it alone exceeds its bound, one from above within a factor of 2 replaces it.
    """

    residual: float
    orthogonality: float
    residual_bound: float
    orthogonality_bound: float
    orthogonality_2norm_bound: float = 0.1
    orthogonality_2norm: float = 0.0

    @property
    def accepted(self) -> bool:
        """Whether all measures meet their bounds (NaN never does)."""
        return bool(self._in_usual_norms and self.orthogonality_2norm <= self.orthogonality_2norm_bound)

    @property
    def _in_usual_norms(self) -> bool:
        return self.residual <= self.residual_bound and self.orthogonality <= self.orthogonality_bound

    @property
    def doubtful(self) -> bool:
        """Whether only ``orthogonality_2norm``, which may be far too large, exceeds its bound."""
        return self._in_usual_norms and not self.accepted

    @property
    def error(self) -> float:
        """The larger of residual and orthogonality; infinite where one is not finite."""
        largest = max(self.residual, self.orthogonality)
        return largest if math.isfinite(self.residual + self.orthogonality) else math.inf

    @property
    def in_words(self) -> str:
        """The reason in an attempt."""
        return str(self)

    def __str__(self) -> str:
        return (
            f"residual {self.residual:.1e} (bound {self.residual_bound:.1e}), "
            f"orthogonality {self.orthogonality:.1e} (bound {self.orthogonality_bound:.1e}), "
            f"in the 2-norm at most {self.orthogonality_2norm:.1e} "
            f"(bound {self.orthogonality_2norm_bound:.1e})"
        )


@dataclass(frozen=True, eq=False)
class QRCertificates(Sequence[QRCertificate]):
    """A certificate for each matrix of a batch, made when it is requested: thousands take milliseconds.

    Attributes
    ----------
    residual, orthogonality : array of float, shape (batch,)
    residual_bound, orthogonality_bound : float
        Largest accepted values.
    orthogonality_2norm_bound : float
    orthogonality_2norm : array of float, shape (batch,)
    """

    residual: np.ndarray
    orthogonality: np.ndarray
    residual_bound: float
    orthogonality_bound: float
    orthogonality_2norm_bound: float
    orthogonality_2norm: np.ndarray

    @cached_property
    def accepted(self) -> np.ndarray:
        """Whether all measures of each matrix meet their bounds (NaN never does)."""
        return self._in_usual_norms & (self.orthogonality_2norm <= self.orthogonality_2norm_bound)

    @cached_property
    def _in_usual_norms(self) -> np.ndarray:
        pairs = (self.residual, self.residual_bound), (self.orthogonality, self.orthogonality_bound)
        return np.asarray(within(*pairs))

    @property
    def doubtful(self) -> np.ndarray:
        """Mask where only ``orthogonality_2norm``, which may be far too large, exceeds its bound."""
        return self._in_usual_norms & ~self.accepted

    @cached_property
    def error(self) -> np.ndarray:
        """The larger of residual and orthogonality of each; infinite where one is not finite."""
        error = np.maximum(self.residual, self.orthogonality)
        return np.where(np.isfinite(error), error, np.inf)

    @cached_property
    def rejected(self) -> int:
        """How many are not accepted."""
        return len(self) - int(np.count_nonzero(self.accepted))

    @cached_property
    def worst(self) -> QRCertificate:
        """The one with the largest error, of those that are not accepted if there are any."""
        return self[int(np.where(self.accepted & (self.rejected > 0), -1.0, self.error).argmax())]

    @property
    def in_words(self) -> str:
        """The reason in an attempt."""
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
            orthogonality_2norm_bound=self.orthogonality_2norm_bound,
            orthogonality_2norm=float(self.orthogonality_2norm[index]),
        )

    def __repr__(self) -> str:
        return f"<{len(self)} certificates, {len(self) - self.rejected} accepted>"
