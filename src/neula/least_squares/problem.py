"""What a least-squares problem asks for, and what is known of its solutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch

from neula.engines import FP64, Engine, Format
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
    forward : bool
        Whether to refine until the forward error is that of the accuracy.
    """

    engine: Engine
    target: Format
    dtype: torch.dtype
    algorithm: str | None
    compute: str | None
    damp: float
    weights: torch.Tensor | None
    rcond: float
    max_iterations: int
    forward: bool
    progress: Progress | None

    @property
    def looks(self) -> bool:
        """Whether to look after each step of a batch if all are done: a GPU would have to be waited for."""
        return self.engine.device.type != "cuda"

    @property
    def digits(self) -> float:
        """Forward error of a solution that was refined to the end, before it is rounded."""
        # Digits beyond those of a narrower dtype would be rounded away.
        return self.target.u / (2 if self.target is FP64 else 16)

    def certain_rcond(self, shape: Sequence[int]) -> float:
        """What singular values must exceed for a rank to be certain: rounding errors look like small ones."""
        return max(self.rcond, max(shape[-2:]) * FP64.u)

    @property
    def named(self) -> bool:
        """Whether there is one variant to compute, and no chain."""
        return self.algorithm is not None or self.compute is not None


def no_longer(residual: torch.Tensor, b: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Whether residuals are no longer than right-hand sides, whose solution zero is: by their norms."""
    return residual <= b * (1 + sum(shape[-2:]) * FP64.u)


@dataclass(frozen=True)
class Members:
    """Solutions of a batch with the evidence of each.

    Attributes
    ----------
    x : Tensor, shape (batch, n, k)
        float64, already rounded to the dtype of the result.
    residual_norm, forward_error : Tensor, shape (batch, k)
    backward_error, optimality : Tensor, shape (batch,)
        The worst right-hand side counts.
    condition : Tensor, shape (batch,)
    rank : Tensor, shape (batch,)
    accepted : Tensor, shape (batch,)
    """

    x: torch.Tensor
    residual_norm: torch.Tensor
    forward_error: torch.Tensor
    backward_error: torch.Tensor
    optimality: torch.Tensor
    condition: torch.Tensor
    rank: torch.Tensor
    accepted: torch.Tensor

    @classmethod
    def missing(cls, count: int, n: int, k: int, device: torch.device) -> Members:
        """Solutions that are not known yet, or do not exist."""

        def nan(*shape: int) -> torch.Tensor:
            return torch.full((count, *shape), math.nan, dtype=torch.float64, device=device)

        rank = torch.zeros(count, dtype=torch.int64, device=device)
        return cls(nan(n, k), nan(k), nan(k), nan(), nan(), nan(), rank, rank.bool())

    def put(self, where: torch.Tensor, others: Members) -> None:
        """Take ``others`` to the places ``where``."""
        for f in fields(self):
            getattr(self, f.name)[where] = getattr(others, f.name)

    def at(self, where: torch.Tensor) -> Members:
        """Those at some places."""
        return Members(*(getattr(self, f.name)[where] for f in fields(self)))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them, in order."""
        return tuple(getattr(self, f.name) for f in fields(self))

    @property
    def unsure(self) -> torch.Tensor:
        """Where no digit of x is sure: of those that hold neither NaN nor Inf, shape (batch,)."""
        return ~(self.forward_error <= SURE).all(1) & ~self.backward_error.isnan()

    @property
    def worst(self) -> int:
        """The one with the largest error: of those that were not accepted, if there are any."""
        accepted = self.accepted
        counts = accepted if bool(accepted.all()) else ~accepted
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
