"""When Cholesky factors are accepted, and which of several are best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from neula.certificates.cholesky import cholesky_bound
from neula.certificates.verdict import within
from neula.errors import of_batch
from neula.pipeline.chain import Answer, Verdict
from neula.problems.definite.problem import CholeskyOptions, CholeskyValues, Symmetric


@dataclass(frozen=True)
class CholeskyJudge:
    """Factors are accepted by their residual."""

    bound: float

    @classmethod
    def for_shape(cls, n: int, options: CholeskyOptions) -> CholeskyJudge:
        """The judge of factors of order n."""
        return cls(cholesky_bound(options.target, n))

    def accept(self, residual: Any) -> Any:
        """Whether factors are accepted by a residual, or those of an array; NaN where there is no factor."""
        return within((residual, self.bound))

    def measure(self, problems: Symmetric, answer: Answer[CholeskyValues]) -> torch.Tensor:
        """Residuals, and the orders of minors that are not positive: links have measured."""
        assert isinstance(answer.measured, torch.Tensor)
        return answer.measured

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
