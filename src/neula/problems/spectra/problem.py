"""Options of a spectral decomposition, the matrices, and their measured values and vectors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from neula.certificates.spectra import SpectralBounds, SpectralMeasures
from neula.certificates.verdict import within
from neula.engines import FP64, Format
from neula.engines.formats import matching_dtype
from neula.errors import of_batch
from neula.pipeline.batches import Batch, Values
from neula.pipeline.call import ProblemOptions
from neula.pipeline.chain import Answer, Verdict


@dataclass(frozen=True)
class SpectralTuning:
    """Orders where one way takes less time than another."""

    polar_first: float  # from which the polar factor comes before singular values
    gram: float  # up to which singular vectors of a batch in float32 are those of Gram matrices
    reduced: float  # up to which batches are reduced to tridiagonal form
    divided: float  # columns of all matrices together from which on they are divided by products
    divided_batch: float  # or matrices
    divided_in_double: float  # times as many in double precision
    leaf: float  # up to which these are decomposed directly
    complex_leaf: float  # likewise
    qr_together: float  # matrices from which on a QR that takes all steps together is the fastest basis
    neighbours: float  # eigenvectors that are corrected together
    measured_in_double: float  # up to which answers in float32 are measured in double precision
    # Up to which the library takes Jacobi's method for eigenvalues of one float32 matrix, in twice the time
    # of double precision.
    jacobi: float


@dataclass(frozen=True)
class SpectralOptions(ProblemOptions):
    """Options of a spectral decomposition."""

    symmetric: bool  # whether eigenvalues are asked for, not singular values
    vectors: bool = True
    # Indices of the first and the last eigenvalue that are asked for; all by default.
    part: tuple[int, int] | None = None
    algorithm: str | None = None

    @property
    def leaf(self) -> int:
        """Order up to which matrices are decomposed directly, in the working format."""
        tuning = self.tuning[SpectralTuning]
        leaf = tuning.complex_leaf if self.engine.is_complex else tuning.leaf
        return int(leaf) // (2 if self.work is FP64 else 1)

    def bounds(self, n: int) -> SpectralBounds:
        """Largest accepted errors of n values."""
        return SpectralBounds.for_order(self.target, n, symmetric=self.symmetric)


@dataclass(frozen=True)
class SpectralMatrices(Batch):
    """Matrices in a range where squares neither overflow nor underflow."""

    # Shape (batch, m, n), m >= n, at least float32; symmetric as a whole if eigenvalues are asked for.
    a: torch.Tensor
    options: SpectralOptions

    def stored(self, format: Format) -> torch.Tensor:
        """The matrices in a format."""
        return self.a.to(matching_dtype(format.dtype, self.a.dtype))

    @property
    def neighbours(self) -> int:
        """Eigenvectors that are corrected together.

        Half precision leaves errors of about 0.001 of the norm, and first-order changes need gaps ten times
        as large: about n / 100 eigenvalues are nearer.
        """
        least = int(self.options.tuning[SpectralTuning].neighbours)
        return max(least, min(1 << (self.a.shape[2] // 64).bit_length(), self.options.leaf))

    def precise(self, format: Format) -> torch.Tensor:
        """The matrices in the precision in which an answer in a format is measured."""
        wide = torch.promote_types(self.a.dtype, matching_dtype(format.dtype, self.a.dtype))
        if self.a.shape[2] <= self.options.tuning[SpectralTuning].measured_in_double:
            wide = torch.promote_types(wide, torch.float64)
        return self.a.to(wide)


@dataclass(frozen=True)
class SpectralValues(Values):
    """Decompositions ``A V = U diag(s)``, and what was measured of them.

    Where no vectors are asked for, U and V have no columns, and measures are NaN.
    """

    s: torch.Tensor  # shape (batch, k): ascending eigenvalues, or descending singular values
    u: torch.Tensor  # shape (batch, m, k): V, of eigenvalues
    v: torch.Tensor  # shape (batch, n, k)
    residuals: torch.Tensor  # those of neula.certificates.spectra.SpectralMeasures
    quotients: torch.Tensor
    total: torch.Tensor
    orthogonality: torch.Tensor
    size: torch.Tensor

    @property
    def measures(self) -> SpectralMeasures:
        """The measured errors."""
        return SpectralMeasures(self.residuals, self.quotients, self.total, self.orthogonality, self.size)


@dataclass(frozen=True)
class SpectralJudge:
    """Decompositions are accepted by residual and orthogonality."""

    bounds: SpectralBounds

    def verdict(self, answer: Answer[SpectralValues], numbers: np.ndarray) -> Verdict:
        """Of decompositions that are not accepted those are best whose errors exceed their bounds least."""
        accepted = self.accept(numbers)
        return Verdict(accepted, np.array([~accepted, self._excess(numbers)]), self.reason(numbers, accepted))

    def reason(self, numbers: np.ndarray, accepted: np.ndarray) -> str:
        """The worst errors and their bounds, in words."""
        worst = int(self._excess(numbers).argmax())  # NaN is the largest
        residual, orthogonality = numbers[:, worst]
        reason = (
            f"residual {residual:.1e} (bound {self.bounds.residual:.1e}), "
            f"orthogonality {orthogonality:.1e} (bound {self.bounds.orthogonality:.1e})"
        )
        return of_batch(reason, int((~accepted).sum()), len(accepted), "matrices")

    def _excess(self, numbers: np.ndarray) -> np.ndarray:
        residual, orthogonality = numbers
        return np.maximum(residual / self.bounds.residual, orthogonality / self.bounds.orthogonality)

    def accept(self, numbers: np.ndarray) -> np.ndarray:
        """Which are accepted; none whose numbers are NaN."""
        residual, orthogonality = numbers
        return within((residual, self.bounds.residual), (orthogonality, self.bounds.orthogonality))
