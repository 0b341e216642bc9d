"""What a linear system asks for, and what is known of its solutions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import torch

from neula.engines import FORMATS, FP64, Engine, Format
from neula.forward_error import SURE
from neula.progress import Progress
from neula.result import Attempt


@dataclass(frozen=True)
class Options:
    """What is asked for.

    Attributes
    ----------
    dtype : torch.dtype
        Of x as it is given back.
    positive : bool
        Whether A is said to be symmetric positive definite.
    forward : bool
        Whether to refine until the forward error is that of the accuracy.
    """

    engine: Engine
    target: Format
    dtype: torch.dtype
    positive: bool
    pivot: str | None
    compute: Format | None
    max_iterations: int
    forward: bool
    progress: Progress | None

    @property
    def formats(self) -> list[Format]:
        """Formats of the factors to try before the library's in double precision, cheapest first."""
        if self.compute is not None:
            return [self.compute]
        formats = [FORMATS[name] for name in self.engine.preconditioners]
        if self.is_named:
            return formats[:1]
        # With the library's LU in double precision at the end, ours is not worth a try.
        return formats if self.positive else [format for format in formats if format is not FP64]

    @property
    def is_named(self) -> bool:
        """Whether there is one variant to compute, and no chain."""
        return self.pivot is not None

    @property
    def digits(self) -> float:
        """Forward error of a solution that was refined to the end, before it is rounded."""
        # Digits beyond those of a narrower dtype would be rounded away.
        return self.target.u / (2 if self.target is FP64 else 16)


@dataclass(frozen=True)
class Members:
    """Solutions of a batch with the evidence of each.

    Attributes
    ----------
    x : Tensor, shape (batch, n, k)
        float64, already rounded to the dtype of the result.
    forward_error : Tensor, shape (batch, k)
    backward_error, condition, growth : Tensor, shape (batch,)
        The worst right-hand side counts.
    accepted : Tensor, shape (batch,)
    """

    x: torch.Tensor
    forward_error: torch.Tensor
    backward_error: torch.Tensor
    condition: torch.Tensor
    growth: torch.Tensor
    accepted: torch.Tensor

    @classmethod
    def missing(cls, count: int, n: int, k: int, device: torch.device) -> Members:
        """Solutions that are not known yet."""

        def nan(*shape: int) -> torch.Tensor:
            return torch.full((count, *shape), math.nan, dtype=torch.float64, device=device)

        return cls(nan(n, k), nan(k), nan(), nan(), nan(), torch.zeros_like(nan(), dtype=torch.bool))

    def put(self, where: torch.Tensor, others: Members) -> None:
        """Take ``others`` to the places ``where``."""
        for f in fields(self):
            getattr(self, f.name)[where] = getattr(others, f.name)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them, in order."""
        return tuple(getattr(self, f.name) for f in fields(self))

    @property
    def unsure(self) -> torch.Tensor:
        """Where no digit of x is sure, shape (batch,)."""
        return ~(self.forward_error <= SURE).all(1)

    @property
    def worst(self) -> int:
        """The one with the largest errors: of those that were not accepted, if there are any."""
        counts = self.accepted if bool(self.accepted.all()) else ~self.accepted
        errors = self.backward_error.nan_to_num(math.inf, math.inf)
        return int(torch.where(counts, errors, -1.0).argmax())


@dataclass
class Found:
    """Solutions so far, and how they were found."""

    members: Members
    attempts: list[Attempt] = field(default_factory=list)
    method: str = ""
    iterations: int = 0
    history: tuple[float, ...] = ()
