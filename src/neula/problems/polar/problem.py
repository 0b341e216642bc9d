"""Options of a polar decomposition, the matrices, and their measured factors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from neula.algorithms.scaling import power_of_two_scales
from neula.certificates.polar import PolarBounds, PolarNumbers
from neula.engines import BF16, FP32
from neula.errors import of_batch
from neula.kernels.magnitudes import largest_magnitude
from neula.pipeline.batches import Batch, Values
from neula.pipeline.call import ProblemOptions
from neula.pipeline.chain import Answer, Verdict, worst_of
from neula.pipeline.inputs import usable_members

SIDES = ("right", "left")  # where H stands: ``A = U H`` or ``A = H U``


@dataclass(frozen=True)
class PolarOptions(ProblemOptions):
    # Singular values of A up to this part of the largest are to become zero; those that the working precision
    # cannot tell from zero where it is None.
    rcond: float | None = None
    completion: bool = False  # whether all singular values are to become 1

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
    a: torch.Tensor  # shape (batch, m, n)
    options: PolarOptions


@dataclass(frozen=True)
class PolarValues(Values):
    u: torch.Tensor  # shape (batch, m, n): in working precision
    # Shape (batch,): int64: singular values that became 1; -1 where what is measured says it.
    rank: torch.Tensor
    measures: torch.Tensor  # shape (batch, numbers): as in neula.certificates.polar.polar_measures

    def measured(self) -> torch.Tensor:
        return torch.cat([self.rank.double()[:, None], self.measures], 1).T


@dataclass(frozen=True)
class PolarJudge:
    bounds: PolarBounds
    options: PolarOptions
    # Shape (batch, m, n): what was given: matrices that hold NaN or Inf are not tried again.
    batch: torch.Tensor

    @classmethod
    def for_batch(cls, batch: torch.Tensor, options: PolarOptions) -> PolarJudge:
        return cls(options.bounds(batch.shape), options, batch)

    @property
    def full(self) -> int:
        return min(self.options.shape_of(self.batch.shape))

    def numbers(self, measured: np.ndarray) -> PolarNumbers:
        return PolarNumbers(*measured[1:])

    def ranks(self, measured: np.ndarray) -> np.ndarray:
        """How many singular values became 1: what a link has counted, or what was measured."""
        ranks = self.numbers(measured).ranks(self.bounds, self.full)
        return np.where(measured[0] >= 0, measured[0], ranks).astype(np.int64)

    def verdict(self, answer: Answer[PolarValues], numbers: np.ndarray) -> Verdict:
        """Among factors that are not accepted, prefer those that exceed their bounds least."""
        found, bounds = self.numbers(numbers), self.bounds
        # Dropped singular values are a part of A - U H.
        missing = np.where(numbers[0] >= 0, self.full - numbers[0], 0.0)
        cut_off = self.options.cutoff(self.batch.shape) * np.sqrt(missing)
        accepted = found.accepted_by(bounds, cut_off)
        residual_bound = bounds.residual + cut_off
        excess = np.maximum(found.residual / residual_bound, found.orthogonality / bounds.orthogonality)
        penalty = np.array([~accepted, np.nan_to_num(excess, nan=np.inf)])
        reason = self.reason(found, worst_of(penalty))
        reason = of_batch(reason, int((~accepted).sum()), len(accepted), "matrices")
        return Verdict(accepted, penalty, reason, accepted | ~usable_members(self.batch, found.residual))

    def reason(self, found: PolarNumbers, place: int) -> str:
        bounds = self.bounds
        measured = (
            f"residual {found.residual[place]:.1e} (bound {bounds.residual:.1e}), "
            f"orthogonality {found.orthogonality[place]:.1e} (bound {bounds.orthogonality:.1e})"
        )
        indefinite = np.isfinite(found.residual[place]) and found.positive[place] != 1
        return measured + (", H is not positive semidefinite" if indefinite else "")
