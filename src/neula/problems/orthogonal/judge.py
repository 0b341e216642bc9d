"""When QR factors are accepted, and which of several are best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from neula.certificates.qr import certificate_of, certificates_of
from neula.certificates.qr_evidence import QRCertificate, QRCertificates
from neula.engines import Format
from neula.engines.reduction import HERE, Reduction
from neula.pipeline.chain import Answer, Run, Verdict
from neula.pipeline.inputs import usable_members
from neula.problems.orthogonal.problem import QRMatrices, QRValues


@dataclass(frozen=True)
class QRJudge:
    """Factors are accepted by residual and orthogonality, along random vectors and in the 2-norm."""

    shape: Sequence[int]  # of each matrix
    target: Format
    # Shape (batch, m, n): matrices that are factorized together, and may hold NaN or Inf: these are not tried
    # again.
    batch: torch.Tensor | None = None
    in_place: bool = False  # whether there is nothing but the last factors
    over_rows: Reduction = HERE

    def measure(self, problems: QRMatrices, answer: Answer[Any]) -> torch.Tensor:
        """Links have done it, since CUDA graphs play it back with the rest."""
        return answer.values.measures.T

    def certificates(self, run: Run[Any]) -> Sequence[QRCertificate]:
        """Certificates of the best factors."""
        found: Sequence[QRCertificate] | None = run.evidence
        dtype = run.found.measures.dtype
        return certificates_of(run.numbers, dtype, self.shape, self.target) if found is None else found

    def certificate(self, values: QRValues, numbers: np.ndarray | None = None) -> QRCertificate:
        """Certificate for a single matrix, without arrays of one number, which take longer than the
        numbers.
        """
        known = values.measures[0] if numbers is None else numbers[:, 0]
        found = certificate_of(known.tolist(), self.shape, self.target, measured_in=values.measures.dtype)
        if not found.doubtful:
            return found
        (norm,) = values.norms(np.ones(1, dtype=bool), found, self.over_rows)
        return replace(found, orthogonality_2norm=float(norm))

    def certificates_of_batch(self, values: QRValues, numbers: np.ndarray) -> QRCertificates:
        """Certificates for a batch, from the measured numbers, where estimates that are too large are
        replaced.
        """
        dtype = values.measures.dtype
        found = certificates_of(numbers, dtype, self.shape, self.target)
        if not found.doubtful.any():
            return found
        numbers[3, found.doubtful] = values.norms(found.doubtful, found, self.over_rows)
        return certificates_of(numbers, dtype, self.shape, self.target)

    def verdict(self, answer: Answer[Any], numbers: np.ndarray) -> Verdict:
        """Among factors that are not accepted, prefer the smallest error."""
        if self.batch is None:
            one = self.certificate(answer.values, numbers)
            numbers[3, 0] = one.orthogonality_2norm
            level = [[0.0], [0.0]] if self.in_place else [[not one.accepted], [one.error]]
            words = answer.doubt or one.in_words
            return Verdict(np.array([one.accepted]), np.array(level), words, evidence=[one])
        found = self.certificates_of_batch(answer.values, numbers)
        accepted = found.accepted
        penalty = np.array([~accepted, found.error])
        final = accepted | ~usable_members(self.batch, found.residual)
        return Verdict(accepted, penalty, found.in_words, final, found)
