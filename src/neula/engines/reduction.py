"""Reductions over the rows of a tall matrix, which are all here, or spread over processes.

Whatever an algorithm contracts over rows, it takes the total of: products ``A^T B``, norms and maxima of
columns, R factors. Everything else is a product or a function of the rows at hand, or the same on all
processes. So the text of an algorithm says once where processes have to talk, and reads like its paper.
:class:`Reduction` is for rows that are all here, where nothing is left to do; that over processes is
:class:`neula.engines.sharded.RowsOfGroup`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from neula.kernels.magnitudes import two_norms

Factorize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # from a matrix to Q and R


class Reduction:
    """Rows that are all here."""

    spread: bool = False  # whether other processes have rows as well
    # Whether this process has the first rows: what a problem has besides those of the user (the rows of a
    # damping) belongs to it.
    begins: bool = True
    first: int = 0  # place of the first row here among all rows

    def count(self, m: int) -> int:
        """Number of all rows, given those of a matrix here."""
        return m

    def own(self, m: int) -> int:
        """How many of m rows here are rows of the matrix: a process without any works on a zero row."""
        return m

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """A sum over all rows, given that over the rows here."""
        return self.totals(x)[0]

    def totals(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Several sums in one message."""
        return parts

    def total_of_pairs(self, high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """A sum over all rows in twice the working precision, rounded once, given the sum over the rows here
        as one of two numbers.
        """
        return low + high

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """A maximum over all rows, given that over the rows here."""
        return x

    def norms(self, *matrices: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...]:
        """Norms of the columns of tall matrices, whose rows are counted by dimension ``dim``."""
        return tuple(two_norms(x, dim) for x in matrices)

    def total_and_norms(
        self, x: torch.Tensor, *matrices: torch.Tensor, dim: int = 0
    ) -> tuple[torch.Tensor, ...]:
        """A sum over all rows, and norms of columns as :meth:`norms` has them, in one message."""
        return x, *self.norms(*matrices, dim=dim)

    def agreed(self, *replicated: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Make replicated tensors equal on all processes, bit by bit: those of the first process.

        Decisions are taken on such numbers only, so that all processes take the same branch.
        """
        return replicated

    def agree(self, x: torch.Tensor) -> torch.Tensor:
        """Make one replicated tensor equal on all processes."""
        return self.agreed(x)[0]

    def agree_triangle(self, r: torch.Tensor) -> torch.Tensor:
        """Make a replicated upper triangular matrix equal on all processes, in place."""
        return r

    def merged(self, a: torch.Tensor, factorize: Factorize) -> tuple[torch.Tensor, torch.Tensor]:
        """Q and R of a tall matrix, shape (..., m, n), by a method that needs all rows."""
        return factorize(a)

    def merged_r(self, a: torch.Tensor, factorize: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """R alone."""
        return factorize(a)

    def gathered(self, a: torch.Tensor) -> torch.Tensor:
        """Gather the rows of all processes."""
        return a

    def first_of(self, bad: torch.Tensor, a: torch.Tensor) -> tuple[tuple[int, ...], complex, str] | None:
        """The first element of A that is marked: its place, its value, and whose it is; None if none is."""
        if not bool(bad.any()):
            return None
        where = tuple(int(i) for i in bad.nonzero()[0])
        return where, a[where].item(), ""


HERE = Reduction()  # reduction for matrices whose rows are all on this process
