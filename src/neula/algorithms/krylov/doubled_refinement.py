"""Refinement with residuals in twice the working precision, until the forward error is that of the format.

Residuals that are as accurate as a format of 106 bits makes them show the error of x itself: what a solver
with a rate of convergence well below one makes of them is the error, up to that rate, which bounds what is
left after the update. For linear systems see Carson and Higham, "Accelerating the Solution of Linear
Systems by Iterative Refinement in Three Precisions", SIAM J. Sci. Comput. 40, 2018; for least squares Björck,
"Iterative refinement of linear least squares solutions I", BIT 7, 1967, and Demmel, Hida, Riedy, Li,
"Extra-precise iterative refinement for overdetermined least squares problems", ACM Trans. Math. Softw. 35,
2009.

Unknowns are unevaluated sums of two float64 numbers. Rounded to one, their errors along the large singular
vectors would come back in every step, magnified along the small ones by the square of the condition number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from neula.certificates.backward_error import Measures
from neula.certificates.forward_error import COMPUTED, MAX_RATE
from neula.certificates.residuals import FLOOR, STAGNATION
from neula.engines.graphs import kept
from neula.engines.reduction import HERE, Reduction
from neula.kernels.small_problems.refining import added, over, progress, relative_error
from neula.kernels.small_problems.systems import Stepped, Trust, stepped

MAX_STEPS = 30
"""At a rate of 1/4 so many steps give 60 bits."""


Updated = Callable[["Refinement"], tuple[torch.Tensor, Measures]]
"""As :meth:`FactoredProblems.updated`."""


OnStep = Callable[[torch.Tensor, torch.Tensor], None]
"""Called with the unknowns before each update, and their residuals."""


@dataclass(frozen=True)
class LaunchTuning:
    """Steps that are launched for small problems before the host reads a number."""

    # Steps with an R in float32, enough for condition numbers up to 1e4; 0: the host reads after each step.
    prelaunched_steps: int
    prelaunched_again: int  # m n^2 up to which a second R is replayed, too, with more steps
    asynchronous_steps: int  # steps of a problem that is too large to be replayed
    one_launch: int  # elements of A times right-hand sides up to which one kernel solves and measures
    bordered: int  # m n^2 up to which a problem gets a border, so that one graph serves many shapes


@dataclass(frozen=True)
class Pace:
    """When the host synchronizes with the device during iterative refinement: by default after every step."""

    steps: int = 1  # that are launched before the host reads whether to continue; all of them if prelaunched
    is_asynchronous: bool = False  # whether the first read comes after steps and their evidence are launched
    # Whether the host reads nothing, so that a CUDA graph can replay all launches.
    is_prelaunched: bool = False

    @classmethod
    def asynchronous(cls, steps: int) -> Pace:
        """So many steps before the first read."""
        return cls(steps, is_asynchronous=True)

    @classmethod
    def prelaunched(cls, steps: int) -> Pace:
        """So many steps and no read."""
        return cls(steps, is_prelaunched=True)

    def limit(self, max_steps: int) -> int:
        """The largest number of steps, of at most ``max_steps``."""
        return min(self.steps, max_steps) if self.is_prelaunched else max_steps


SYNCHRONOUS = Pace()


@dataclass(frozen=True)
class DoubledEvaluation:
    """Measures of x from residuals in doubled precision."""

    update: torch.Tensor  # shape (batch, unknowns, k): what to add to the unknowns
    # Shape (batch, k): bound on ||D (x - x*)|| after that, D being the norms of the columns of A: by how much
    # the update may be wrong.
    left: torch.Tensor
    residual: torch.Tensor  # shape (batch, rows, k): b - A x
    # Shape (batch, k): what of left is due to the rounding errors of the residual: no update makes it
    # smaller.
    floor: torch.Tensor | float = 0.0

    def stepped(self, before: Refinement) -> Stepped:
        """Add the update to the unknowns, and decide which problems continue."""
        high, low, update = added(before.high, before.low, self.update, before.active)
        # Not relative to x: first updates may be far too long, and those errors then stay at 1.
        left, active = progress(
            *(before.active, self.left, before.left, self.floor, before.system.size(high)),
            *(before.tolerance, STAGNATION, FLOOR),
        )
        return Stepped(high, low, update, left, active)


@dataclass(frozen=True)
class Trusting:
    """Evaluation of linear systems in one launch: ``left`` and ``floor`` follow from ``trust``."""

    # update, residual: as DoubledEvaluation has them.
    update: torch.Tensor
    residual: torch.Tensor
    trust: Trust

    def stepped(self, before: Refinement) -> Stepped:
        """As :meth:`DoubledEvaluation.stepped`."""
        vectors = before.high, before.low, self.update
        return stepped(*vectors, before.active, before.left, self.trust, before.tolerance, STAGNATION, FLOOR)


class FactoredProblems(Protocol):
    """Problems of one shape, with factors to solve them approximately."""

    # Shape (batch,): by how much one update reduces the error, at least, estimated from above.
    rate: torch.Tensor

    def start(self, b: torch.Tensor) -> torch.Tensor:
        """Unknowns as the factors give them, shape (batch, unknowns, k)."""

    def evaluate(
        self, b: torch.Tensor, high: torch.Tensor, low: torch.Tensor
    ) -> DoubledEvaluation | Trusting:
        """How good ``high + low`` is, and what makes it better."""

    def updated(self, at: Refinement) -> tuple[torch.Tensor, Measures]:
        """The residual that the last update leaves, shape (batch, rows, k), and what it says of x."""

    def solution(self, unknowns: torch.Tensor) -> torch.Tensor:
        """The x among the unknowns, by default all of them."""
        return unknowns

    def size(self, unknowns: torch.Tensor) -> torch.Tensor:
        """``||D x||``, shape (batch, k)."""


@dataclass(frozen=True)
class DoubledSolution:
    """A solution that was refined."""

    x: torch.Tensor  # shape (batch, n, k)
    measures: Measures  # tensors of shape (batch, k)
    residual: torch.Tensor  # shape (batch, rows, k): b - A x
    # Shape (batch, k): for x alone, bound on ||D (x - x*)|| / ||D x*||; infinite where updates are not to be
    # trusted.
    forward_error: torch.Tensor
    # Shape (batch, k): what x alone lacks, relative to it: by so much its backward error is larger.
    rounding: torch.Tensor | float = 0.0
    steps: int = 0


_BEGINNING: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.zeros_like,
    lambda high: torch.ones_like(high[:, 0], dtype=torch.bool),
    lambda high: torch.full_like(high[:, 0].real, torch.inf),
)
"""State before the first step: low parts of the unknowns, columns to refine, bounds on errors.

