"""The result of a linear system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from neula.pipeline.result import shown
from neula.pipeline.result.shown import ArrayT
from neula.pipeline.result.solution import SolutionResult


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SolveResult(SolutionResult[ArrayT], Generic[ArrayT]):
    """Solution of a linear system, or of a batch of them: a :class:`SolutionResult`, and how it was found.

    The backward error is ``||b - A x|| / (||A|| ||x|| + ||b||)`` in the infinity norm, of A as it was given
    and, where it is badly scaled, with its rows and columns scaled: the larger one. The history has the
    largest one after every step of refinement, of which the first is a solve with the factors; of a batch
    that was solved together the largest of all, else of the worst.

    Attributes
    ----------
    growth : float
        Largest element of U, relative to that of the scaled A: by how much elimination magnified errors.
    method : str
        What the accepted attempt did, e.g. ``"rbt + lu fp32 + gmres"``.
    """

    growth: float
    method: str = ""

    def _rows(self) -> shown.Rows:
        """What matters: the answer, how it came about, and how good it is."""
        return self._rows_with(self.method, {"growth": f"{self.growth:.2g}"})
