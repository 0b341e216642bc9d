"""Block principal pivoting: all variables on the wrong side change sides at once, in all problems together.

Kim and Park, "Fast nonnegative matrix factorization: an active-set-like method and comparisons", SIAM J. Sci.
Comput. 33, 2011, section 4, and with upper bounds Júdice and Pires, "Basic-set algorithm for a generalized
linear complementarity problem", J. Optim. Theory Appl. 74, 1992. A few exchanges do where columns are
independent. Where the number of infeasible variables does not fall for some exchanges, only the last one
changes sides (Murty's rule), with which no set comes back, in exact arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neula.algorithms.bounded.free_sets import Factorize, FreeSetMinimum, by_cholesky, minimize
from neula.algorithms.bounded.reduced import Reduced

PATIENCE = 3
"""Exchanges of all infeasible variables that may fail to reduce their number (Kim and Park)."""


@dataclass
class ActiveSetSolution:
    """Final state of an active-set algorithm."""

    x: torch.Tensor  # shape (C, n): within the bounds
    # bool, shape (C, n): variables that were solved for; the others are at bounds, or were left where they
    # were.
    free: torch.Tensor
    iterations: torch.Tensor  # int, shape (C,)
    done: torch.Tensor  # bool, shape (C,): whether no variable was on the wrong side at the end


def block_pivoting(
    problems: Reduced, start: torch.Tensor, *, max_iterations: int, factorize: Factorize = by_cholesky
) -> ActiveSetSolution:
    """Solve each problem, or give it up where columns of free variables are dependent.

    Variables of ``start``, shape (C, n), that are between their bounds are free first, others at the bound
    that is nearer.
    """
    low, high = problems.low, problems.high
    free = _enough(problems, start, (start > low) & (start < high))
    found = ActiveSetSolution(
        start.clamp(low, high), free, _zeros(start, torch.int64), _zeros(start, torch.bool)
    )
    best = torch.full_like(found.iterations, problems.n + 1)
    patience = torch.full_like(found.iterations, PATIENCE)
    rows = torch.arange(len(problems), device=start.device)
    for _ in range(max_iterations):
        if not len(rows):
            break
        some, free = problems.at(rows), found.free[rows]
        best_of_free = minimize(some, found.x[rows], free, factorize)
        x, singular = best_of_free.x, best_of_free.singular
        below, above, wrong = _infeasible(some, best_of_free, free)
        infeasible = below | above | wrong
        count = infeasible.sum(1)
        found.iterations[rows] += 1
        found.done[rows] = (count == 0) & ~singular
        exchanged = _exchanged(infeasible, count, best, patience, rows)
        x = torch.where(below & exchanged, some.low, torch.where(above & exchanged, some.high, x))
        found.free[rows], found.x[rows] = _enough(some, best_of_free.x, free ^ exchanged), x
        rows = rows[(count > 0) & ~singular]
    found.x = found.x.clamp(low, high)
    return found


def _zeros(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(len(x), dtype=dtype, device=x.device)


def _enough(problems: Reduced, x: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
    """Free variables: as many as there are equality constraints at least, the largest of x."""
    if problems.equalities is None or not len(x):
        return free
    count = problems.equalities.count
    few = free.sum(1, keepdim=True) < count
    return free | (few & torch.zeros_like(free).scatter(1, x.topk(count, 1).indices, True))


def _infeasible(
    problems: Reduced, found: FreeSetMinimum, free: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Free variables below and above their bounds, and others that their bound holds back for nothing."""
    x, gradient = found.x, problems.wrong(found.x, found.gradient)
    held = ~free & (gradient.abs() > problems.noise(x, found.residual))
    return free & (x < problems.low), free & (x > problems.high), held


def _exchanged(
    infeasible: torch.Tensor,
    count: torch.Tensor,
    best: torch.Tensor,
    patience: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """Variables that change sides, shape (S, n): all that are infeasible, or the last of them."""
    better = count < best[rows]
    best[rows] = torch.where(better, count, best[rows])
    left = torch.where(better, PATIENCE, patience[rows] - 1)
    patience[rows] = left
    n = infeasible.shape[1]
    places = torch.arange(n, device=infeasible.device)
    last = torch.where(infeasible, places, -1).amax(1, keepdim=True)
    return infeasible & ((left >= 0)[:, None] | (places == last))
