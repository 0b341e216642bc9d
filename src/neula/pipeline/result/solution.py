"""What the results of linear systems and of least squares have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

from neula.pipeline.result import shown
from neula.pipeline.result.certified import CertifiedResult
from neula.pipeline.result.deferred import Deferrable
from neula.pipeline.result.shown import ArrayT


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SolutionResult(CertifiedResult, Generic[ArrayT]):
    """Solution of a problem ``A x = b``, or of a batch of them: a :class:`CertifiedResult`.

    Of a batch the single numbers are those of the worst problem; the arrays have one for each.

    Attributes
    ----------
    x : array, shape (*batch, n) or (*batch, n, k)
        The solution, in the library, on the device and in the dtype of the input.
    converged : bool
        Whether the measured backward error meets the accuracy asked for.
    iterations : int
        Solves with the factors that were computed, over all attempts; of problems that are solved together
        those of the slowest. On a GPU several are launched before the host reads their errors: all of these
        count, needed or not.
    backward_error : float
        Relative change of the data for which ``x`` is exact; the worst right-hand side counts.
    tolerance : float
        What ``backward_error`` was asked to be.
    condition : float
        Condition number of A with normalized columns, estimated. Of a batch the largest.
    forward_error : float
        Bound on ``||D (x - x*)|| / ||D x*||``, x* being the exact solution for A and b as they are stored and
        D the norms of the columns of A; the worst right-hand side counts.
    digits : float
        Decimal digits of x that rounding errors leave correct: the negative logarithm of ``forward_error``,
        at most as many as the dtype of x holds. Noise in A and b, which are taken as stored, does not count.
    history : tuple of float
        Backward errors on the way, first to last.
    accepted : array of bool, shape (*batch,)
        Whether each problem is solved to the accuracy asked for.
    backward_errors, conditions : array of float64, shape (*batch,)
    forward_errors : array of float64, shape (*batch,) or (*batch, k)
        Of each right-hand side.
    """

    x: ArrayT
    converged: bool
    iterations: int
    backward_error: float
    tolerance: float
    condition: float = math.nan
    forward_error: float = math.nan
    digits: float = 0.0
    history: tuple[float, ...] = ()
    accepted: Any = Deferrable(None)  # noqa: RUF009
    backward_errors: Any = Deferrable(None)  # noqa: RUF009
    conditions: Any = Deferrable(None)  # noqa: RUF009
    forward_errors: Any = Deferrable(None)  # noqa: RUF009
    _pending: Callable[[], Any] | None = None

    def _headline(self) -> str:
        """What is certified, in a line."""
        return f"{super()._headline()}{shown.members(self.accepted)}{self._remark()}"

    def _remark(self) -> str:
        """What the headline says behind the verdict."""
        return f", {shown.correct(self.digits)}"

    def _rows_with(self, method: str, more: dict[str, str]) -> shown.Rows:
        """What matters: the answer, how it came about, and how good it is, with more of the latter."""
        return {
            "x": shown.array(self.x),
            "method": shown.attempted(self.attempts, method),
            "iterations": f"{self.iterations}",
            "backward error": f"{self.backward_error:.1e}, at most {self.tolerance:.1e} asked for",
            "forward error": f"{self.forward_error:.1e}, condition number {self.condition:.1e}",
            **more,
            "time": f"{shown.duration(self.seconds)}, engine {self.engine}",
        }.items()
