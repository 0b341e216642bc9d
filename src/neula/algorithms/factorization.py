"""What iterative refinement needs of a factorization, and those that libraries compute in one precision."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch

_BLOCK = 1024
"""Order of diagonal blocks, whose copies are small beside the matrix."""


class Factorization(Protocol):
    """Solves with A approximately, as accurately as the arithmetic allowed in which A was factorized."""

    @property
    def growth(self) -> float:
        """Largest element of U by that of A: how much elimination magnified rounding errors."""

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        """``A^-1 b``, about, for the columns of b, shape (n, k), float64 in and out."""

    def in_double(self) -> Factorization:
        """The same factors, which then solve in double precision: their errors stay, no others come."""


class SingularMatrixError(ArithmeticError):
    """A pivot is zero, so that there are no factors to solve with.

    Attributes
    ----------
    index : int
        Of the pivot, from 0.
    """

    def __init__(self, index: int) -> None:
        super().__init__(f"pivot {index} is exactly zero")
        self.index = index


@dataclass(frozen=True)
class LibraryLU:
    """``P A = L U`` by LAPACK or cuSOLVER, with partial pivoting, in the precision of ``lu``."""

    lu: torch.Tensor
    pivots: torch.Tensor
    growth: float

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        return torch.linalg.lu_solve(self.lu, self.pivots, b.to(self.lu.dtype)).double()

    def in_double(self) -> LibraryLU:
        return replace(self, lu=self.lu.double())


def library_lu(a: torch.Tensor) -> LibraryLU:
    """Gaussian elimination with partial pivoting as the library has it.

    Parameters
    ----------
    a : Tensor, shape (n, n)

    Raises
    ------
    SingularMatrixError
        At the first pivot that is exactly zero.
    """
    lu, pivots, info = torch.linalg.lu_factor_ex(a)
    if int(info) > 0:
        raise SingularMatrixError(int(info) - 1)
    return LibraryLU(lu, pivots, growth_of(lu, float(torch.linalg.vector_norm(a, math.inf))))


def growth_of(lu: torch.Tensor, largest: float) -> float:
    """Largest element of U, stored in the upper triangle of ``lu``, by the largest element of A.

    Parameters
    ----------
    lu : Tensor, shape (n, n)
    largest : float
        Largest magnitude in A.
    """
    starts = range(0, lu.shape[0], _BLOCK)
    above = [lu[:i, i : i + _BLOCK] for i in starts[1:]]
    diagonal = [lu[i : i + _BLOCK, i : i + _BLOCK].triu() for i in starts]
    blocks = [torch.linalg.vector_norm(block, math.inf) for block in above + diagonal]
    return float(torch.stack(blocks).amax()) / largest if largest > 0 else 1.0
