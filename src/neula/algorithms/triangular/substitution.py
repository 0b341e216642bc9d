"""Solving with the factors of an LU factorization that are kept in a low format.

The unknowns are found in blocks: once a block is known, its columns of the factor are multiplied by it and
subtracted, so that the factors are read once, as they are stored, from the first column to the last and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from neula.algorithms.elimination.lu import PackedLU
from neula.algorithms.triangular.inverted import InvertedLU, inverted_factors

WIDTH, WIDEST = 512, 2048  # unknowns in a block, at least and at most

BLOCKS = 8
"""Blocks in a factor of less than ``BLOCKS WIDEST`` columns: each is four launches, which take a GPU longer
than what is in them."""


@dataclass(frozen=True)
class Substitution:
    """LU factors to solve with, any number of times, in one precision.

    Where the factors are stored in that precision, by substitution. Where they are narrower, their diagonal
    blocks are inverted the first time, and from then on there are only products. These may lose more than
    substitution, as much as the diagonal blocks are ill-conditioned: but in a precision in which the unit
    roundoff is smaller by ``2**-13`` or more than that of the factors, whose errors hide it.

    >>> from neula.algorithms.elimination.lu import lu_factorize
    >>> from neula.engines import EmulatedEngine
    >>> a = torch.tensor([[0.0, 2.0], [4.0, 8.0]])
    >>> factors = lu_factorize(a, EmulatedEngine(), pivoting=True)
    >>> Substitution(factors, torch.float32).solve(a.sum(1, keepdim=True))
    tensor([[1.],
            [1.]])
    """

    factors: PackedLU  # of an n x n matrix
    dtype: torch.dtype  # in single or double precision
    # Whether diagonal blocks are inverted in any case: a GPU substitutes for few vectors many times slower.
    inverts: bool = False

    @classmethod
    def prepared(cls, factors: PackedLU, dtype: torch.dtype) -> Substitution:
        """One that any thread may use from now on, in any stream: all that it keeps is there."""
        solver = cls(factors, dtype)
        if solver._by_inverses:
            _ = solver._inverted
            if factors.lu.is_cuda:
                torch.cuda.current_stream(factors.lu.device).synchronize()
        return solver

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        """``x = U^-1 L^-1 P b``, without waiting for the device; b is in the dtype that was chosen, and not
        modified.
        """
        if self._by_inverses:
            return self._inverted.solve(b)
        lu = self.factors.lu
        x = torch.linalg.solve_triangular(lu, b[self.factors.permutation], upper=False, unitriangular=True)
        return torch.linalg.solve_triangular(lu, x, upper=True)

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        """``x = P^T L^-H U^-H b``, as :meth:`solve`."""
        if self._by_inverses:
            return self._inverted.solve_transposed(b)
        lu = self.factors.lu.mH
        x = torch.linalg.solve_triangular(lu, b, upper=False)
        found = torch.empty_like(x)
        found[self.factors.permutation] = torch.linalg.solve_triangular(lu, x, upper=True, unitriangular=True)
        return found

    @property
    def _by_inverses(self) -> bool:
        return self.inverts or self.factors.lu.dtype != self.dtype

    @cached_property
    def _inverted(self) -> InvertedLU:
        """L and U with the inverses of their diagonal blocks, together at most ``2 n WIDEST`` elements."""
        lu, dtype = self.factors.lu, self.dtype
        width = min(WIDEST, WIDTH * max(1, lu.shape[0] // (BLOCKS * WIDTH)))
        factors = inverted_factors(lu, dtype, width, refining=lu.dtype == dtype)
        return InvertedLU(*factors, self.factors.permutation[:, None])
