"""What a least-squares problem asks for, and what is known of its solutions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from neula.engines import FP64, Engine, Format
from neula.pipeline import solutions
from neula.pipeline.progress import Progress
from neula.pipeline.solutions import Solutions


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
class Members(Solutions):
    """Solutions of least-squares problems.

    Attributes
    ----------
    residual_norm : Tensor, shape (batch, k)
    optimality : Tensor, shape (batch,)
        The worst right-hand side counts.
    rank : Tensor, shape (batch,)
    """

    residual_norm: torch.Tensor
    optimality: torch.Tensor
    rank: torch.Tensor

    @classmethod
    def missing(cls, count: int, n: int, k: int, device: torch.device) -> Members:
        """Solutions that are not known yet, or do not exist."""

        def nan(*shape: int) -> torch.Tensor:
            return torch.full((count, *shape), math.nan, dtype=torch.float64, device=device)

        return cls(
            x=nan(n, k),
            forward_error=nan(k),
            backward_error=nan(),
            condition=nan(),
            accepted=torch.zeros(count, dtype=torch.bool, device=device),
            residual_norm=nan(k),
            optimality=nan(),
            rank=torch.zeros(count, dtype=torch.int64, device=device),
        )

    @property
    def unsure(self) -> torch.Tensor:
        """Where no digit of x is sure: of those that hold neither NaN nor Inf, shape (batch,)."""
        return super().unsure & ~self.backward_error.isnan()


Found = solutions.Found[Members]
"""Solutions of least-squares problems so far, and how they were found."""
