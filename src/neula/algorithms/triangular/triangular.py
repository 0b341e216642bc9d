"""R to solve with again and again: a matrix, or one whose diagonal blocks are inverted.

A preconditioner R only has to be the same linear map each time: what products lose with inverses of
ill-conditioned blocks (:mod:`neula.algorithms.triangular.inverted`) does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from neula.algorithms.triangular.inverted import InvertedBlocks, diagonal_blocks
from neula.kernels.precision import exact_matmul
from neula.kernels.triangular_inverse import triangular_inverse

LEAF = 128  # order of the blocks that the library inverts, all in one launch


@dataclass(frozen=True)
class BlockTriangular:
    """``R D^-1`` with an upper triangular R, in the precision of R.

    >>> r = BlockTriangular.from_factor(torch.tensor([[2.0, 4.0], [0.0, 8.0]]), width=128)
    >>> r.solve(torch.tensor([[6.0], [8.0]], dtype=torch.float64)).flatten()
    tensor([1., 1.], dtype=torch.float64)
    """

    r: torch.Tensor  # shape (n, n)
    # Shape (blocks, width, width). Of the diagonal blocks of R; what the last one lacks is filled up with the
    # identity matrix. Where there are no blocks, the library solves with R.
    inverses: torch.Tensor
    scales: torch.Tensor | None = None  # shape (n,): the diagonal of D, float64; the identity by default

    @property
    def dtype(self) -> torch.dtype:
        return self.r.dtype

    @classmethod
    def from_factor(cls, r: torch.Tensor, width: int) -> Self:
        """Invert blocks of at most ``width`` columns, a power of two times :data:`LEAF`."""
        while width >= 2 * len(r) and width > LEAF:
            width //= 2
        return cls(r, triangular_inverse(diagonal_blocks(r, r.dtype, width), upper=True, leaf=LEAF))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.r, self.inverses) if self.scales is None else (self.r, self.inverses, self.scales)

    def scaled(self, scales: torch.Tensor) -> Self:
        return replace(self, scales=scales)

    @property
    def shape(self) -> torch.Size:
        return self.r.shape

    def diagonal(self) -> torch.Tensor:
        """Diagonal of R, without the scales."""
        return self.r.diagonal()

    def solve(self, x: torch.Tensor) -> torch.Tensor:
        """``D R^-1 x`` for the columns of x, shape (n, k), in its precision."""
        out = self._solve(self.r, x, upper=True)
        # Powers of two in the precision of x, to which the product is promoted.
        return out.to(x.dtype) if self.scales is None else out * self.scales[:, None]

    def solve_transposed(self, x: torch.Tensor) -> torch.Tensor:
        """``R^-H D x``."""
        return self._solve(self.r.mH, x, self.scales, upper=False).to(x.dtype)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """``R D^-1 x``."""
        y = x if self.scales is None else x / self.scales[:, None]
        return exact_matmul(self.r, y.to(self.r.dtype)).to(x.dtype)

    def _solve(
        self, t: torch.Tensor, x: torch.Tensor, scales: torch.Tensor | None = None, *, upper: bool
    ) -> torch.Tensor:
        """``T^-1 D x`` for R or its transpose."""
        if len(self.inverses) == 0:
            right = x if scales is None else x * scales[:, None]
            return torch.linalg.solve_triangular(t, right.to(t.dtype), upper=upper)
        right = torch.empty(x.T.shape, dtype=t.dtype, device=x.device).T  # contiguous columns
        right = right.copy_(x) if scales is None else torch.mul(x, scales[:, None], out=right)
        return InvertedBlocks(t, self.inverses if upper else self.inverses.mH, t.dtype, upper).solve(right)


UpperTriangular = torch.Tensor | BlockTriangular
"""R as callers have it: a matrix, with which the library solves, or one that is prepared."""


def triangular(r: UpperTriangular) -> BlockTriangular:
    return r if isinstance(r, BlockTriangular) else BlockTriangular(r, r.new_empty(0, 0, 0))
