"""What is known of the solutions of a batch of problems, for ``solve`` and ``lstsq`` alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from neula.certificates.forward_error import SURE
from neula.pipeline.chain import Values
from neula.pipeline.result import Attempt

if TYPE_CHECKING:
    from typing import Self

S = TypeVar("S", bound="Solutions")


@dataclass(frozen=True)
class Solutions(Values):
    """Solutions of a batch with the evidence of each.

    Attributes
    ----------
    x : Tensor, shape (batch, n, k)
        float64, already rounded to the dtype of the result.
    forward_error : Tensor, shape (batch, k)
    backward_error, condition : Tensor, shape (batch,)
        The worst right-hand side counts.
    accepted : Tensor, shape (batch,)
    """

    x: torch.Tensor
    forward_error: torch.Tensor
    backward_error: torch.Tensor
    condition: torch.Tensor
    accepted: torch.Tensor

    @property
    def unsure(self) -> torch.Tensor:
        """Where no digit of x is sure, shape (batch,)."""
        return ~(self.forward_error <= SURE).all(1)

    @property
    def worst(self) -> int:
        """The one with the largest error: of those that were not accepted, if there are any."""
        counts = self.accepted if bool(self.accepted.all()) else ~self.accepted
        errors = self.backward_error.nan_to_num(math.inf, math.inf)
        return int(torch.where(counts, errors, -1.0).argmax())


@dataclass
class Found(Generic[S]):
    """Solutions so far, and how they were found."""

    members: S
    attempts: list[Attempt] = field(default_factory=list)
    method: str = ""
    iterations: int = 0
    history: tuple[float, ...] = ()

    def as_empty(self, a: torch.Tensor) -> Self:
        """Nothing is asked for: x is zero, as in NumPy, and certain."""
        for known in self.members.tensors:
            known.zero_()
        self.members.condition.fill_(1.0)
        self.members.accepted.fill_(True)
        self.attempts.append(nothing_to_do(a, len(a)))
        return self


def does_not_fit(dtype: torch.dtype) -> OverflowError:
    """What to raise where a solution overflows in the dtype of the result."""
    return OverflowError(
        "the solution does not fit float64: scale b down"
        if dtype == torch.float64
        else f"the solution does not fit {dtype}: pass the input in a wider dtype"
    )


def nothing_to_do(a: torch.Tensor, count: int) -> Attempt:
    """What is recorded where there are no elements."""
    return Attempt("nothing to do", True, f"A is {tuple(a.shape[-2:])}, {count} times")
