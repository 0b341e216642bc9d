"""The verdict on solutions. Links measure and do not decide. Their measurements are an :class:`Evidence`,
whose fields are 0 at best. A solution is accepted if each of them is at most its limit, so that the verdict
is monotone: worse evidence is never accepted where better evidence is not, and of a batch the largest of
each number decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import starmap
from operator import and_, le
from typing import Any, Generic, NamedTuple

import numpy as np
import torch

from neula.certificates.residuals import X
from neula.engines import FP64

NEARLY = 1.2
"""By how much singular values of an R may exceed those of A if ``||I - Q^T Q|| <= 1/4``, the largest norm
that is refined with: ``1 / sqrt(3/4) = 1.155``."""


class Evidence(NamedTuple, Generic[X]):
    """Measured quality of a solution; with several right-hand sides, the largest of each number."""

    # 1 if something forbids any use of the solution: an ambiguous rank, factors that may be those of another
    # matrix, numbers out of range, a refinement that was not ended; else 0.
    doubtful: X
    residual: X  # ||b - A x|| / ||b|| for x as it is returned, from above; 0 for 0/0
    refined_error: X  # backward error before x was rounded to its dtype
    backward_error: X  # of x as it is returned
    forward_error: X  # bound by one of the functions of neula.certificates.forward_error
    # Condition number of A with columns of norm 1: proven, or three times an estimate; 0 if singular values
    # have decided the rank, which then need not be full.
    condition_bound: X

    @classmethod
    def from_numbers(cls, numbers: Sequence[Any] | np.ndarray | torch.Tensor) -> Evidence[Any]:
        """The first of several numbers, arrays or tensors."""
        return cls(*numbers[: len(cls._fields)])

    @classmethod
    def from_errors(cls, backward_error: Any, forward_error: Any, doubtful: Any = 0.0) -> Evidence[Any]:
        """Evidence where residuals may exceed b, and a forward error says that the rank is known."""
        nothing: Any = 0.0
        return cls(doubtful, nothing, backward_error, backward_error, forward_error, nothing)


@dataclass(frozen=True)
class Limits:
    """Upper limits of the numbers of :class:`Evidence`.

    >>> limits = Limits.for_shape((3, 2), 1e-15, 0.1, rcond=2.0**-52)
    >>> sound = Evidence(0.0, 0.5, 1e-16, 1e-16, 1e-15, 10.0)
    >>> limits.accept(sound), limits.accept(sound._replace(forward_error=math.nan))
    (True, False)
    """

    backward_error: float  # of both backward errors
    forward_error: float
    residual: float  # 1, which is that of x = 0, and rounding errors
    # Up to this condition number full rank is certain: 1 / (1.2 (rcond + max(m, n) u)).
    condition: float = math.inf

    @classmethod
    def for_shape(
        cls, shape: Sequence[int], backward_error: float, forward_error: float, rcond: float | None = None
    ) -> Limits:
        """The limits for a matrix of m rows, those of damping included, and n columns. Singular values up to
        ``rcond`` times the largest one count as zero; rounding errors move them by ``max(m, n) u`` of it.
        Without it full rank is not asked for: an x with a forward error has one.
        """
        return _limits(*shape[-2:], backward_error, forward_error, rcond)

    def accept(self, evidence: Evidence[Any]) -> Any:
        """Whether solutions are accepted, as the numbers of the evidence are one or many: NaN never is."""
        return within(
            (evidence.doubtful, 0.0),
            (evidence.residual, self.residual),
            (evidence.refined_error, self.backward_error),
            (evidence.backward_error, self.backward_error),
            (evidence.forward_error, self.forward_error),
            (evidence.condition_bound, self.condition),
        )

    def accurate(self, evidence: Evidence[Any]) -> Any:
        """Whether backward errors suffice, whatever the others of these numbers are."""
        return within(*((error, self.backward_error) for error in evidence[2:4]))

    def full_rank(self, condition_bound: Any) -> Any:
        """Whether full rank is certain: for ways that give up early, or that measure nothing else."""
        return within((condition_bound, self.condition))


def within(*measures: tuple[Any, Any]) -> Any:
    """Whether all measures are at most their limits: NaN never is.

    >>> within((0.1, 2.0), (0.1, 3.0)), within((0.1, 2.0), (math.nan, 3.0))
    (True, False)
    """
    return reduce(and_, starmap(le, measures))


@lru_cache(maxsize=256)
def _limits(m: int, n: int, backward_error: float, forward_error: float, rcond: float | None) -> Limits:
    """Cached: every call needs limits, and most calls have the shape of the one before."""
    count = n if rcond is None else m + n
    condition = math.inf if rcond is None else 1 / (NEARLY * (rcond + max(m, n) * FP64.u))
    return Limits(backward_error, forward_error, 1 + count * FP64.u, condition)
