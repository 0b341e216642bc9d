"""When solutions within bounds are accepted, and which of several is best."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from neula.certificates.verdict import Evidence, Limits, within
from neula.errors import of_batch
from neula.pipeline.chain import Answer, Verdict
from neula.problems.bounded.problem import BoundedProblems, BoundedValues, in_words


@dataclass(frozen=True)
class BoundedJudge:
    """Solutions are accepted by backward error, which no other link improves then, and forward error."""

    limits: Limits

    def measure(self, problems: BoundedProblems, answer: Answer[BoundedValues]) -> torch.Tensor:
        """Backward and forward errors and condition numbers."""
        return answer.values.measured()

    def verdict(self, answer: Answer[BoundedValues], numbers: np.ndarray) -> Verdict:
        """Among solutions that are not accepted, prefer the smallest backward error."""
        backward, forward, condition = numbers
        bound = self.limits.backward_error
        optimal, evidence = within((backward, bound)), Evidence.from_errors(backward, forward)
        accepted = self.limits.accept(evidence)
        error = np.where(np.isnan(backward), np.inf, np.maximum(backward, bound))
        worst = backward.max(initial=0.0), forward.max(initial=0.0), condition.max(initial=1.0)
        reason = in_words(bound, *worst)
        reason = of_batch(reason, int((~accepted).sum()), len(accepted), "problems")
        return Verdict(accepted, np.array([~optimal, error, forward]), reason, optimal)
