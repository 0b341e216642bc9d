"""Refinement of an unevaluated sum of two float64 numbers, until its forward error is that of the format.

Residuals in twice the working precision show the error of x itself. Its measures, and the solver for updates,
differ between least squares (:mod:`neula.algorithms.krylov.refine_forward`) and linear systems.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TypeVar

import torch

from neula.algorithms.krylov.driver import BestSolutions, Evaluated, iterate
from neula.certificates.forward_error import measured_error
from neula.certificates.stagnation import goes_on
from neula.engines.reduction import HERE, Reduction
from neula.kernels.doubled.doubled import two_sum
from neula.kernels.small_problems.refining import over

PASSES = 8
"""Updates at most; each leaves some 1e-8 of the error, so that two or three do nearly always."""


S = TypeVar("S")


def refine_sum(
    start: torch.Tensor,
    evaluate: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, S]],
    solve: Callable[[S], tuple[torch.Tensor, int]],
    *,
    size: Callable[[torch.Tensor], torch.Tensor],
    tolerance: float,
    over_rows: Reduction = HERE,
) -> BestSolutions:
    """Update until the forward error of each right-hand side meets the tolerance, or stagnates.

    ``evaluate`` maps the two parts of a sum to numbers, shape (q, k), the first row of which bounds ``||D (x
    - x*)|| / ||D x||`` for the sum x, and to what ``solve`` maps to an update, and the iterations that it
    took. ``size`` is ``||D x||``, shape (k,). Of the best solutions the only vectors are sums rounded to
    float64, and the first row of numbers, before those of the evaluation, is their forward error.
    """

    def evaluated(high: torch.Tensor, low: torch.Tensor) -> Evaluated:
        numbers, state = evaluate(high, low)
        # For x alone, relative to the exact solution: the lower part is an error as well.
        rounded = measured_error(numbers[0] + over(size(low), size(high)), 1.0)
        return Evaluated((high,), torch.cat([rounded[None], numbers]), (high, low, state))

    def update(best: BestSolutions, *_: object) -> tuple[Evaluated, int]:
        high, low, state = best.latest.state
        step, iterations = solve(state)
        return evaluated(*two_sum(high, low + step)), iterations

    def any_goes_on(errors: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return goes_on(errors, before, tolerance).any().expand(start.shape[1])

    found = iterate(
        *(evaluated(start, torch.zeros_like(start)), update, any_goes_on),
        errors_of=lambda numbers: numbers[1:2],
        over_rows=over_rows,
    )
    *_, best = islice(found, PASSES + 1)
    return best
