"""Options of linear systems, the systems, and their measured solutions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from neula.certificates.bounds import solve_bound
from neula.certificates.verdict import Limits
from neula.engines import FORMATS, FP32, FP64, Format
from neula.errors import counted
from neula.pipeline import solutions
from neula.pipeline.batches import Batch
from neula.pipeline.solutions import Solutions

ASYMMETRIC = 1e-6
"""Part of the largest element by which others differ from their mirrors where that is no rounding error."""

STRIP = 512  # rows that are compared with columns at a time


@dataclass(frozen=True)
class DirectTuning:
    """Orders of systems by the library in double precision."""

    # direct, direct_pivoted, direct_definite: below which it is as fast as a cheaper LU, LU with partial
    # pivoting, or Cholesky factorization, with refinement.
    direct: int
    direct_pivoted: int
    direct_definite: int
    direct_single: float  # from which on its LU in single precision comes first where that is enough
    swaps: bool  # whether interchanging rows costs little compared with the products


@dataclass(frozen=True)
class QueuedTuning:
    """Orders of systems that are launched as a whole on a GPU, with factors that need no pivots."""

    # queued, queued_definite: up to which.
    queued: int
    queued_definite: int
    normal_equations: int  # up to which normal equations come before
    harmless: float  # from which on LU in half precision is tried before, on matrices that need no pivots


@dataclass(frozen=True)
class DoubledTuning:
    """Sizes from which residuals in twice the working precision cost little compared with the factors."""

    doubled_order: int  # largest order
    doubled_columns: float  # most right-hand sides


@dataclass(frozen=True, kw_only=True)
class SystemsOptions(solutions.SolutionOptions):
    positive: bool  # whether A is said to be symmetric positive definite
    pivot: str | None
    compute: Format | None  # of the products in the first factorizations, where it is named

    @property
    def formats(self) -> list[Format]:
        """Formats of the factors to try before the library's in double precision, cheapest first."""
        if self.compute is not None:
            return [self.compute]
        formats = [FORMATS[name] for name in self.engine.tuning.preconditioners]
        if self.named:
            return formats[:1]
        # With the library's LU in double precision at the end, ours is not worth a try.
        return [format for format in formats if format is not FP64]

    @property
    def definite(self) -> list[str]:
        if self.compute is not None:
            return list(dict.fromkeys([self.compute.name, FP64.name]))
        return list(self.engine.tuning.definite)

    def library_formats(self, n: int) -> list[str]:
        """Formats of the library's LU of order n, cheapest first."""
        low = self.target is not FP64 and n >= self.engine.tuning[DirectTuning].direct_single
        return [FP32.name, FP64.name] if low else [FP64.name]

    def doubled(self, n: int, k: int) -> bool:
        """Whether residuals are in twice the working precision: where it costs little, or is asked for."""
        most = self.engine.tuning[DoubledTuning]
        return self.forward or (n <= most.doubled_order and k <= most.doubled_columns)

    def limits(self, n: int) -> Limits:
        return Limits.for_shape((n, n), solve_bound(self.target, n), self.largest_error)

    @property
    def named(self) -> bool:
        return self.pivot is not None


@dataclass(frozen=True)
class SystemsSolutions(Solutions):
    growth: torch.Tensor  # shape (batch,)

    names: ClassVar[tuple[str, ...]] = (*Solutions.names, "growth")

    def numbers(self) -> list[torch.Tensor]:
        return [*super().numbers(), self.growth]


@dataclass(frozen=True)
class Systems(Batch):
    a: torch.Tensor  # shape (batch, n, n)
    b: torch.Tensor  # shape (batch, n, k)
    options: SystemsOptions
    # int: where they are in the batch that the user gave, of which they are all by default.
    places: torch.Tensor | None = None

    def at(self, places: torch.Tensor) -> Self:
        found = super().at(places)
        return replace(found, places=places) if self.places is None else found

    def place(self, i: int) -> int:
        return i if self.places is None else int(self.places[i])


def in_words(error: float, bound: float, forward_error: float, iterations: int, growth: float) -> str:
    return (
        f"backward error {error:.1e} (bound {bound:.1e}), forward error {forward_error:.1e}, "
        f"{counted(iterations, 'iteration')}, growth {growth:.1e}"
    )


def asymmetry(a: torch.Tensor) -> str:
    """A remark if A, shape (batch, n, n), is said to be positive definite and is not Hermitian."""
    strips = zip(a.split(STRIP, 1), a.split(STRIP, 2), strict=True)
    difference = max(float((rows - columns.mH).abs().amax()) for rows, columns in strips)
    if not difference > ASYMMETRIC * float(a.abs().amax()):
        return ""
    kind = "Hermitian" if a.is_complex() else "symmetric"
    return (
        f"; A is not {kind}, elements differ from their mirrors by up to {difference:.1e}: "
        "leave assume_a='pos' out"
    )
