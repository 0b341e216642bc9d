"""Problems whose first link launches its work, of a shape that was solved before.

A small problem takes a GPU less time than a host takes for records of what was tried and for the worst of a
batch. A plan launches the first link, reads once what was measured, and makes the result of what the judge of
the chain accepts. If it does not accept all, the chain continues from what was found.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from neula.kernels.precision import plain_arithmetic
from neula.pipeline.batches import ProblemBatch
from neula.pipeline.call import Call
from neula.pipeline.chain import Answer, Link, answer_of_first
from neula.pipeline.memory import MemoryGuard
from neula.pipeline.plans import OF_EACH, Given, accepted_solutions, tensors_of
from neula.pipeline.result import SolutionResult
from neula.pipeline.shapes import BatchedProblem, broadcast_system
from neula.pipeline.solutions import SolutionOptions, Solutions

P = TypeVar("P", bound=ProblemBatch)
S = TypeVar("S", bound=Solutions)
R = TypeVar("R", bound=SolutionResult[Any])

KNOWN = dict(zip(OF_EACH, ("doubtful", "backward_error", "condition", "forward_error"), strict=True))
"""Fields of results, and where solutions have them."""


Extremes = dict[str, tuple[float, float]]
"""The smallest and the largest of each number that was measured, by name."""


class Settling(Protocol):
    """A judge of solutions."""

    def settled(self, largest: Sequence[float]) -> bool:
        """Whether all are accepted, from the largest of each number that was measured."""


class LaunchedPlan(ABC, Generic[P, S, R]):
    """The first link for linear systems or least-squares problems of one shape."""

    result: type[R]

    def __init__(self, link: Link[P, S], judge: Settling, options: SolutionOptions) -> None:
        self.link, self.judge, self.options = link, judge, options

    @abstractmethod
    def problems(self, a: torch.Tensor, b: torch.Tensor) -> P:
        """Matrices and right-hand sides on the device, shapes (P, m, n) and (P, m, K), as the link takes
        them.
        """

    @abstractmethod
    def fields(self, given: Given, shapes: BatchedProblem, found: Answer[S], of: Extremes) -> dict[str, Any]:
        """Fields of the result that are not common to all."""

    @abstractmethod
    def reason(self, found: Answer[Any], of: Extremes) -> str:
        """Why all are accepted, in words."""

    def begin(self, problems: P) -> Answer[S] | None:
        """Run the link."""
        with plain_arithmetic(self.options.engine.device):
            return answer_of_first([self.link], problems)

    def __call__(self, given: Given) -> R | Answer[S] | None:
        """The result of a call like one before, else what the link has found, if anything."""
        return self.solved(given, broadcast_system(*tensors_of(given.arrays)))

    def of_call(self, call: Call, shapes: BatchedProblem) -> R | Answer[S] | None:
        """Solve the problems of a first call, after its front end."""
        return self.solved(Given.of_call(call), shapes)

    def solved(self, given: Given, shapes: BatchedProblem) -> R | Answer[S] | None:
        """Solve problems whose shapes are checked."""
        device, found = self.options.engine.device, None
        problems = self.problems(shapes.matrices.to(device), shapes.columns.to(device))
        with MemoryGuard(device).attempt(self.link.label):
            found = self.begin(problems)
        if found is None or found.doubt or not isinstance(found.measured, torch.Tensor):
            return found
        # Launched before the look.
        x = given.give(shapes.solutions(found.values.x).to(self.options.dtype))
        smallest, largest = _extremes(found)
        of = dict(zip(found.values.names, zip(smallest, largest, strict=True), strict=True))
        fits = of["largest"][1] <= torch.finfo(self.options.dtype).max
        if not (fits and self.judge.settled(largest)):
            return found
        values, layout, said = found.values, shapes.without_numbers(), found.without_values()

        def each(name: str) -> Any:
            known = getattr(values, KNOWN[name])
            if name == "forward_errors":
                return given.give(layout.of_columns(known).contiguous())
            return given.give(layout.of_members(~known if name == "accepted" else known).contiguous())

        fields = {"x": x, "iterations": found.iterations} | self.fields(given, shapes, found, of)
        fields |= {name: of[name][1] for name in ("backward_error", "forward_error")}
        fields["condition"] = max(1.0, of["condition"][1])
        told = found.label, lambda: self.reason(said, of)
        return accepted_solutions(self.result, given, self.options, *told, fields, each)


def _extremes(found: Answer[Any]) -> tuple[list[float], list[float]]:
    """The smallest and the largest of each number that was measured, NaN where one is; the host waits."""
    measured = found.measured
    assert isinstance(measured, torch.Tensor)
    if measured.shape[1] > 1:
        smallest, largest = torch.stack(measured.aminmax(dim=1)).tolist()
        return smallest, largest
    found.measured = measured.cpu()
    numbers: list[float] = found.measured.flatten().tolist()
    return numbers, numbers
