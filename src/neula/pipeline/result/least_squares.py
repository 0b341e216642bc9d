"""The result of a least-squares problem."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Generic

from neula.pipeline.result import shown
from neula.pipeline.result.attempts import Attempt
from neula.pipeline.result.shown import ArrayT


@dataclass(frozen=True, eq=False, repr=False)
class LstsqResult(shown.Shown, Generic[ArrayT]):
    """Solution of a least-squares problem, or of a batch of them, with the measured evidence.

    Of a batch the single numbers are those of the worst problem; the arrays have one for each.

    Attributes
    ----------
    x : array, shape (*batch, n) or (*batch, n, k)
        The solution, in the library, on the device and in the dtype of the input; NaN where a problem of a
        batch holds NaN or Inf.
    converged : bool
        Whether the measured backward error meets the accuracy asked for.
    iterations : int
        Refinement iterations, over all attempts (and all problems that were solved alone).
    backward_error : float
        Upper bound on the relative perturbation of ``A`` and ``b`` for which ``x`` is exact (with a
        low-precision R one of its terms is an estimate); the worst right-hand side counts.
    optimality : float
        ``||A^T r|| / (||A|| ||r||)`` in the column-scaled matrix; the worst right-hand side counts.
    tolerance : float
        What ``backward_error`` was asked to be.
    residual_norm : float or list of float
        ``||b - A x||`` of each right-hand side, flattened (with damping and weights, of the augmented
        problem).
    rank : int
        Numerical rank of ``A``, with damping of the stacked matrix; where it is below the largest possible
        one, the minimum-norm solution was computed. Of a batch the smallest of those that were solved.
    condition : float
        Condition number of A with normalized columns, estimated; below full rank that of its part of this
        rank. Of a batch the largest.
    forward_error : float
        Bound on ``||D (x - x*)|| / ||D x*||``, x* being the exact solution for A and b as they are
        stored, below full rank of the problem of this rank, and D the norms of
        the columns of A; the worst right-hand side counts.
    digits : float
        Decimal digits of x that are sure: the negative logarithm of ``forward_error``.
    history : tuple of float
        The backward error at every restart, first to last; empty if all problems were solved together.
    factorization : str
        What the accepted attempt did, e.g. ``"rgsqrf fp16 + cgls"``.
    attempts : tuple of Attempt
        The chain that led here; the last one is the accepted one, if any was accepted.
    engine : str
        The engine that multiplied.
    accuracy : str
        The accuracy that was asked for.
    seconds : float
        Time of the call.
    accepted : array of bool, shape (*batch,)
        Whether each problem meets the accuracy, with no doubt about its rank.
    backward_errors : array of float64, shape (*batch,)
    ranks : array of int64, shape (*batch,)
        0 where a problem holds NaN or Inf.
    conditions : array of float64, shape (*batch,)
    forward_errors : array of float64, shape (*batch,) or (*batch, k)
        Of each right-hand side.
    """

    x: ArrayT
    converged: bool
    iterations: int
    backward_error: float
    optimality: float
    tolerance: float
    residual_norm: Any
    rank: int
    condition: float = math.nan
    forward_error: float = math.nan
    digits: float = 0.0
    history: tuple[float, ...] = ()
    factorization: str = ""
    attempts: tuple[Attempt, ...] = ()
    engine: str = ""
    accuracy: str = ""
    seconds: float = math.nan
    accepted: Any = None
    backward_errors: Any = None
    ranks: Any = None
    conditions: Any = None
    forward_errors: Any = None

    def headline(self) -> str:
        """What is certified, in a line."""
        certified = shown.verdict(self.accuracy, converged=self.converged)
        return f"{certified}{shown.members(self.accepted)}, {shown.sure(self.digits)}"

    def rows(self) -> shown.Rows:
        """What matters: the answer, how it came about, and how good it is."""
        norms = self.residual_norm
        return {
            "x": shown.array(self.x),
            "method": shown.attempted(self.attempts, self.factorization),
            "iterations": f"{self.iterations}",
            "backward error": f"{self.backward_error:.1e}, at most {self.tolerance:.1e} asked for",
            "forward error": f"{self.forward_error:.1e}, condition number {self.condition:.1e}",
            "rank": f"{self.rank}",
            "residual norm": shown.numbers(norms if isinstance(norms, list) else [norms]),
            "time": f"{shown.duration(self.seconds)}, engine {self.engine}",
        }.items()
