"""What is tried for least squares with bounds, and when solutions are accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from neula.algorithms.bounded.free_sets import Factorize, by_cholesky, by_householder
from neula.certificates.verdict import Evidence, Limits, within
from neula.errors import of_batch
from neula.pipeline.chain import Answer, Link, Verdict
from neula.problems.bounded import links
from neula.problems.bounded.problem import LABEL, BoundedProblems, BoundedValues, in_words

Chain = list[Link[BoundedProblems, BoundedValues]]


def chain(m: int, n: int) -> Chain:
    """What is tried for matrices of a shape.

    Block pivoting takes a few exchanges, but columns have to be independent, and those of a wide matrix are
    not. The active-set method always ends. Parts of a Gram matrix do for condition numbers up to 1e5.
    """
    tried = []
    if m >= n:
        tried.append(_link(LABEL, links.by_block_pivoting, by_cholesky))
        tried.append(_link("block pivoting householder", links.by_block_pivoting, by_householder))
    else:
        tried.append(_link("active set cholesky", links.by_active_set, by_cholesky))
    return [*tried, _link("active set householder", links.by_active_set, by_householder, improves=True)]


def _link(
    label: str,
    answer: Callable[..., Answer[BoundedValues]],
    factorize: Factorize,
    *,
    improves: bool = False,
) -> Link[BoundedProblems, BoundedValues]:
    return Link(label, partial(answer, label=label, factorize=factorize), improves=improves)


@dataclass(frozen=True)
class BoundedJudge:
    """Solutions are accepted by backward error, which no other link improves then, and forward error.

    Attributes
    ----------
    limits : Limits
    """

    limits: Limits

    def measure(self, problems: BoundedProblems, answer: Answer[BoundedValues]) -> torch.Tensor:
        """Backward and forward errors and condition numbers."""
        return answer.values.measured()

    def verdict(self, answer: Answer[BoundedValues], numbers: np.ndarray) -> Verdict:
        """Of solutions that are not accepted those with the smallest backward error are best."""
        backward, forward, condition = numbers
        bound = self.limits.backward_error
        optimal, evidence = within((backward, bound)), Evidence.from_errors(backward, forward)
        accepted = self.limits.accept(evidence)
        error = np.where(np.isnan(backward), np.inf, np.maximum(backward, bound))
        worst = backward.max(initial=0.0), forward.max(initial=0.0), condition.max(initial=1.0)
        reason = in_words(bound, *worst)
        reason = of_batch(reason, int((~accepted).sum()), len(accepted), "problems")
        return Verdict(accepted, np.array([~optimal, error, forward]), reason, optimal)
