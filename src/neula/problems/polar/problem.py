"""What a polar decomposition asks for, the matrices, and what is known of their factors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neula.algorithms.scaling import power_of_two_scales
from neula.certificates.polar import PolarBounds
from neula.engines import BF16, FP32, FP64, Engine, Format
from neula.pipeline.batches import Batch, Values
from neula.pipeline.progress import Progress


@dataclass(frozen=True)
class Options:
    """What is asked for.

    Attributes
    ----------
    target : Format
        The format whose accuracy the factors are to have.
    engine : Engine
    rcond : float, optional
        Singular values of A up to this part of the largest are to become zero; those that the working
        precision cannot tell from zero where it is None.
    completion : bool
        Whether all singular values are to become 1.
    progress : callable, optional
    """

    target: Format
    engine: Engine
    rcond: float | None = None
    completion: bool = False
    progress: Progress | None = None

    @property
    def work(self) -> Format:
        """What factors are computed in, or to the accuracy of, where nothing cheaper does."""
        return FP64 if self.target is FP64 else FP32

    @property
    def cutoff(self) -> float:
        """Singular values up to this part of the largest count as zero."""
        return self.work.u if self.rcond is None else self.rcond

    @property
    def small_too(self) -> bool:
        """Whether it matters where small singular values end."""
        return self.target is not BF16 or self.completion or self.rcond is not None

    def bounds(self, m: int, n: int) -> PolarBounds:
        """What is asked of matrices of this shape."""
        return PolarBounds.of(self.target, m, n)


@dataclass(frozen=True)
class Matrices(Batch):
    """A batch of matrices as they were given.

    Attributes
    ----------
    a : Tensor, shape (batch, m, n)
    options : Options
    """

    a: torch.Tensor
    options: Options

    @property
    def wide(self) -> torch.Tensor:
        """Those at most as long as wide: shape (batch, k, length), k <= length."""
        return as_wide(self.a)


@dataclass(frozen=True)
class PolarValues(Values):
    """Factors, and what was measured of them.

    Attributes
    ----------
    u : Tensor, shape (batch, m, n)
        In working precision.
    rank : Tensor, shape (batch,)
        int64: singular values that became 1; -1 where what is measured says it.
    measures : Tensor, shape (batch, numbers)
        As in :func:`neula.certificates.polar.polar_measures`.
    """

    u: torch.Tensor
    rank: torch.Tensor
    measures: torch.Tensor


def is_wide(a: torch.Tensor) -> bool:
    """Whether matrices have more columns than rows."""
    return a.shape[-2] < a.shape[-1]


def as_wide(a: torch.Tensor) -> torch.Tensor:
    """Matrices as they are, tall and square ones transposed."""
    return a if is_wide(a) else a.mT


def scaled(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Wide matrices times powers of two, so that elements of ``A A^T`` are near 1 at most.

    Parameters
    ----------
    wide : Tensor, shape (batch, k, m)
    dtype : torch.dtype
        Of the result: float32 or float64.
    """
    enough = torch.promote_types(wide.dtype, torch.float32)
    largest = torch.linalg.vector_norm(wide, torch.inf, dim=(1, 2)).to(enough)
    root = 2.0 ** -((wide.shape[2].bit_length() - 1) // 2)
    # One factor after the other: together they may be out of range.
    return ((wide * power_of_two_scales(largest)[:, None, None]) * root).to(dtype)
