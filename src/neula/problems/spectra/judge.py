"""When eigenvalues, singular values and their vectors are accepted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from neula.certificates.spectra import SpectralBounds
from neula.certificates.verdict import within
from neula.errors import of_batch
from neula.pipeline.chain import Answer, Verdict
from neula.problems.spectra.problem import SpectralValues


@dataclass(frozen=True)
class SpectralJudge:
    """Decompositions are accepted by residual and orthogonality."""

    bounds: SpectralBounds

    def measure(self, problems: object, answer: Answer[SpectralValues]) -> torch.Tensor:
        """Links have measured."""
        assert isinstance(answer.measured, torch.Tensor)
        return answer.measured

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
        excess: np.ndarray = np.maximum(
            residual / self.bounds.residual, orthogonality / self.bounds.orthogonality
        )
        return excess

    def accept(self, numbers: np.ndarray) -> np.ndarray:
        """Which are accepted; none whose numbers are NaN."""
        residual, orthogonality = numbers
        accepted: np.ndarray = within(
            (residual, self.bounds.residual), (orthogonality, self.bounds.orthogonality)
        )
        return accepted
