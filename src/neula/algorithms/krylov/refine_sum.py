"""Refinement of an unevaluated sum of two float64 numbers, until its forward error is that of the format.

Residuals in twice the working precision show the error of x itself. What they say of it, and what solves for
an update, differs between least squares (:mod:`neula.algorithms.krylov.refine_forward`) and linear systems.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

from neula.algorithms.krylov.doubled_refinement import add_to_pair
from neula.algorithms.krylov.driver import iterate
from neula.certificates.forward_error import measured_error
from neula.certificates.stagnation import goes_on
from neula.kernels.refining import over

PASSES = 8
"""Updates at most; each leaves some 1e-8 of the error, so that two or three do nearly always."""


class EvaluatedSum(Protocol):
    """What residuals in twice the working precision say of an unevaluated sum."""

    @property
    def error(self) -> torch.Tensor:
        """Bound on ``||D (x - x*)|| / ||D x||`` for the sum x, shape (k,)."""


E = TypeVar("E", bound=EvaluatedSum)


@dataclass(frozen=True)
class RefinedSum(Generic[E]):
    """Outcome of :func:`refine_sum`.

    Attributes
    ----------
    x : Tensor, shape (n, k)
        The best sum of each right-hand side, rounded to float64.
    forward_error : Tensor, shape (k,)
        That of x; infinite where none was found.
    last : EvaluatedSum
        What was found of the last sum.
    iterations : int
    """

    x: torch.Tensor
    forward_error: torch.Tensor
    last: E
    iterations: int


def refine_sum(
    start: torch.Tensor,
    evaluate: Callable[[torch.Tensor, torch.Tensor], E],
    solve: Callable[[E], tuple[torch.Tensor, int]],
    *,
    size: Callable[[torch.Tensor], torch.Tensor],
    tolerance: float,
) -> RefinedSum[E]:
    """Update until the forward error of each right-hand side meets the tolerance, or stagnates.

    Parameters
    ----------
    start : Tensor, shape (n, k)
    evaluate : callable
        From the two parts of a sum to what residuals say of it.
    solve : callable
        From that to an update, and the iterations that it took.
    size : callable
        ``||D x||``, shape (k,).
    tolerance : float
        Forward error of the sum at which to stop.
    """
    first = _Sum(start, torch.zeros_like(start), evaluate(start, torch.zeros_like(start)))
    best = _BestSums(first, size, tolerance)
    iterations = 0

    def update(state: _Sum[E], _: int) -> tuple[_Sum[E], int]:
        nonlocal iterations
        step, taken = solve(state.found)
        iterations += taken
        high, low = add_to_pair(state.high, state.low, step)
        return _Sum(high, low, evaluate(high, low)), 1

    iterate(first, best.take, update, PASSES)
    return RefinedSum(best.x, best.forward_error, best.last, iterations)


class _Sum(NamedTuple, Generic[E]):
    """``high + low``, and what is said of it."""

    high: torch.Tensor
    low: torch.Tensor
    found: E


class _BestSums(Generic[E]):
    """The best sum so far of each right-hand side."""

    def __init__(
        self, first: _Sum[E], size: Callable[[torch.Tensor], torch.Tensor], tolerance: float
    ) -> None:
        self.x, self.last = first.high, first.found
        self.forward_error = self._error = torch.full_like(first.found.error, torch.inf)
        self._size, self._tolerance = size, tolerance

    def take(self, state: _Sum[E]) -> bool:
        """Keep what is better than before; whether another update is worth its while."""
        high, low, self.last = state
        error = self.last.error
        better = error < self._error
        self.x = torch.where(better, high, self.x)
        # For x alone, relative to the exact solution: the lower part is an error as well.
        rounded = measured_error(error + over(self._size(low), self._size(high)), 1.0)
        self.forward_error = torch.where(better, rounded, self.forward_error)
        worth_it = bool(goes_on(error, self._error, self._tolerance).any())
        self._error = torch.minimum(self._error, error)
        return worth_it
