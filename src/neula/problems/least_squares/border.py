"""Problems of many shapes in the shape of one: what is played back serves all of them.

A CUDA graph is made for one shape, and pays from its second call on. Small problems, whose launches take
longer than their arithmetic, are bordered to shapes of a grid: ``[A 0; 0 I; 0 0]`` with the right-hand side
``[b; 0]`` has the solution ``[x; 0]`` and the same residual. Its columns divided by their norms have the
singular values of B, and some that are 1. Those lie between the extreme ones of B, whose columns have norm 1,
so the condition number stays the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from neula.problems.least_squares.problem import Members, Options

LEAST_ROWS, LEAST_COLUMNS = 32, 8
"""Sizes are multiples of these, and of a quarter of the power of two below them."""


@dataclass(frozen=True)
class Border:
    """How a problem is bordered.

    Attributes
    ----------
    rows, columns : int
        How many are added.
    """

    rows: int = 0
    columns: int = 0

    @classmethod
    def of(cls, a: torch.Tensor, options: Options) -> Border:
        """That of A, shape (batch, m, n): none for batches, large, wide, weighted and damped problems."""
        count, m, n = a.shape
        special = m < n or options.damp or options.weights is not None
        if special or count > 1 or m * n**2 > options.engine.tuning.bordered:
            return cls()
        columns = _on_the_grid(n, LEAST_COLUMNS) - n
        return cls(_on_the_grid(m + columns, LEAST_ROWS) - m, columns)

    def put(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The problem in its border."""
        if not self.rows:
            return a, b
        (count, m, n), rows = a.shape, a.shape[1] + self.rows
        bordered = a.new_zeros(count, rows, n + self.columns)
        bordered[:, :m, :n] = a
        bordered[:, m:, n:].diagonal(dim1=1, dim2=2).fill_(1.0)
        below = b.new_zeros(count, rows, b.shape[2])
        below[:, :m] = b
        return bordered, below

    def take(self, members: Members, numbers: torch.Tensor) -> Members:
        """The solution without what the border adds to it, also to the numbers that were measured."""
        if not self.columns:
            return members
        numbers[Members.names.index("rank")] -= self.columns
        return replace(members, x=members.x[:, : -self.columns], rank=members.rank - self.columns)


def _on_the_grid(size: int, least: int) -> int:
    """The smallest size of the grid that is not smaller."""
    step = max(least, 1 << max(0, size.bit_length() - 3))
    return -(-size // step) * step
