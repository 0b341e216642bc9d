"""When singular triplets are accepted, and which of several are best."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from neula.certificates.low_rank import SVDCertificate
from neula.pipeline.chain import Answer, Verdict
from neula.problems.low_rank.problem import SVDOptions, SVDValues


@dataclass(frozen=True)
class SVDJudge:
    """Triplets are accepted by residual, orthogonality, and what may have been missed."""

    bound: float
    orthogonality_bound: float

    @classmethod
    def for_shape(cls, m: int, n: int, options: SVDOptions) -> SVDJudge:
        """The judge of triplets of a matrix of this shape."""
        return cls(options.bound(m, n), options.orthogonality_bound(m, n))

    def measure(self, problems: object, answer: Answer[SVDValues]) -> torch.Tensor:
        """Links have done it, since iterations stop by what is measured."""
        return answer.values.measures.T

    def certificate(self, numbers: np.ndarray) -> SVDCertificate:
        """The certificate for the measured numbers."""
        residual, orthogonality, missed = numbers[:, 0].tolist()
        return SVDCertificate(residual, orthogonality, missed, self.bound, self.orthogonality_bound)

    def verdict(self, answer: Answer[SVDValues], numbers: np.ndarray) -> Verdict:
        """Among triplets that are not accepted, prefer those that exceed their bounds least."""
        found = self.certificate(numbers)
        penalty = np.array([[not found.accepted], [max(found.excess)]])
        return Verdict(np.array([found.accepted]), penalty, str(found))
