"""Options of a low-rank approximation, the matrix, and its measured singular triplets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from neula.certificates.bounds import measurement_error, orthogonality_bound, residual_bound
from neula.certificates.low_rank import SVDCertificate
from neula.engines import BF16, FP16, Engine
from neula.pipeline.batches import Batch, Values
from neula.pipeline.call import ProblemOptions
from neula.pipeline.chain import Answer, Verdict


@dataclass(frozen=True)
class SVDOptions(ProblemOptions):
    # Largest error of each singular value and its vectors, as a part of it, if that was requested instead of
    # the accuracy of a format; that is then one which is accurate enough.
    part: float | None = None
    rank: int | None = None
    tol: float | None = None
    algorithm: str | None = None

    @property
    def low(self) -> str:
        """Cheapest arithmetic to look for subspaces in."""
        # They are of second order in the errors of what comes of them, and these are measured in
        # :attr:`work`.
        coarse = self.target in (FP16, BF16) or (self.part is not None and self.part >= FP16.u)
        return self.engine.tuning.cheapest(FP16 if coarse else self.work)

    @property
    def exact(self) -> Engine:
        return self.engine.using(self.work)

    def bound(self, m: int, n: int) -> float:
        return self.rounding(m, n) if self.part is None else self.part

    def orthogonality_bound(self, m: int, n: int) -> float:
        return orthogonality_bound(self.target, n) + measurement_error(m, self.work.dtype)

    def weights(self, s: torch.Tensor, norm: float | torch.Tensor, m: int, n: int) -> torch.Tensor:
        """Divisors that make errors of triplets comparable with :meth:`bound`: above zero. The norms of a
        batch have shape (batch, 1).
        """
        norm = torch.as_tensor(norm, dtype=s.dtype, device=s.device)
        norm = torch.where(norm == 0, 1.0, norm)
        if self.part is None:
            return norm.expand_as(s)
        return s + norm * self.rounding(m, n) / self.part

    def rounding(self, m: int, n: int) -> float:
        """Bound on rounding errors of the target format, relative to ``||A||_F``."""
        return residual_bound(self.target, n) + measurement_error(m, torch.float64)


@dataclass(frozen=True)
class SVDValues(Values):
    u: torch.Tensor  # shape (1, m, k)
    s: torch.Tensor  # shape (1, k): descending, float64
    v: torch.Tensor  # shape (1, n, k)
    errors: torch.Tensor  # shape (1, k): bounds on the errors of s, float64
    # Shape (1,): estimate of ||A - U diag(s) V^T||_F, float64; NaN where there is none.
    remainder: torch.Tensor
    measures: torch.Tensor  # shape (1, 3): those of neula.certificates.low_rank.SVDCertificate


@dataclass(frozen=True)
class TallMatrix(Batch):
    # Shape (1, m, n), m >= n: in working precision, in a range where squares neither overflow nor underflow.
    a: torch.Tensor
    norm: float  # ||A||_F
    # By how much it differs from the matrix that was given, in the same norm: singular values, and what
    # triplets leave, differ by no more.
    rounded: float
    options: SVDOptions


@dataclass(frozen=True)
class SVDJudge:
    """Triplets are accepted by residual, orthogonality, and what may have been missed."""

    bound: float
    orthogonality_bound: float

    @classmethod
    def for_shape(cls, m: int, n: int, options: SVDOptions) -> SVDJudge:
        return cls(options.bound(m, n), options.orthogonality_bound(m, n))

    def accept(self, numbers: np.ndarray) -> np.ndarray:
        """Whether the triplets of each matrix are accepted."""
        return self._measured(numbers).accepted

    def certificate(self, numbers: np.ndarray) -> SVDCertificate:
        return self._measured(numbers[:, 0].tolist())

    def _measured(self, numbers: Sequence[Any] | np.ndarray) -> SVDCertificate:
        residual, orthogonality, missed = numbers
        return SVDCertificate(residual, orthogonality, missed, self.bound, self.orthogonality_bound)

    def verdict(self, answer: Answer[SVDValues], numbers: np.ndarray) -> Verdict:
        """Among triplets that are not accepted, prefer those that exceed their bounds least."""
        found = self.certificate(numbers)
        penalty = np.array([[not found.accepted], [max(found.excess)]])
        return Verdict(np.array([found.accepted]), penalty, str(found))
