"""The loop of every refinement: measure, stop where nothing is left to gain, else solve for an update.

Wilkinson's scheme: solve roughly; compute the residual anew; solve for an update with the residual as the
right-hand side; add it; repeat (Higham, "Accuracy and Stability of Numerical Algorithms", chapter 12). What
refinements differ in is what they measure, in which precision, and what solves for the update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

State = TypeVar("State")


def iterate(
    state: State,
    goes_on: Callable[[State], bool],
    update: Callable[[State, int], tuple[State, int]],
    max_iterations: int,
) -> int:
    """Update a solution until that is no longer worth its while.

    Parameters
    ----------
    state : State
        The first solution, with what was measured of it.
    goes_on : callable
        Whether another update is worth its while; the place to keep the best state.
    update : callable
        From a state and the iterations that are left to the next state, measured as well, and the iterations
        that it took.
    max_iterations : int
        In total.

    Returns
    -------
    int
        Iterations that were taken.

    Examples
    --------
    Newton's iteration for a square root:

    >>> iterate(1.0, lambda x: abs(x * x - 2) > 1e-12, lambda x, left: ((x + 2 / x) / 2, 1), 10)
    5
    """
    iterations = 0
    while goes_on(state) and iterations < max_iterations:
        state, taken = update(state, max_iterations - iterations)
        iterations += taken
    return iterations
