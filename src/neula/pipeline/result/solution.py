"""Fields that the results of linear systems and least squares share."""

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
    """Solution of a problem ``A x = b``, or of a batch: a :class:`CertifiedResult`.

    For a batch, scalars describe the worst problem, and arrays have one entry a problem.

    Attributes
    ----------
    x : array, shape (*batch, n) or (*batch, n, k)
        The solution, in the library, on the device and in the dtype of the input.
    converged : bool
        Whether the measured backward error meets the requested accuracy.
    iterations : int
        Refinement steps, over all attempts; for problems solved together those of the slowest. On a GPU
        several steps are launched before the host reads their errors, and all of these count.
    backward_error : float
        Relative change of the data for which ``x`` is exact; the worst right-hand side counts.
    tolerance : float
        Largest accepted ``backward_error``.
    condition : float
        Condition number of A with normalized columns, estimated. Of a batch the largest.
    forward_error : float
        Bound on ``||D (x - x*)|| / ||D x*||``, where x* is the exact solution for A and b as stored and D
        holds the column norms of A; the worst right-hand side counts.
    digits : float
        Guaranteed correct decimal digits of x: ``-log10(forward_error)``, at most as many as the dtype of x
        holds. Noise in A and b, which are taken as stored, is not counted.
    history : tuple of float
        Backward errors during refinement, first to last.
    accepted : array of bool, shape (*batch,)
        Whether each problem is solved to the requested accuracy.
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
        return f"{super()._headline()}{shown.members(self.accepted)}{self._remark()}"

    def _remark(self) -> str:
        """End of the first line, after the verdict."""
        return f", {shown.correct(self.digits)}"

    def _rows_with(self, method: str, more: dict[str, str]) -> shown.Rows:
        """Lines of the printed result, with further evidence in ``more``."""
        return {
            "x": shown.array(self.x),
            "method": shown.attempted(self.attempts, method),
            "iterations": f"{self.iterations}",
            "backward error": f"{self.backward_error:.1e} (tolerance {self.tolerance:.1e})",
            "forward error": f"{self.forward_error:.1e}, condition number {self.condition:.1e}",
            **more,
            "time": f"{shown.duration(self.seconds)}, engine {self.engine}",
        }.items()


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SolveResult(SolutionResult[ArrayT], Generic[ArrayT]):
    """Solution of a linear system, or of a batch: a :class:`SolutionResult`.

    The backward error is ``||b - A x|| / (||A|| ||x|| + ||b||)`` in the infinity norm, for A as given and, if
    it is badly scaled, with scaled rows and columns; the larger one counts. ``history`` has it after every
    step of refinement, the first of which is a solve with the factors; for a batch solved together the
    largest of all systems, else that of the worst.

    Attributes
    ----------
    growth : float
        Largest element of U, relative to that of the scaled A: by how much elimination magnified errors.
    method : str
        Method of the accepted attempt, e.g. ``"rbt + lu fp32 + gmres"``.
    """

    growth: float
    method: str = ""

    def _rows(self) -> shown.Rows:
        return self._rows_with(self.method, {"growth": f"{self.growth:.2g}"})
