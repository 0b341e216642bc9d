"""The leading columns of a Cholesky factor, where rounding them to a low format would hide small eigenvalues.

An element of L that is rounded changes A by about ``u |l_ik| |l_kk|``. Of a matrix whose elements are smooth,
such as that of a kernel, a few columns hold nearly all, and of those to the right only what is added to the
diagonal is left. Then rounding the leading columns changes A by ``u`` times elements of A, in norm by up to
``u sqrt(n)`` times the largest: more than its smallest eigenvalue. All others are small, and so are their
rounding errors. So the first block of columns is kept, and multiplied, about as accurately as in single
precision, which adds a few percent to the operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from neula.kernels.products.kept import Kept, keep, multiply_kept

EXPLAINED = 0.5
"""Part of the diagonal that the first block of columns stands for from which on they are kept. Of a matrix
without structure they stand for as little as their number is of n."""


@dataclass(frozen=True)
class LeadingColumns:
    """The first columns of L."""

    columns: torch.Tensor  # shape (n, w): float32
    kept: Kept  # the same, to multiply with

    @classmethod
    def from_columns(cls, columns: torch.Tensor, sizes: torch.Tensor) -> Self | None:
        """Columns that are done, if they stand for most of the diagonal; the host waits for them.

        Parameters
        ----------
        columns : Tensor, shape (n, w)
            float32, lower triangular; elements above the diagonal are arbitrary.
        sizes : Tensor, shape (n,)
            Square roots of the diagonal of A.
        """
        n, w = columns.shape
        explained = (columns[w:] / sizes[w:, None]).square().sum(1).mean()
        if not bool(explained > EXPLAINED):
            return None
        columns = columns.tril()
        found = cls(columns, Kept.room(n, w, sizes))
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
