"""The result of a least-squares problem."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from neula.pipeline.result.attempts import Attempt


@dataclass(frozen=True)
class LstsqResult:
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
    accepted : array of bool, shape (*batch,)
        Whether each problem meets the accuracy, with no doubt about its rank.
    backward_errors : array of float64, shape (*batch,)
    ranks : array of int64, shape (*batch,)
        0 where a problem holds NaN or Inf.
    conditions : array of float64, shape (*batch,)
    forward_errors : array of float64, shape (*batch,) or (*batch, k)
        Of each right-hand side.
    """

    x: Any
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
    accepted: Any = field(default=None, repr=False)
    backward_errors: Any = field(default=None, repr=False)
    ranks: Any = field(default=None, repr=False)
    conditions: Any = field(default=None, repr=False)
    forward_errors: Any = field(default=None, repr=False)
