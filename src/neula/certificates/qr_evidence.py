"""Certificates of QR factorizations, of one matrix and of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic

import numpy as np

from neula.certificates.residuals import X
from neula.certificates.verdict import within
from neula.errors import of_batch


@dataclass(frozen=True, eq=False)
class QRErrors(Generic[X]):
    """Measured errors of a QR factorization with their bounds, or of each of a batch."""

    residual: X
    orthogonality: X
    residual_bound: float
    orthogonality_bound: float
    orthogonality_2norm_bound: float = 0.1
    orthogonality_2norm: X = 0.0  # type: ignore[assignment]

    @property
    def accepted(self) -> Any:
        """Whether all measures meet their bounds (NaN never does)."""
        return self._in_usual_norms & (self.orthogonality_2norm <= self.orthogonality_2norm_bound)

    @property
    def _in_usual_norms(self) -> Any:
        pairs = (self.residual, self.residual_bound), (self.orthogonality, self.orthogonality_bound)
        return within(*pairs)

    @property
    def doubtful(self) -> Any:
        """Whether only ``orthogonality_2norm``, which may be far too large, exceeds its bound."""
        return self._in_usual_norms != self.accepted

    @property
    def error(self) -> Any:
        """The larger of residual and orthogonality; infinite where one is not finite."""
        error = np.maximum(self.residual, self.orthogonality)
        error = np.where(np.isfinite(error), error, np.inf)
        return error if error.ndim else float(error)


@dataclass(frozen=True)
class QRCertificate(QRErrors[float]):
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
        ``sqrt(n)`` too large; if it alone exceeds its bound, a closer one replaces it, within a factor of 2
        of the norm unless a coarser one is below the bound.
    """

    @property
    def in_words(self) -> str:
        """The measured errors and their bounds, in one line."""
        return str(self)

    def __str__(self) -> str:
        return (
            f"residual {self.residual:.1e} (bound {self.residual_bound:.1e}), "
            f"orthogonality {self.orthogonality:.1e} (bound {self.orthogonality_bound:.1e}), "
            f"in the 2-norm at most {self.orthogonality_2norm:.1e} "
            f"(bound {self.orthogonality_2norm_bound:.1e})"
        )


@dataclass(frozen=True, eq=False)
class QRCertificates(QRErrors[np.ndarray], Sequence[QRCertificate]):
    """A certificate for each matrix of a batch, made when it is requested: thousands take milliseconds."""

    @cached_property
    def rejected(self) -> int:
        return len(self) - int(np.count_nonzero(self.accepted))

    @cached_property
    def worst(self) -> QRCertificate:
        """The one with the largest error, of those that are not accepted if there are any."""
        return self[int(np.where(self.accepted & (self.rejected > 0), -1.0, self.error).argmax())]

    @property
    def in_words(self) -> str:
        return of_batch(str(self.worst), self.rejected, len(self), "matrices")

    def __len__(self) -> int:
        return len(self.residual)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        known = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return QRCertificate(**{n: float(x[index] if np.ndim(x) else x) for n, x in known.items()})

    def __repr__(self) -> str:
        return f"<{len(self)} certificates, {len(self) - self.rejected} accepted>"
