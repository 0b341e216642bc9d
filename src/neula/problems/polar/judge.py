"""When polar factors are accepted, and which of several are best."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from neula.certificates.polar import PolarBounds, PolarNumbers
from neula.errors import of_batch
from neula.pipeline.chain import Answer, Verdict
from neula.pipeline.inputs import usable_members
from neula.problems.polar.problem import PolarMatrices, PolarOptions, PolarValues


@dataclass(frozen=True)
class PolarJudge:
    """Factors are accepted by residual, orthogonality, and the sign of H."""

    bounds: PolarBounds
    options: PolarOptions
    # Shape (batch, m, n): what was given: matrices that hold NaN or Inf are not tried again.
    batch: torch.Tensor

    @classmethod
    def for_batch(cls, batch: torch.Tensor, options: PolarOptions) -> PolarJudge:
        """The judge of a batch of matrices."""
        return cls(options.bounds(batch.shape), options, batch)

    @property
    def full(self) -> int:
        """The full rank."""
        return min(self.options.shape_of(self.batch.shape))

    def measure(self, problems: PolarMatrices, answer: Answer[PolarValues]) -> torch.Tensor:
        """Links have done it, since CUDA graphs play it back with the rest."""
        values = answer.values
        return torch.cat([values.rank.double()[:, None], values.measures], 1).T

    def numbers(self, measured: np.ndarray) -> PolarNumbers:
        """The measured numbers, by name."""
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
        reason = self.reason(found, int(np.lexsort(penalty[::-1])[-1]))
        reason = of_batch(reason, int((~accepted).sum()), len(accepted), "matrices")
        return Verdict(accepted, penalty, reason, accepted | ~usable_members(self.batch, found.residual))

    def reason(self, found: PolarNumbers, place: int) -> str:
        """The reason for one of the matrices."""
        bounds = self.bounds
        measured = (
            f"residual {found.residual[place]:.1e} (bound {bounds.residual:.1e}), "
            f"orthogonality {found.orthogonality[place]:.1e} (bound {bounds.orthogonality:.1e})"
        )
        indefinite = np.isfinite(found.residual[place]) and found.positive[place] != 1
        return measured + (", H is not positive semidefinite" if indefinite else "")
