"""The result of a linear system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from neula.pipeline.result import shown
from neula.pipeline.result.shown import ArrayT
from neula.pipeline.result.solution import SolutionResult


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
