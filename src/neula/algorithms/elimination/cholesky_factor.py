"""Cholesky factors, as they are found and to solve with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch

from neula.algorithms.triangular.inverted import InvertedBlocks
from neula.engines.formats import double_of, in_double
from neula.kernels.products.gemm import multiply_kept
from neula.kernels.products.kept import Kept, keep

EXPLAINED = 0.5
"""Part of the diagonal that the first block of columns stands for from which on they are kept. Of a matrix
without structure they stand for as little as their number is of n."""


@dataclass(frozen=True)
class LeadingColumns:
    """The leading columns of L, where rounding them to a low format would hide small eigenvalues.

    An element of L that is rounded changes A by about ``u |l_ik| |l_kk|``. Of a matrix whose elements are
    smooth, such as that of a kernel, a few columns hold nearly all, and rounding these changes A in norm by
    up to ``u sqrt(n)`` times its largest element: more than its smallest eigenvalue. All others are small,
    and so are their rounding errors. So the first block of columns is kept, and multiplied, about as
    accurately as in single precision, which adds a few percent to the operations.
    """

    columns: torch.Tensor  # shape (n, w): float32
    kept: Kept  # the same, to multiply with

    @classmethod
    def from_columns(cls, columns: torch.Tensor, sizes: torch.Tensor) -> Self | None:
        """Columns that are done, if they stand for most of the diagonal; the host waits for them.

        They are float32, with anything above the diagonal; ``sizes`` are the square roots of the diagonal of
        A.
        """
        n, w = columns.shape
        explained = (columns[w:] / sizes[w:, None]).square().sum(1).mean()
        if not bool(explained > EXPLAINED):
            return None
        columns = columns.tril()
        found = cls(columns, Kept.empty(n, w, sizes))
        keep(columns, found.kept)
        return found

    def subtract(self, c: torch.Tensor, rows: slice, columns: slice, spare: int) -> None:
        """``C - L_rows L_columns^T`` in place of C."""
        every = slice(0, self.columns.shape[1])
        x, y = self.kept.block(rows, every), self.kept.block(columns, every)
        multiply_kept(c, x, y, alpha=-1.0, beta=1.0, spare=spare)

    def lost(self, lower: torch.Tensor) -> torch.Tensor:
        """Rounding errors of the low-precision copy of these columns, shape (n, w)."""
        return self.columns - lower[:, : self.columns.shape[1]].to(self.columns.dtype)


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
    """The pivot of the leading minor of some order is not positive: A, as it was rounded, is not positive
    definite.
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
    # Elements of L are at most the square root of those of A (Higham 2002, section 10.1).
    growth: ClassVar[float] = 1.0

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
    def narrow(self) -> bool:
        return self.rounded or self.lower.dtype.itemsize < self.solver.dtype.itemsize

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        x = self.solver.solve(b.to(self.solver.dtype, copy=True))
        return in_double(self.solver.mH.solve(x))

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        return self.solve(b)

    def in_double(self) -> CholeskyFactor:
        return CholeskyFactor.from_factor(self.lower, double_of(self.lower.dtype), self.width, self.lost)
