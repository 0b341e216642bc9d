"""What is tried for Cholesky factors, cheapest first, and when they are accepted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from neula.certificates.cholesky import cholesky_bound
from neula.certificates.verdict import within
from neula.engines import FP32, FP64, Tuning
from neula.errors import of_batch
from neula.pipeline.chain import Answer, Link, Verdict
from neula.problems.definite.links import by_library, in_double, recursive
from neula.problems.definite.problem import CholeskyOptions, CholeskyValues, Symmetric


def chain(count: int, n: int, options: CholeskyOptions) -> list[Link[Symmetric, CholeskyValues]]:
    """What is tried for some matrices of order n together, or for a single one.

    The recursion, or tiles, where that takes less time than what the library does, else the library; at last
    the library in double precision, which alone says that a matrix is not positive definite.
    """
    low, tuning = options.low, options.tuning
    launches, tried = not tuning.lapack, []
    if low.format is FP64 and launches and count == 1 and n <= tuning.tiled_cholesky:
        tried.append(Link("cholesky fp64", in_double, launches_only=True))
    if low.format is not FP64 and _pays(count, n, tuning):
        tried.append(Link(f"cholesky {low.name}", partial(recursive, arithmetic=low), launches_only=launches))
    elif low.format is not FP64:
        tried.append(Link("cholesky fp32", partial(by_library, format=FP32), launches_only=launches))
    return [*tried, Link("cholesky fp64", partial(by_library, format=FP64))]


def _pays(count: int, n: int, tuning: Tuning) -> bool:
    """Whether anything beats the library in single precision."""
    if n < tuning.batched_cholesky:
        return False
    return count > 1 or n <= tuning.tiled_cholesky or n >= tuning.cholesky


def chain_unread(count: int, n: int, options: CholeskyOptions) -> list[Link[Symmetric, CholeskyValues]]:
    """The same where the first link is not to wait: in double precision without reading numbers."""
    links = chain(count, n, options)
    if links[0].launches_only or options.tuning.lapack:
        return links
    return [
        Link("cholesky fp64", partial(by_library, format=FP64, may_wait=False), launches_only=True),
        *links,
    ]


@dataclass(frozen=True)
class CholeskyJudge:
    """Factors are accepted by their residual.

    Attributes
    ----------
    bound : float
    """

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
        """Of factors that are not accepted those with the smallest residual are best."""
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
