"""When a solution of a least-squares problem is accepted, and which of several is best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from neula.certificates.forward_error import SURE
from neula.certificates.verdict import Evidence, Limits
from neula.errors import counted
from neula.pipeline.chain import Answer, Verdict
from neula.problems.least_squares.minimum_norm import NO_GAP
from neula.problems.least_squares.problem import LeastSquaresOptions, LeastSquaresSolutions, in_words

SVD = "svd fp64"
"""Label of the link that has the last word."""


@dataclass(frozen=True)
class LeastSquaresJudge:
    """Solutions are accepted by their evidence; of links that found some, which one is best."""

    limits: Limits
    enough: float  # forward error up to which no other link is tried, even if more digits were requested
    together: bool  # whether problems were solved together

    @classmethod
    def for_shape(cls, m: int, n: int, options: LeastSquaresOptions, *, together: bool) -> LeastSquaresJudge:
        """The judge of problems of one shape."""
        # Links for one problem refine as far as can be.
        enough = options.first_error(m, n) if together else SURE
        return cls(options.limits((m, n)), enough, together)

    def measure(self, problems: object, answer: Answer[LeastSquaresSolutions]) -> torch.Tensor:
        """The numbers called :attr:`LeastSquaresSolutions.names`, for each problem."""
        return answer.values.measured()

    def settled(self, largest: Sequence[float]) -> bool:
        """Whether all are accepted, and none is zero, from the largest of each number that was measured."""
        evidence, zero = Evidence.from_numbers(largest), largest[LeastSquaresSolutions.names.index("zero")]
        return bool(self.limits.accept(evidence) and evidence.forward_error <= self.enough and zero == 0)

    def verdict(self, answer: Answer[LeastSquaresSolutions], numbers: np.ndarray) -> Verdict:
        """Among solutions with a small enough backward error, prefer the one with the most digits.

        The SVD improves what was found before, and has the last word.
        """
        of, evidence = (
            dict(zip(LeastSquaresSolutions.names, numbers, strict=True)),
            Evidence.from_numbers(numbers),
        )
        accepted = self.limits.accept(evidence) & (not answer.doubt)
        enough = replace(self.limits, forward_error=self.enough).accept(evidence) & (not answer.doubt)
        superseded = np.full_like(of["doubtful"], answer.label != SVD)
        error = np.maximum(of["refined_error"], self.limits.backward_error)
        penalty = np.array([~accepted, superseded, error, of["forward_error"]])
        reason = (
            self._of_batch(of, accepted, len(answer.values)) if self.together else self._of_one(of, answer)
        )
        settled = answer.judged or answer.label.endswith(NO_GAP)
        return Verdict(accepted, penalty, reason, enough | settled)

    def _of_batch(self, of: dict[str, np.ndarray], accepted: np.ndarray, count: int) -> str:
        error = of["backward_error"]
        missed, doubtful = int((~accepted).sum()), int((error[~accepted] <= self.limits.backward_error).sum())
        return self.reason(error.max(), of["forward_error"].max(), count, missed, doubtful)

    def reason(self, error: float, forward: float, count: int, missed: int = 0, doubtful: int = 0) -> str:
        """The largest backward and forward errors in words, of problems some of which may be rejected."""
        worst = in_words(self.limits.backward_error, error, forward)
        if count == 1:
            return worst + (", its rank or digits in doubt" if doubtful else "")
        doubts = f"{doubtful} for doubts about their rank or digits"
        return f"{missed} of {count} problems rejected, {doubts}; the worst: {worst}"

    def _of_one(self, of: dict[str, np.ndarray], answer: Answer[LeastSquaresSolutions]) -> str:
        forward = f"forward error {of['forward_error'][0]:.1e}"
        if answer.label == SVD:
            error, rank, condition = (of[name][0] for name in ("backward_error", "rank", "condition"))
            known = f"{forward}, rank {rank:.0f}, condition number {condition:.1e}"
            doubt = f", {answer.doubt}" if answer.doubt else ""
        else:
            error, known = of["refined_error"][0], f"{forward}, {counted(answer.iterations, 'iteration')}"
            doubt = f"; {answer.doubt}" if answer.doubt else ""
        return f"backward error {error:.1e} (bound {self.limits.backward_error:.1e}), {known}{doubt}"
