"""The result of a least-squares problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from neula.pipeline.result import shown
from neula.pipeline.result.deferred import Deferrable
from neula.pipeline.result.regression import Regression
from neula.pipeline.result.shown import ArrayT
from neula.pipeline.result.solution import SolutionResult


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LstsqResult(SolutionResult[ArrayT], Regression, Generic[ArrayT]):
    """Solution of a least-squares problem, or of a batch: a :class:`SolutionResult` with the numerical rank.

    Below full rank, measured errors refer to the problem of the numerical rank. Problems of a batch that hold
    NaN or Inf have a solution of NaN. The backward error is an upper bound (with a low-precision R one of its
    terms is an estimate); ``history`` has it at every restart, and is empty if all problems were solved
    together.

    Attributes
    ----------
    optimality : float
        ``||A^T r|| / (||A|| ||r||)`` in the column-scaled matrix; the worst right-hand side counts.
    residual_norm : float or list of float
        ``||b - A x||`` of each right-hand side, flattened (with damping and weights, of the augmented
        problem).
    rank : int
        Numerical rank of ``A``, with damping of the stacked matrix; where it is below the largest possible
        one, the minimum-norm solution was computed. Of a batch the smallest of those that were solved.
    full_rank : int
        Largest possible rank; 0 if it was not determined.
    factorization : str
        Method of the accepted attempt, e.g. ``"rgsqrf fp16 + cgls"``.
    constraint_error : float
        With constraints the largest ``|C x - d|`` of a row relative to ``|C| |x| + |d|``, with absolute
        values of all elements; of the worst right-hand side.
    constraint_rank : int or None
        With constraints, the numerical rank of C; there is a warning if C as stored has a larger one.
        Otherwise None.
    ranks : array of int64, shape (*batch,)
        0 where a problem holds NaN or Inf.
    passes : int
        How often A was read, if it was read in blocks; 0 if it was in memory.
    """

    optimality: float
    residual_norm: Any = Deferrable()  # noqa: RUF009
    rank: int
    full_rank: int = 0
    factorization: str = ""
    ranks: Any = Deferrable(None)  # noqa: RUF009
    passes: int = 0
    constraint_error: float = 0.0
    constraint_rank: int | None = None
    _fit: Any = Deferrable(None)  # noqa: RUF009

    def _remark(self) -> str:
        """Which problem was solved where the rank is not full, else how many digits are correct."""
        return self._deficiency() or super()._remark()

    def _deficiency(self) -> str:
        """Remark that the rank is not full; empty if it is."""
        if not self.rank < self.full_rank:
            return ""
        smallest = "smallest " if shown.members(self.accepted) else ""
        return f", {smallest}rank {self.rank} of {self.full_rank}: minimum-norm solution"

    def _rows(self) -> shown.Rows:
        norms = self.residual_norm if isinstance(self.residual_norm, list) else [self.residual_norm]
        more = {"rank": f"{self.rank}", "residual norm": shown.numbers(norms)}
        if self.constraint_rank is not None:
            more["rank"] += f", rank {self.constraint_rank} of the constraints"
        if self._deficiency():
            more = {"digits": shown.correct(self.digits), **more}
        if self.passes:
            more["passes over A"] = f"{self.passes}"
        return self._rows_with(self.factorization, more)
