"""Options of a polar decomposition, the matrices, and their measured factors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neula.algorithms.scaling import power_of_two_scales
from neula.certificates.polar import PolarBounds
from neula.engines import BF16, FP32, FP64, Engine, Format
from neula.engines.reduction import Reduction
from neula.kernels.magnitudes import largest_magnitude
from neula.pipeline.batches import Batch, Values
from neula.pipeline.progress import Progress

SIDES = ("right", "left")
"""Where H stands: ``A = U H`` or ``A = H U``."""


@dataclass(frozen=True)
class PolarOptions:
    """Options of a polar decomposition."""

    target: Format  # the format whose accuracy the factors are to have
    engine: Engine
    # Singular values of A up to this part of the largest are to become zero; those that the working precision
    # cannot tell from zero where it is None.
    rcond: float | None = None
    completion: bool = False  # whether all singular values are to become 1
    progress: Progress | None = None

    @property
    def work(self) -> Format:
        """The format in which factors are computed unless a cheaper one is accurate enough."""
        return FP64 if self.target is FP64 else FP32

    def cutoff(self, here: torch.Size) -> float:
        """Singular values up to this part of the largest count as zero.

        By default those that the roundings of elements may make, and in float64 those of the SVD.
        """
        default = self.work.u if self.work is FP32 else 2 * self.work.u * max(self.shape_of(here))
        return default if self.rcond is None else self.rcond

    @property
    def small_too(self) -> bool:
        """Whether it matters where small singular values end."""
        return self.target is not BF16 or self.completion or self.rcond is not None

    @property
    def over_rows(self) -> Reduction:
        """Reductions over the rows of a matrix."""
        return self.engine.over_rows

    def shape_of(self, here: torch.Size) -> tuple[int, int]:
        """Shape of a matrix of whose rows these are here."""
        return self.over_rows.count(here[-2]), here[-1]

    def bounds(self, here: torch.Size) -> PolarBounds:
        """Bounds on the errors, for matrices whose rows in this process have shape ``here``."""
        m, n = self.shape_of(here)
        return PolarBounds.for_shape(self.target, max(m, 1), max(n, 1))

    def lie_down(self, here: torch.Size) -> bool:
        """Whether matrices have at least as many columns as rows; over processes they have not."""
        return not self.over_rows.spread and here[-2] <= here[-1]

    def laid_down(self, a: torch.Tensor) -> torch.Tensor:
        """Matrices as they are, tall ones transposed."""
        return a if self.lie_down(a.shape) else a.mH

    def scales(self, a: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Powers of two by which elements of ``A A^H`` are near 1 at most: one a matrix, and one for all.

        Both at once may be out of range.

        Shapes: a (batch, m, n). Returns ``scales``, shape (batch,): in the dtype of A or of its parts, at
        least float32.
        """
        enough = torch.promote_types(a.dtype, torch.float32).to_real()
        largest = self.over_rows.largest(largest_magnitude(a, (1, 2)).to(enough))
        length = max(self.shape_of(a.shape))
        return power_of_two_scales(largest), 2.0 ** -((length.bit_length() - 1) // 2)


@dataclass(frozen=True)
class PolarMatrices(Batch):
    """A batch of matrices as given."""

    a: torch.Tensor  # shape (batch, m, n)
    options: PolarOptions


@dataclass(frozen=True)
class PolarValues(Values):
    """Factors, and what was measured of them."""

    u: torch.Tensor  # shape (batch, m, n): in working precision
    # Shape (batch,): int64: singular values that became 1; -1 where what is measured says it.
    rank: torch.Tensor
    measures: torch.Tensor  # shape (batch, numbers): as in neula.certificates.polar.polar_measures
