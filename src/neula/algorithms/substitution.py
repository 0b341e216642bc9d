"""Solving with the factors of an LU factorization that are kept in a low format.

The unknowns are found in blocks: once a block is known, its columns of the factor are multiplied by it and
subtracted, so that the factors are read once, as they are stored, from the first column to the last and back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from neula.algorithms.lu import PackedLU
from neula.algorithms.lu_panels import blocks
from neula.engines.precision import exact_matmul
from neula.kernels.lu_block import triangular_inverses
from neula.kernels.mixed_product import subtract_product

WIDTH = 512
"""Unknowns in a block."""

SolveBlock = Callable[[int, torch.Tensor, bool], torch.Tensor]
"""Solves with one diagonal block of the factors, by its number: that of U if the last argument says so."""


def solve_factored(factors: PackedLU, b: torch.Tensor) -> torch.Tensor:
    """``x = U^-1 L^-1 P b``, by substitution in the precision of ``b``.

    Parameters
    ----------
    factors : PackedLU
        Of an n x n matrix.
    b : Tensor, shape (n, k)
        float32 or float64, on the device of the factors; not modified.

    Returns
    -------
    Tensor, shape (n, k)
        In the dtype of ``b``.

    Examples
    --------
    >>> import torch
    >>> from neula.algorithms.lu import lu_factorize
    >>> from neula.engines import EmulatedEngine
    >>> a = torch.tensor([[0.0, 2.0], [4.0, 8.0]])
    >>> factors = lu_factorize(a, EmulatedEngine(), pivoting=True)
    >>> solve_factored(factors, a.sum(1, keepdim=True))
    tensor([[1.],
            [1.]])
    """
    lu, steps = factors.lu, _steps(factors)

    def solve_block(i: int, b: torch.Tensor, upper: bool) -> torch.Tensor:
        return _substitute(lu[steps[i], steps[i]].to(b.dtype), b, upper)

    return _by_blocks(factors, b, solve_block)


@dataclass(frozen=True)
class Substitution:
    """Factors to solve with many times: the diagonal blocks are inverted once, and then they are products.

    Products with the inverse of a triangle lose more than substitution if the triangle is ill-conditioned:
    good enough for corrections, whose errors are measured and corrected in turn.

    Attributes
    ----------
    factors : PackedLU
    dtype : torch.dtype
        Precision in which to solve, float32 or float64.
    """

    factors: PackedLU
    dtype: torch.dtype

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        """``x = U^-1 L^-1 P b`` for b of shape (n, k) in the precision that was chosen. Waits for nothing."""
        if self.factors.lu.dtype == self.dtype:
            lower = _substitute(self.factors.lu, b[self.factors.permutation], upper=False)
            return _substitute(self.factors.lu, lower, upper=True)
        return _by_blocks(self.factors, b, lambda i, b, upper: exact_matmul(self._inverses[i][upper], b))

    @cached_property
    def _inverses(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Those of L and U of each diagonal block: together ``2 n WIDTH`` elements."""
        steps = _steps(self.factors)
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        # All of one width together; the last block may be narrower.
        for group in filter(None, (steps[:-1], steps[-1:])):
            diagonal = torch.stack([self.factors.lu[k, k] for k in group]).to(self.dtype)
            found.extend(zip(*triangular_inverses(diagonal), strict=True))
        return found


def _steps(factors: PackedLU) -> list[slice]:
    return list(blocks(slice(0, factors.lu.shape[0]), WIDTH))


def _by_blocks(factors: PackedLU, b: torch.Tensor, solve_block: SolveBlock) -> torch.Tensor:
    lu, steps = factors.lu, list(enumerate(_steps(factors)))
    x = b[factors.permutation]
    for i, k in steps:
        x[k] = solve_block(i, x[k], False)
        subtract_product(lu[k.stop :, k], x[k], x[k.stop :])
    for i, k in reversed(steps):
        x[k] = solve_block(i, x[k], True)
        subtract_product(lu[: k.start, k], x[k], x[: k.start])
    return x


def _substitute(lu: torch.Tensor, b: torch.Tensor, upper: bool) -> torch.Tensor:
    return torch.linalg.solve_triangular(lu, b, upper=upper, unitriangular=not upper)
