"""What iterative refinement needs of a factorization, and those that libraries compute in one precision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from neula.engines import Engine

_BLOCK = 256
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


def library_lu(a: torch.Tensor, engine: Engine) -> LibraryLU:
    """Gaussian elimination with partial pivoting as the library has it.

    Parameters
    ----------
    a : Tensor, shape (n, n)
    engine : Engine
        Measures the growth; nothing is multiplied in its format.

    Raises
    ------
    SingularMatrixError
        At the first pivot that is exactly zero.
    """
    lu, pivots, info = torch.linalg.lu_factor_ex(a)
    if int(info) > 0:
        raise SingularMatrixError(int(info) - 1)
    return LibraryLU(lu, pivots, growth_of(lu, engine.column_max(a).amax(), engine))


def growth_of(lu: torch.Tensor, largest: torch.Tensor, engine: Engine) -> float:
    """Largest element of U, stored in the upper triangle of ``lu``, by the largest element of A.

    Parameters
    ----------
    lu : Tensor, shape (n, n)
        Column-major.
    largest : Tensor, shape ()
        Largest magnitude in A; where it is zero, the growth is 1.
    engine : Engine
    """
    starts = range(0, lu.shape[0], _BLOCK)
    # Transposed, since the engine reads by rows.
    above = [lu[:i, i : i + _BLOCK].T for i in starts[1:]]
    diagonal = [lu[i : i + _BLOCK, i : i + _BLOCK].T.tril() for i in starts]
    found = torch.stack([engine.column_max(block).amax() for block in above + diagonal]).amax()
    return float(torch.where(largest > 0, found / largest, 1.0))
