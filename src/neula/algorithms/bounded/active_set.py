"""The active-set method of Lawson and Hanson, and with upper bounds of Stark and Parker, for many problems.

One variable becomes free at a time, the one along which the residual shortens most; a step that leaves the
bounds is cut off where the first variable meets its own. The residual becomes shorter each time a set of free
variables has been solved for, which is what ends it: no set comes back. Columns that depend on those of free
variables never become free.

C. L. Lawson, R. J. Hanson, "Solving Least Squares Problems", 1974, chapter 23; P. B. Stark, R. L. Parker,
"Bounded-variable least-squares: an algorithm and applications", Computational Statistics 10, 1995.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neula.algorithms.bounded.free_sets import Factorize, FreeSetMinimum, Reduced, by_cholesky, minimize


@dataclass
class _ActiveSetState:
    """The parts of all problems that change from step to step."""

    found: ActiveSetSolution
    entered: torch.Tensor  # int, shape (C,): the variable that became free last; n for none
    # bool, shape (C, n): variables that did not shorten the residual when they were tried.
    blocked: torch.Tensor
    # Shape (C, n): that of the residual when a set was last solved for, zeros where it is rounding errors.
    gradient: torch.Tensor
    length: torch.Tensor  # shape (C,): squared norm of that residual


def active_set(
    problems: Reduced, start: torch.Tensor, *, max_iterations: int, factorize: Factorize = by_cholesky
) -> ActiveSetSolution:
    """Solve each problem, solving for at most ``max_iterations`` sets of free variables.

    Variables of ``start``, shape (C, n), that are between their bounds are free first, if their columns are
    independent.
    """
    low, high = problems.low, problems.high
    x = start.clamp(low, high)
    count = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    state = _ActiveSetState(
        ActiveSetSolution(x, (x > low) & (x < high), count, count.bool()),
        entered=torch.full_like(count, problems.n),
        blocked=torch.zeros_like(x, dtype=torch.bool),
        gradient=torch.zeros_like(x),
        length=x.new_full((len(x),), torch.inf),
    )
    rows = torch.arange(len(problems), device=x.device)
    for _ in range(max_iterations):
        if not len(rows):
            break
        rows = _iterate(problems.at(rows), state, rows, factorize)
    return state.found


def _iterate(
    problems: Reduced, state: _ActiveSetState, rows: torch.Tensor, factorize: Factorize
) -> torch.Tensor:
    """One set of free variables of each problem in ``rows``; returns which of them are not done."""
    found, n = state.found, problems.n
    x, free, entered = found.x[rows], found.free[rows].clone(), state.entered[rows]
    best = minimize(problems, x, free, factorize)
    found.iterations[rows] += 1
    places = torch.arange(n, device=x.device)
    new = places == entered[:, None]
    # A step against the gradient along which a variable became free is rounding errors.
    back = ((best.x - x) * new * state.gradient[rows]).sum(1) < 0
    singular = best.singular | back
    solved = torch.where(singular[:, None], x, best.x)
    x, free, inside = _cut_off(problems, x, solved, free)
    length = best.residual.square().sum(1)
    no_shorter = inside & ~(length < state.length[rows]) & (entered < n)
    refused = singular | no_shorter
    x = torch.where(refused[:, None], found.x[rows], x)
    # Without one that has just become free the start is at fault: nothing is free then.
    afresh = singular & (entered == n)
    free = torch.where(refused[:, None], found.free[rows] & ~new & ~afresh[:, None], free)
    complete = inside & ~refused
    state.length[rows] = torch.where(complete, length, state.length[rows])
    blocked = (state.blocked[rows] & ~complete[:, None]) | (new & refused[:, None])
    sure = best.gradient.abs() > problems.noise(best.x, best.residual)
    gradient = torch.where(sure, best.gradient, 0.0)
    state.gradient[rows] = torch.where((complete | afresh)[:, None], gradient, state.gradient[rows])
    chosen, done = _next(problems, x, ~free & ~blocked, state.gradient[rows])
    enters = complete | refused
    chosen = torch.where(enters, chosen, entered)
    found.x[rows], found.done[rows] = x, enters & done
    found.free[rows] = free | ((places == chosen[:, None]) & enters[:, None])
    state.entered[rows], state.blocked[rows] = chosen, blocked
    return rows[~(enters & done)]


def _cut_off(
    problems: Reduced, x: torch.Tensor, solved: torch.Tensor, free: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The step from x as far as bounds allow; which variables stay free, and whether all of it was taken."""
    low, high = problems.low, problems.high
    below, above = free & (solved < low), free & (solved > high)
    inside = ~(below | above).any(1)
    bound = torch.where(below, low, high)
    part = torch.where(below | above, (bound - x) / (solved - x), torch.inf)
    length = part.amin(1, keepdim=True).clamp(0.0, 1.0)
    meets = part <= length
    moved = torch.where(free, x + length * (solved - x), x).clamp(low, high)
    moved = torch.where(meets, bound, torch.where(inside[:, None], solved, moved))
    return moved, free & ~meets, inside


def _next(
    problems: Reduced, x: torch.Tensor, candidates: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The candidate to become free, and whether there is none."""
    gain = problems.wrong(x, gradient).abs() / problems.of_each(problems.norms)
    best, place = torch.where(candidates & (gain > 0), gain, -1.0).max(1)
    return torch.where(best >= 0, place, problems.n), best < 0


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
    count = min(problems.equalities.count, x.shape[1])
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
