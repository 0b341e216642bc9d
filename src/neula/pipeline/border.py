"""Problems of many shapes in the shape of one: one CUDA graph serves all of them.

``[A 0; 0 s I; 0 0]`` with the right-hand side ``[b; 0]`` has the solution ``[x; 0]`` and the same residual.
Its columns divided by their norms have the singular values of B, and some that are 1, which lie between the
extreme ones of B, whose columns have norm 1: the condition number stays the same; and so do norms of A, if s
is one of its elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neula.engines.graphs import Inputs, Written

LEAST_ROWS, LEAST_COLUMNS = 32, 8  # sizes are multiples of these, and of a quarter of the power of two below


@dataclass(frozen=True)
class Border:
    # rows, columns: how many are added.
    rows: int = 0
    columns: int = 0

    @classmethod
    def around(cls, m: int, n: int) -> Border:
        """Rows and columns that pad a tall or square matrix to the next shape of a grid."""
        columns = _on_the_grid(n, LEAST_COLUMNS) - n
        rows = columns if m == n else _on_the_grid(m + columns, LEAST_ROWS) - m
        return cls(rows, columns)

    def put(self, a: torch.Tensor, b: torch.Tensor) -> Inputs:
        """The problem in its border, which is written where it is wanted."""
        if not self.rows:
            return a, b
        (count, m, n), k = a.shape, b.shape[2]
        shapes = torch.Size((count, m + self.rows, n + self.columns)), torch.Size((count, m + self.rows, k))
        return Written(shapes, (a, b), lambda room: write_bordered(a, b, *room))

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Solutions without what the border adds to them."""
        return x[:, : x.shape[1] - self.columns]


def _on_the_grid(size: int, least: int) -> int:
    """The smallest size of the grid that is not smaller."""
    step = max(least, 1 << max(0, size.bit_length() - 3))
    return -(-size // step) * step


def write_bordered(a: torch.Tensor, b: torch.Tensor, to_a: torch.Tensor, to_b: torch.Tensor) -> None:
    """Write ``[A 0; 0 s I; 0 0]`` and ``[b; 0]``, s being the largest magnitude in the first column of A."""
    _, m, n = a.shape
    to_a.zero_()[:, :m, :n] = a
    to_b.zero_()[:, :m] = b
    largest = torch.linalg.vector_norm(a[:, :, 0], torch.inf, dim=1)
    to_a[:, m:, n:].diagonal(dim1=1, dim2=2).copy_(largest[:, None])
