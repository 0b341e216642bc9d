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
from neula.pipeline.inputs import finite_members
from neula.problems.orthogonal.problem import QRMatrices, QRValues


@dataclass(frozen=True)
class QRJudge:
    """Factors are accepted by residual and orthogonality, along random vectors and in the 2-norm.

    Attributes
    ----------
    shape : (int, int)
        Of each matrix.
    target : Format
    batch : Tensor, shape (batch, m, n), or None
        Matrices that are factorized together, and may hold NaN or Inf: these are not tried again.
    in_place : bool
        Whether there is nothing but the last factors.
    over_rows : Reduction
    """

    shape: Sequence[int]
    target: Format
    batch: torch.Tensor | None = None
    in_place: bool = False
    over_rows: Reduction = HERE

    def measure(self, problems: QRMatrices, answer: Answer[Any]) -> torch.Tensor:
        """Links have done it, since CUDA graphs play it back with the rest."""
        return answer.values.measures.T

    def certificates(self, run: Run[Any]) -> Sequence[QRCertificate]:
        """Those of the best factors."""
        found: Sequence[QRCertificate] | None = run.evidence
        return self._certificates(run.found, run.numbers) if found is None else found

    def _certificates(self, values: QRValues, numbers: np.ndarray) -> QRCertificates:
        return certificates_of(numbers, values.measures.dtype, self.shape, self.target)

    def verdict(self, answer: Answer[Any], numbers: np.ndarray) -> Verdict:
        """Of factors that are not accepted those with the smallest error are best."""
        if self.batch is None:
            return self._verdict_of_one(answer, numbers)
        found = self._certificates(answer.values, numbers)
        if found.doubtful.any():
            numbers[3, found.doubtful] = answer.values.norms(found.doubtful, found, self.over_rows)
            found = self._certificates(answer.values, numbers)
        accepted = found.accepted
        penalty = np.array([~accepted, found.error])
        return Verdict(accepted, penalty, found.in_words, accepted | ~self._usable(self.batch, found), found)

    def _verdict_of_one(self, answer: Answer[Any], numbers: np.ndarray) -> Verdict:
        """Without arrays of one number, which take longer than the numbers."""
        dtype = answer.values.measures.dtype
        found = certificate_of(numbers[:, 0].tolist(), self.shape, self.target, measured_in=dtype)
        if found.doubtful:
            (numbers[3, 0],) = answer.values.norms(np.ones(1, dtype=bool), found, self.over_rows)
            found = replace(found, orthogonality_2norm=float(numbers[3, 0]))
        penalty = [[0.0], [0.0]] if self.in_place else [[not found.accepted], [found.error]]
        words = answer.doubt or found.in_words
        return Verdict(np.array([found.accepted]), np.array(penalty), words, evidence=[found])

    def _usable(self, batch: torch.Tensor, found: QRCertificates) -> np.ndarray:
        """Which matrices hold neither NaN nor Inf; only those are read whose residual is not finite."""
        usable = np.isfinite(found.residual)
        doubtful = np.flatnonzero(~usable)
        if len(found) < len(batch):  # those that were are no longer tried
            usable[doubtful] = True
        elif len(doubtful) > 0:
            usable[doubtful] = finite_members(batch[torch.from_numpy(doubtful).to(batch.device)]).cpu()
        return usable
