"""Options of a Cholesky factorization, the matrices, and their measured factors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch

from neula.certificates.cholesky import cholesky_bound
from neula.certificates.verdict import within
from neula.engines import FP64, Arithmetic
from neula.errors import of_batch
from neula.pipeline.batches import Batch, Values
from neula.pipeline.call import ProblemOptions
from neula.pipeline.chain import Answer, Verdict


@dataclass(frozen=True)
class CholeskyOptions(ProblemOptions):
    jitter: bool = False  # whether to add to the diagonals of matrices that are not definite

    @cached_property
    def low(self) -> Arithmetic:
        """The cheapest arithmetic that reaches the target; where LAPACK is the fastest, at least float32."""
        if self.tuning.lapack:
            return Arithmetic.named("fp64" if self.target is FP64 else "fp32")
        return Arithmetic.named(self.tuning.cheapest(self.target))


@dataclass(frozen=True)
class Symmetric(Batch):
    a: torch.Tensor  # shape (batch, n, n): only the lower triangles count
    options: CholeskyOptions
    # Shape (batch,): where each is in what the user gave; None for all of these.
    place: torch.Tensor | None = None

    def at(self, places: torch.Tensor) -> Self:
        return replace(self, a=self.a[places], place=places if self.place is None else self.place[places])


@dataclass(frozen=True)
class CholeskyValues(Values):
    lower: torch.Tensor  # shape (batch, n, n): in the dtype of A
    # Shape (batch,): as in neula.certificates.cholesky.residuals_of_triangles; NaN where there is no factor.
    residual: torch.Tensor


@dataclass(frozen=True)
class CholeskyJudge:
    bound: float

    @classmethod
    def for_shape(cls, n: int, options: CholeskyOptions) -> CholeskyJudge:
        return cls(cholesky_bound(options.target, n))

    def accept(self, residual: Any) -> Any:
        """Whether factors are accepted by a residual, or those of an array; NaN where there is no factor."""
        return within((residual, self.bound))

    def verdict(self, answer: Answer[CholeskyValues], numbers: np.ndarray) -> Verdict:
        """Among factors that are not accepted, prefer the smallest residual."""
        residual, order = numbers
        accepted = self.accept(residual)
        penalty = np.array([~accepted, order != 0, residual])
        worst = int(residual.argmax())  # NaN is the largest
        if order[worst]:
            reason = f"the leading minor of order {int(order[worst])} is not positive"
        else:
            reason = f"residual {residual[worst]:.1e} (bound {self.bound:.1e})"
        reason = of_batch(reason, int((~accepted).sum()), len(accepted), "matrices")
        return Verdict(accepted, penalty, reason)
