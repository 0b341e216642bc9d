"""When a solution of linear systems is accepted, and which of several is best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from neula.certificates.forward_error import SURE
from neula.certificates.verdict import Evidence, Limits
from neula.errors import of_batch
from neula.pipeline.chain import Answer, Verdict
from neula.problems.systems.problem import Systems, SystemsOptions, SystemsSolutions, in_words
from neula.problems.systems.system import EquilibratedSystem

LIBRARY = "lu fp64 with pivoting", "lu fp32 with pivoting", "cholesky fp64"
"""Factors of the library, which are as good as others: what they leave, others do."""


@dataclass(frozen=True)
class SystemsJudge:
    """Solutions are accepted by backward error, forward error and residual."""

    limits: Limits
    # Whether better factors may help a solution with a small backward error and no guaranteed digit.
    improves: bool = True

    @classmethod
    def for_shape(cls, n: int, options: SystemsOptions, *, improves: bool = True) -> SystemsJudge:
        """The judge of systems of order n."""
        return cls(options.limits(n), improves)

    def measure(
        self, problems: Systems | EquilibratedSystem, answer: Answer[SystemsSolutions]
    ) -> torch.Tensor:
        """The numbers called :attr:`SystemsSolutions.names`, for each system."""
        return answer.values.measured()

    def settled(self, largest: Sequence[float]) -> bool:
        """Whether all are accepted, from the largest of each number that was measured."""
        return bool(self.limits.accept(Evidence.from_numbers(largest)))

    def verdict(self, answer: Answer[SystemsSolutions], numbers: np.ndarray) -> Verdict:
        """Among solutions with a small enough residual, prefer the one with the most digits."""
        of = dict(zip(SystemsSolutions.names, numbers, strict=True))
        error, forward, growth = of["refined_error"], of["forward_error"], of["growth"]
        evidence, bound = Evidence.from_numbers(numbers), self.limits.backward_error
        accepted = self.limits.accept(evidence) & (not answer.doubt)
        penalty = np.array([~accepted, np.maximum(error, bound), forward])
        if answer.again:  # the next link replaces it
            penalty[:, ~accepted] = np.inf
        improves = self.improves or answer.again or answer.label not in LIBRARY
        # Other factors do not reach more digits where residuals in twice the working precision do not.
        enough = replace(self.limits, forward_error=SURE).accept(evidence) & (not answer.doubt)
        final = enough if improves else enough | (error <= bound)
        worst = int(np.lexsort(penalty[::-1])[-1])  # NaN comes last
        reason = in_words(error[worst], bound, forward.max(), answer.iterations, growth[worst])
        reason = ", ".join(filter(None, [reason, answer.doubt]))
        reason = of_batch(reason, int((~accepted).sum()), len(accepted), "systems")
        return Verdict(accepted, penalty, reason, final)
