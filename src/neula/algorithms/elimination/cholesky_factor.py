"""Cholesky factors, as they are found and to solve with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from neula.algorithms.elimination.leading import LeadingColumns
from neula.algorithms.triangular.inverted import InvertedBlocks
from neula.engines.formats import double_of, in_double


class CholeskyFactorization(NamedTuple):
    """``A = L L^H`` of a batch, about."""

    # Shape (batch, n, n): L in the lower triangles, as the engine's unit reads it; what is above the diagonal
    # means nothing.
    lower: torch.Tensor
    # Shape (batch,): int32: 0, or the order of the first leading minor that is not positive; then L means
    # nothing.
    order: torch.Tensor
    leading: LeadingColumns | None = None  # the first columns, where rounding them would count


class NotPositiveDefiniteError(ArithmeticError):
    """A pivot is not positive: A, as it was rounded, is not positive definite.

    Attributes
    ----------
    order : int
        Of the leading minor that is not positive.
    """

    def __init__(self, order: int) -> None:
        super().__init__(f"the leading minor of order {order} is not positive")
        self.order = order


@dataclass(frozen=True)
class CholeskyFactor:
    """``A = L L^H``, about, of one matrix, to solve with."""

    lower: torch.Tensor  # shape (n, n): L in its lower triangle, in any format
    solver: InvertedBlocks  # L, to solve with in some precision
    width: int  # of the diagonal blocks that are inverted; 0 where the library substitutes
    lost: torch.Tensor | None = None  # shape (n, k): what the first columns of L lack
    rounded: bool = False  # whether products have rounded L to a low format
    symmetric: ClassVar[bool] = True

    @classmethod
    def from_factor(
        cls,
        lower: torch.Tensor,
        storage: torch.dtype,
        width: int,
        lost: torch.Tensor | None = None,
        *,
        rounded: bool = False,
    ) -> CholeskyFactor:
        """Prepare to solve in some precision."""
        solver = InvertedBlocks.from_factor(lower, storage, upper=False, width=width, lost=lost)
        return cls(lower, solver, width, lost, rounded)

    @property
    def growth(self) -> float:
        """1: elements of L are at most the square root of those of A (Higham 2002, section 10.1)."""
        return 1.0

    @property
    def narrow(self) -> bool:
        return self.rounded or self.lower.dtype.itemsize < self.solver.dtype.itemsize

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        x = self.solver.solve(b.to(self.solver.dtype, copy=True))
        return in_double(self.solver.mH.solve(x))

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        return self.solve(b)

    def in_double(self) -> CholeskyFactor:
        return CholeskyFactor.from_factor(self.lower, double_of(self.lower.dtype), self.width, self.lost)
