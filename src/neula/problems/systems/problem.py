"""What a linear system asks for, and what is known of its solutions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from neula.engines import FORMATS, FP64, Engine, Format
from neula.pipeline.progress import Progress
from neula.pipeline.solutions import Solutions


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
        formats = [FORMATS[name] for name in self.engine.tuning.preconditioners]
        if self.named:
            return formats[:1]
        # With the library's LU in double precision at the end, ours is not worth a try.
        return formats if self.positive else [format for format in formats if format is not FP64]

    @property
    def named(self) -> bool:
        """Whether there is one variant to compute, and no chain."""
        return self.pivot is not None

    @property
    def digits(self) -> float:
        """Forward error of a solution that was refined to the end, before it is rounded."""
        # Digits beyond those of a narrower dtype would be rounded away.
        return self.target.u / (2 if self.target is FP64 else 16)


@dataclass(frozen=True)
class Members(Solutions):
    """Solutions of linear systems.

    Attributes
    ----------
    refined_error : Tensor, shape (batch,)
        Backward error of what was refined, before x was rounded to the dtype of the result.
    growth : Tensor, shape (batch,)
    """

    refined_error: torch.Tensor
    growth: torch.Tensor

    @classmethod
    def missing(cls, count: int, n: int, k: int, device: torch.device) -> Members:
        """Solutions that are not known yet."""

        def nan(*shape: int) -> torch.Tensor:
            return torch.full((count, *shape), math.nan, dtype=torch.float64, device=device)

        return cls(
            x=nan(n, k),
            forward_error=nan(k),
            backward_error=nan(),
            condition=nan(),
            accepted=torch.zeros(count, dtype=torch.bool, device=device),
            refined_error=nan(),
            growth=nan(),
        )
