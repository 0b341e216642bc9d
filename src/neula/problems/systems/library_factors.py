"""The library's factors of the systems of a batch, and how to solve with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import torch

from neula.algorithms.elimination.double_cholesky import blocks_pay, double_cholesky
from neula.algorithms.elimination.factorization import inverted_lu
from neula.algorithms.scaling import binary_exponents
from neula.algorithms.triangular.inverted import InvertedBlocks
from neula.engines import FP64, Engine, Format, Tuning
from neula.kernels.magnitudes import largest_magnitude
from neula.kernels.refining import over
from neula.kernels.shift import shift
from neula.problems.systems.scaled import ScaledSystems


class SingularMember(np.linalg.LinAlgError):
    """One matrix of a batch has no factors.

    Attributes
    ----------
    place : int
    why : str
    """

    def __init__(self, place: int, why: str) -> None:
        super().__init__(why)
        self.place, self.why = place, why


class LibraryFactors(Protocol):
    """What is solved with."""

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        """``A^-1 b``."""

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        """``A^-T b``."""


@dataclass(frozen=True)
class _LU:
    """LU factors in single or double precision, of systems in double."""

    lu: torch.Tensor
    pivots: torch.Tensor

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        if self.lu.dtype == b.dtype:
            return torch.linalg.lu_solve(self.lu, self.pivots, b)
        # Updates in single precision would underflow, and seem to be exact.
        exponents = binary_exponents(largest_magnitude(b, 1, keepdim=True))
        found = torch.linalg.lu_solve(self.lu, self.pivots, shift(b, -exponents).to(self.lu.dtype))
        return shift(found.double(), exponents)

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        return torch.linalg.lu_solve(self.lu, self.pivots, b.to(self.lu.dtype), adjoint=True).double()


Factor = TypeVar("Factor")


@dataclass(frozen=True)
class SymmetricallyScaled(Generic[Factor]):
    """Cholesky factors of a symmetric matrix whose rows and columns are scaled by themselves.

    Attributes
    ----------
    factor : object
        Of ``diag(2^-e) A diag(2^-e)``.
    exponents : (Tensor, Tensor) of int, shape (batch, n, 1) each, or None
        Between the rows of the two, and between the columns; None where they are the same matrix.
    """

    factor: Factor
    exponents: tuple[torch.Tensor, torch.Tensor] | None

    @classmethod
    def factorize(cls, scaled: ScaledSystems, factorize: Callable[[torch.Tensor], Factor]) -> Self:
        """Factorize symmetric matrices, shape (batch, n, n)."""
        if scaled.given:  # so is the diagonal, then: no element of a row is larger than its root
            return cls(factorize(scaled.a), None)
        exponents = scaled.symmetric()
        rows, columns = scaled.rows - exponents, scaled.columns.mT - exponents
        return cls(factorize(shift(scaled.a, rows + columns.mT)), (rows, columns))

    def solving(self, solve: Callable[[torch.Tensor], torch.Tensor]) -> _SymmetricallyScaledSolver:
        """These as factors of the systems, given how to solve with ``L L^T``."""
        return _SymmetricallyScaledSolver(solve, self.exponents)


def to_factorize(a: torch.Tensor, engine: Engine) -> torch.Tensor:
    """Symmetric matrices for :func:`double_cholesky`, which stay as they are."""
    # A GPU's library has them by columns, and copies them faster as they lie (order 12000: 19.0 ms, not 19.9)
    a = a.mT if a.is_cuda and a.stride(-1) == 1 else a
    return a.clone() if blocks_pay(a, engine) else a


@dataclass(frozen=True)
class _SymmetricallyScaledSolver:
    """A solver with :class:`SymmetricallyScaled` factors as one of the systems.

    Attributes
    ----------
    solve_scaled : callable
    exponents : (Tensor, Tensor) or None
    """

    solve_scaled: Callable[[torch.Tensor], torch.Tensor]
    exponents: tuple[torch.Tensor, torch.Tensor] | None

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        if self.exponents is None:
            return self.solve_scaled(b)
        rows, columns = self.exponents
        return shift(self.solve_scaled(shift(b, rows)), columns)

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        if self.exponents is None:
            return self.solve_scaled(b)
        rows, columns = self.exponents
        return shift(self.solve_scaled(shift(b, columns)), rows)


def lu_factors(scaled: ScaledSystems, format: Format, tuning: Tuning) -> tuple[LibraryFactors, torch.Tensor]:
    lu, pivots, info = torch.linalg.lu_factor_ex(scaled.a.to(format.storage))
    if bool((info > 0).any()):
        place = int((info > 0).nonzero()[0, 0])
        raise SingularMember(
            place,
            f"A is singular: pivot {int(info[place]) - 1} is exactly zero (counted from 0); neula.lstsq "
            "gives the solution of minimum norm",
        )
    largest = largest_magnitude(scaled.a, (1, 2))
    inverted = inverted_lu(lu, pivots, tuning) if format is FP64 else None
    factors = inverted or _LU(lu, pivots)
    return factors, over(_largest_of_u(lu).double(), largest)


def _largest_of_u(lu: torch.Tensor) -> torch.Tensor:
    """Largest elements of U, shape (batch,); those of L are at most 1."""
    largest = largest_magnitude(lu, (1, 2))
    return largest if bool((largest > 1).all()) else largest_magnitude(lu.triu(), (1, 2))


def _by_substitution(lower: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``(L L^T)^-1 b``; the library's solver for both copies L each time."""
    half = torch.linalg.solve_triangular(lower, b, upper=False)
    return torch.linalg.solve_triangular(lower.mT, half, upper=True)


def cholesky_factors(
    a: torch.Tensor, scaled: ScaledSystems, engine: Engine
) -> tuple[LibraryFactors, torch.Tensor]:
    diagonal = a.diagonal(dim1=1, dim2=2)
    bad = (diagonal <= 0).nonzero()
    if len(bad):
        place, i = bad[0].tolist()
        raise SingularMember(
            place,
            f"A is not positive definite: A[{i}, {i}] is {float(diagonal[place, i])}; "
            "solve it with assume_a='gen'",
        )
    found = SymmetricallyScaled.factorize(scaled, lambda a: double_cholesky(to_factorize(a, engine), engine))
    lower, info = found.factor.lower, found.factor.order
    singular = (info > 0).nonzero()[:, 0].tolist()
    if singular:
        place = singular[0]
        raise SingularMember(
            place,
            f"A is not positive definite: the leading minor of order {int(info[place])} is not positive; "
            "solve it with assume_a='gen'",
        )
    width = engine.tuning.inverted_width(lower.shape[-1])
    if width:
        inverted = InvertedBlocks.from_factor(lower, lower.dtype, upper=False, width=width)
        factors = found.solving(lambda b: inverted.mT.solve(inverted.solve(b.clone())))
    else:
        factors = found.solving(lambda b: _by_substitution(lower, b))
    return factors, torch.ones_like(diagonal[:, 0], dtype=torch.float64)