Nothing changes these in place."""


class Refinement:
    """Refinement until the forward error of each right-hand side meets the tolerance, or stagnates.

    One that is done stays as it is: its solution does not depend on the rest of the batch. Elements of b are
    near 1. Where factors or a problem are not finite, x is NaN.

    ``high``, ``low``, shape (batch, unknowns, k), are the unknowns, as an unevaluated sum; ``left``, shape
    (batch, k), bounds their error; ``active`` right-hand sides are neither accurate enough nor stagnate.
    ``residual`` was there before the last step, and ``update`` is what it has added.
    """

    def __init__(
        self, system: FactoredProblems, b: torch.Tensor, tolerance: float, over_rows: Reduction = HERE
    ) -> None:
        self.system, self.b, self.tolerance, self.steps = system, b, tolerance, 0
        self._over_rows = over_rows
        self.high = system.start(b)
        self.low, self.active, self.left = (
            kept(("refinement", i, self.high.shape, b.dtype, b.device), partial(begin, self.high))
            for i, begin in enumerate(_BEGINNING)
        )

    def solved(self, max_steps: int = MAX_STEPS, pace: Pace = SYNCHRONOUS) -> DoubledSolution:
        """The solution after as many steps as are needed; a prelaunched pace synchronizes nowhere."""
        self.advance(pace.limit(max_steps), pace.steps)
        return self.solution()

    def advance(self, most: int, unread: int = 1, on_step: OnStep | None = None) -> None:
        """Take steps while anything is left to refine, up to ``most`` in all.

        Of that the host reads nothing, and waits for nothing, before ``unread`` steps have been taken.
        """
        while self.steps < most and (self.steps < unread or bool(self._over_rows.agree(self.active.any()))):
            self.steps += 1
            high, found = self.high, self.system.evaluate(self.b, self.high, self.low)
            self.high, self.low, self.update, self.left, self.active = found.stepped(self)
            self.residual = found.residual
            if on_step is not None:
                on_step(high, found.residual)

    @property
    def change(self) -> torch.Tensor:
        """By how much the last update has changed x alone, as it is returned."""
        return self.update - self.low

    def solution(self, updated: Updated | None = None) -> DoubledSolution:
        """The refined solution with its measures, after at least one step; ``updated`` may take the place of
        that of the system.
        """
        system, high, low = self.system, self.high, self.low
        size = system.size(high)
        low_size, rate = system.size(low), system.rate[:, None]
        forward_error = relative_error(self.left, size, low_size, rate, MAX_RATE, COMPUTED)
        residual, measures = (updated or system.updated)(self)
        return DoubledSolution(
            x=system.solution(high),
            measures=measures,
            residual=residual,
            forward_error=forward_error,
            rounding=over(low_size, size),
            steps=self.steps,
        )
