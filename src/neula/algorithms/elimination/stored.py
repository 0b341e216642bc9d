"""Rows of a matrix that LU overwrites in half precision: what is read, updated, solved for, and written.

One number an element, or an unevaluated sum of two (Ootomo and Yokota's error correction): then factors are
about as accurate as in single precision, and each product is three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from neula.engines import Engine
from neula.kernels.batched_product import SHIFT, split
from neula.kernels.lu_block import solve_upper


class Stored(Protocol):
    """A matrix of shape (n, k), row-major, that turns into L and U."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def low(self) -> torch.dtype:
        """Format of panels once they are factorized."""

    @property
    def parts(self) -> torch.Tensor:
        """All that is stored, shape (parts, n, k)."""

    @property
    def inverts_whole(self) -> bool:
        """Whether rows of U are solved for by the inverse of a whole block of L, and not block by block."""

    def read(self, rows: slice, columns: slice, out: torch.Tensor) -> torch.Tensor:
        """Elements in single precision."""

    def write(self, x: torch.Tensor, rows: slice, columns: slice) -> None:
        """What a panel, or its rows of U, have become."""

    def subtract(self, rows: slice, done: slice, columns: slice, out: torch.Tensor) -> None:
        """``out -= A[rows, done] A[done, columns]``, in single precision."""

    def solve(self, k: slice, columns: slice, l_inverses: torch.Tensor) -> None:
        """``L_kk U_kj = A_kj - L_ki U_ij`` for all columns to the left of k, which are done."""

    def solve_updated(self, x: torch.Tensor, k: slice, columns: slice, l_inverses: torch.Tensor) -> None:
        """``L_kk U_kj = X``."""


@dataclass(frozen=True)
class InOnePart:
    """In a low format, whose matrix unit rounds sums once.

    Attributes
    ----------
    matrix : Tensor, shape (n, k)
    engine : Engine
        In that format.
    """

    matrix: torch.Tensor
    engine: Engine
    inverts_whole: ClassVar[bool] = False

    @property
    def shape(self) -> torch.Size:
        return self.matrix.shape

    @property
    def low(self) -> torch.dtype:
        return self.matrix.dtype

    @property
    def parts(self) -> torch.Tensor:
        return self.matrix[None]

    def read(self, rows: slice, columns: slice, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(self.matrix[rows, columns])

    def write(self, x: torch.Tensor, rows: slice, columns: slice) -> None:
        self.matrix[rows, columns] = x

    def subtract(self, rows: slice, done: slice, columns: slice, out: torch.Tensor) -> None:
        self.engine.gemm(self.matrix[rows, done], self.matrix[done, columns], out, alpha=-1.0, beta=1.0)

    def solve(self, k: slice, columns: slice, l_inverses: torch.Tensor) -> None:
        done, matrix = slice(0, k.start), self.matrix
        if k.start > 0:
            self.engine.gemm_low(matrix[k, done], matrix[done, columns], matrix[k, columns])
        # From the first rows as they are rounded: so the next ones make good what rounding has lost.
        solve_upper(matrix[k, columns].T, matrix[k, k].T, l_inverses.mT)

    def solve_updated(self, x: torch.Tensor, k: slice, columns: slice, l_inverses: torch.Tensor) -> None:
        self.write(x, k, columns)
        solve_upper(self.matrix[k, columns].T, self.matrix[k, k].T, l_inverses.mT)


@dataclass(frozen=True)
class InTwoParts:
    """As sums of two numbers of half precision, 22 bits.

    Attributes
    ----------
    parts : Tensor, shape (2, n, n)
        As :func:`neula.kernels.batched_product.split` makes them.
    engine : Engine
        In half precision.
    """

    parts: torch.Tensor
    engine: Engine
    inverts_whole: ClassVar[bool] = True

    @property
    def shape(self) -> torch.Size:
        return self.parts.shape[1:]

    @property
    def low(self) -> torch.dtype:
        return torch.float32

    def read(self, rows: slice, columns: slice, out: torch.Tensor) -> torch.Tensor:
        first, second = self.parts[:, rows, columns]
        return torch.add(out.copy_(first), second, alpha=2.0**-SHIFT, out=out)

    def write(self, x: torch.Tensor, rows: slice, columns: slice) -> None:
        split(x[None], self.parts.dtype, 2, out=self.parts[:, None, rows, columns])

    def subtract(self, rows: slice, done: slice, columns: slice, out: torch.Tensor) -> None:
        self._subtract(self.parts[:, rows, done], self.parts[:, done, columns], out)

    def solve(self, k: slice, columns: slice, l_inverses: torch.Tensor) -> None:
        rows, width = k.stop - k.start, columns.stop - columns.start
        # With rows at whole lines of memory, whatever their width.
        x = self.engine.empty(width, rows, dtype=torch.float32).T
        self.subtract(k, slice(0, k.start), columns, self.read(k, columns, x))
        self.solve_updated(x, k, columns, l_inverses)

    def solve_updated(self, x: torch.Tensor, k: slice, columns: slice, l_inverses: torch.Tensor) -> None:
        right = self._split(x)
        self._subtract(self._split(-l_inverses[0]), right, x.zero_())
        self.write(x, k, columns)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return split(x[None], self.parts.dtype, 2)[:, 0]

    def _subtract(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """The product of the second parts is left out: it is as small as what rounding them has lost."""
        if a.shape[2] == 0:
            return
        for i, j in ((0, 1), (1, 0), (0, 0)):
            self.engine.gemm(a[i], b[j], out, alpha=-(2.0 ** (-SHIFT * (i + j))), beta=1.0)
