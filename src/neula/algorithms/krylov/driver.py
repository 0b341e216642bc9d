"""The loop of every refinement that the host reads after each residual.

Wilkinson's scheme: solve roughly; compute the residual anew; solve for an update with the residual as the
right-hand side; add it; repeat (Higham, "Accuracy and Stability of Numerical Algorithms", chapter 12).
Refinements differ in what they measure, in which precision, and in what solves for the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch

from neula.certificates.backward_error import Measures
from neula.certificates.forward_error import measured_error
from neula.certificates.residuals import goes_on
from neula.engines.reduction import HERE, Reduction
from neula.kernels.doubled.doubled import two_sum
from neula.kernels.small_problems.refining import over


@dataclass(frozen=True)
class Refined:
    """Refined solutions: of each right-hand side the best one."""

    x: torch.Tensor  # shape (n, k)
    measures: Measures  # of linear systems and of minimum-norm solutions the optimality is the backward error
    residual_norm: torch.Tensor | None = None  # shape (k,): of least squares
    residual: torch.Tensor | None = None  # shape (n, k): b - A x, of linear systems
    # Shape (k,): bound on the relative error of x, where it was measured.
    forward_error: torch.Tensor | None = None
    # Shape (k,): of a wide A the backward error with rows scaled to comparable size.
    row_error: torch.Tensor | None = None
    iterations: int = 0  # of the inner solver, or solves with factors, in total
    # Largest backward error of all right-hand sides at each restart.
    history: list[float] = field(default_factory=list)

    @property
    def backward_error(self) -> torch.Tensor:
        """Shape (k,)."""
        return self.measures.backward_error


class Evaluated(NamedTuple):
    """Solutions of some right-hand sides, and what their residuals say."""

    # Shape (., k): what is kept of the best solution: x, and whatever belongs to it.
    vectors: tuple[torch.Tensor, ...]
    numbers: torch.Tensor  # shape (q, k): evidence
    state: Any = None  # state for the next update


class BestSolutions(NamedTuple):
    """The best solution so far of each right-hand side."""

    # vectors, numbers: as Evaluated has them; numbers are on the host.
    vectors: tuple[torch.Tensor, ...]
    numbers: torch.Tensor
    # Shape (levels, k): solutions are compared by the first row, and by the next row where the first ones are
    # equal.
    errors: torch.Tensor
    latest: Evaluated  # the right-hand sides that the last update was for
    iterations: int = 0


def iterate(
    first: Evaluated,
    update: Callable[[BestSolutions, torch.Tensor, int], tuple[Evaluated, int]],
    goes_on: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    errors_of: Callable[[torch.Tensor], torch.Tensor] = lambda numbers: numbers,
    max_iterations: int = 1 << 30,
    over_rows: Reduction = HERE,
) -> Iterator[BestSolutions]:
    """Refine solutions while their errors shrink; yields the best solutions after each evaluation.

    The host reads the numbers of an evaluation at once, which is the only time that it waits.

    ``update`` maps the best solutions, the columns to update and the iterations left to the evaluation of
    these columns after an update, of the best or the latest x, and the iterations that it took. ``goes_on``
    maps the errors of columns, and their smallest errors before, infinite at first, to the mask of columns to
    update. ``errors_of`` maps numbers to the errors by which solutions are compared, shape (levels, k); NaN
    is never better.

    Newton's iteration for a square root:

    >>> def newton(x):
    ...     return Evaluated((x,), (x * x - 2).abs()[None])
    >>> found = iterate(
    ...     newton(torch.ones(1, dtype=torch.float64)),
    ...     lambda best, *_: (newton((best.vectors[0] + 2 / best.vectors[0]) / 2), 1),
    ...     lambda error, before: (error[0] > 1e-12) & (error[0] < before[0]),
    ... )
    >>> [round(float(best.vectors[0]), 4) for best in found]
    [1.0, 1.5, 1.4167, 1.4142, 1.4142, 1.4142]
    """
    columns = torch.arange(first.numbers.shape[1], device="cpu")
    first = first._replace(numbers=over_rows.agree(first.numbers).cpu())
    errors = errors_of(first.numbers)
    before = torch.full_like(errors, torch.inf)
    best = BestSolutions(first.vectors, first.numbers, errors, first)
    while True:
        yield best
        columns = columns[goes_on(errors, before)]
        if not len(columns) or best.iterations >= max_iterations:
            return
        found, taken = update(best, columns, max_iterations - best.iterations)
        found = found._replace(numbers=over_rows.agree(found.numbers).cpu())
        errors, before = errors_of(found.numbers), best.errors[:, columns]
        replaced = partial(_replaced, columns, _precedes(errors, before))
        best = BestSolutions(
            tuple(map(replaced, best.vectors, found.vectors)),
            replaced(best.numbers, found.numbers),
            replaced(best.errors, errors),
            found,
            best.iterations + taken,
        )


def part(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Some columns of x; x itself where it is all of them."""
    return x if len(columns) == x.shape[-1] else x[..., columns.to(x.device)]


def _precedes(errors: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Mask of the columns with a smaller first row, or an equal one and a smaller next row."""
    better = torch.zeros_like(errors[0], dtype=torch.bool)
    for now, then in zip(errors.flip(0), before.flip(0), strict=True):
        better = (now < then) | ((now == then) & better)
    return better


def _replaced(
    columns: torch.Tensor, better: torch.Tensor, old: torch.Tensor, new: torch.Tensor
) -> torch.Tensor:
    """``old``, with some of its columns replaced by ``new`` where that is better."""
    if not bool(better.all()):
        new = torch.where(better.to(new.device), new, part(old, columns))
    return new if new.shape == old.shape else old.index_copy(-1, columns.to(old.device), new)


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
