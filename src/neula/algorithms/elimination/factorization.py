"""The interface of a factorization for iterative refinement, and the LU factorizations that have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol, Self

import torch
from torch.nn.functional import pad

from neula.algorithms.elimination.lu import lu_factorize
from neula.algorithms.elimination.lu_panels import WIDEST_INVERSE, Interchanges
from neula.algorithms.triangular.inverted import InvertedLU, InvertedTuning
from neula.algorithms.triangular.substitution import Substitution
from neula.engines import Engine, Tuning, format_of
from neula.engines.formats import double_of, in_double

_BLOCK, _BLOCKS = 256, 16
"""Smallest order of diagonal blocks, and how many there are in a large matrix: copies of them are small
compared with it, and launches few."""


class Factorization(Protocol):
    """Solves with A approximately, as accurately as the arithmetic allowed in which A was factorized."""

    @property
    def growth(self) -> float:
        """Largest element of U by that of A: how much elimination magnified rounding errors."""

    @property
    def narrow(self) -> bool:
        """Whether factors are so much narrower than what they solve in that their own errors hide those of a
        solve, as half precision is in single.
        """

    @property
    def symmetric(self) -> bool:
        """Whether it solves with the transpose as with A itself."""

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        """``A^-1 b``, about, for the columns of b, shape (n, k), in double precision, as the result."""

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        """``A^-H b``, likewise."""

    def in_double(self) -> Factorization:
        """Solve in double precision with these factors: their errors stay, no rounding errors are added."""


@dataclass(frozen=True)
class Wrapped:
    """A factorization of a matrix that was made of A, as one of A."""

    factors: Factorization

    @property
    def growth(self) -> float:
        return self.factors.growth

    @property
    def narrow(self) -> bool:
        return self.factors.narrow

    @property
    def symmetric(self) -> bool:
        return self.factors.symmetric

    def in_double(self) -> Self:
        return replace(self, factors=self.factors.in_double())


class Transposed(Wrapped):
    """A factorization of A as one of its conjugate transpose."""

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        return self.factors.solve_transposed(b)

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        return self.factors.solve(b)


@dataclass(frozen=True)
class Multiplied(Wrapped):
    """A factorization of A as one of ``scale A``, for a power of two."""

    scale: float

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        return self.factors.solve(b / self.scale)

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        return self.factors.solve_transposed(b / self.scale)


class SingularMatrixError(ArithmeticError):
    """The pivot ``index``, from 0, is zero, so that there are no factors to solve with."""

    def __init__(self, index: int) -> None:
        super().__init__(f"pivot {index} is exactly zero")
        self.index = index


@dataclass(frozen=True)
class MixedLU:
    """``P A = L U`` in mixed precision."""

    substitution: Substitution
    growth: float
    rounded: bool = False  # whether products have rounded the factors to a low format
    symmetric: ClassVar[bool] = False

    @property
    def narrow(self) -> bool:
        return self.rounded or self.substitution.factors.lu.dtype.itemsize < self.substitution.dtype.itemsize

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        return in_double(self.substitution.solve(b.to(self.substitution.dtype)))

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        return in_double(self.substitution.solve_transposed(b.to(self.substitution.dtype)))

    def in_double(self) -> MixedLU:
        factors = self.substitution.factors
        # Single precision is converted once, which many solves repay and which takes no more memory than A
        # does. Narrower formats are not converted: they would take four times the memory.
        if factors.lu.dtype in (torch.float32, torch.complex64):
            factors = replace(factors, lu=in_double(factors.lu))
        inverts = self.substitution.inverts
        substitution = Substitution(factors, double_of(factors.lu.dtype), inverts)
        return replace(self, substitution=substitution, rounded=False)


def mixed_lu(
    a: torch.Tensor, engine: Engine, *, pivoting: bool, on_columns: Callable[[int], None] | None = None
) -> MixedLU:
    """LU factorization by the paper's algorithm that serves the format best.

    In a low format that is Algorithm 5.2 with panels by 5.1, the most accurate one. Where the matrix is as
    wide as the sums of its products, there is nothing to round, and a buffer would only cost its copies:
    Algorithm 2.2.

    A is column-major in the engine's operand type or in its storage precision, and is overwritten. Where a
    pivot vanishes or the format overflows, there are NaN or Inf, and a growth that is not finite.
    """
    largest = engine.column_max(a.T).amax()
    # Factors of a complex matrix stay in the storage precision: parts of operands are rounded in products,
    # which are the fewest with Algorithm 3.1.
    stored, wide = format_of(engine.storage), engine.is_complex and not pivoting
    plain = engine.format == stored and not engine.arithmetic.corrected
    packed = lu_factorize(
        a,
        engine,
        variant="2.2" if plain else "3.1" if wide else "5.2/5.1",
        panel=WIDEST_INVERSE if wide and not plain else None,
        storage=stored if engine.is_complex else None,
        pivoting=pivoting,
        overwrite=True,
        on_columns=on_columns,
    )
    inverts = engine.is_complex and engine.tuning[InvertedTuning].width(len(a)) > 0
    rounded = engine.is_complex and engine.format.u > stored.u
    substitution = Substitution(packed, engine.storage, inverts)
    return MixedLU(substitution, growth_of(packed.lu, largest, engine), rounded)


@dataclass(frozen=True)
class LibraryLU:
    """``P A = L U`` by LAPACK or cuSOLVER, with partial pivoting, in the precision of ``lu``."""

    lu: torch.Tensor  # shape (n, n)
    pivots: torch.Tensor  # shape (n,)
    growth: float
    inverted: InvertedLU | None = None  # what solves where that is faster than the library's substitution
    narrow: ClassVar[bool] = False
    symmetric: ClassVar[bool] = False

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        b = b.to(self.lu.dtype)
        if self.inverted is not None:
            return in_double(self.inverted.solve(b))
        return in_double(torch.linalg.lu_solve(self.lu, self.pivots, b))

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        b = b.to(self.lu.dtype)
        if self.inverted is not None:
            return in_double(self.inverted.solve_transposed(b))
        return in_double(torch.linalg.lu_solve(self.lu, self.pivots, b, adjoint=True))

    def in_double(self) -> LibraryLU:
        double = in_double(self.lu)
        return self if double is self.lu else LibraryLU(double, self.pivots, self.growth)


def library_lu(a: torch.Tensor, engine: Engine) -> LibraryLU:
    """Gaussian elimination with partial pivoting as the library has it; the engine only measures the growth.

    Raises a SingularMatrixError at the first pivot that is exactly zero.
    """
    lu, pivots, info = torch.linalg.lu_factor_ex(a)
    if int(info) > 0:
        raise SingularMatrixError(int(info) - 1)
    growth = growth_of(lu, engine.column_max(a).amax(), engine)
    return LibraryLU(lu, pivots, growth, inverted_lu(lu, pivots, engine.tuning))


def inverted_lu(lu: torch.Tensor, pivots: torch.Tensor, tuning: Tuning) -> InvertedLU | None:
    """The library's factors to solve with by products, where these are faster than its substitution.

    Pivots, shape (..., n), are as LAPACK records them, from 1, and are read on the host.
    """
    width = tuning[InvertedTuning].width(lu.shape[-1])
    if width == 0 or lu.numel() == 0:
        return None
    order = Interchanges(pivots.cpu() - 1).permutation()
    return InvertedLU.from_factors(lu, order.to(lu.device), width)


def growth_of(lu: torch.Tensor, largest: torch.Tensor, engine: Engine) -> float:
    """Largest element of U, in the upper triangle of a column-major ``lu``, by the largest element of A.

    Where that is zero, the growth is 1, and also where there is nothing.
    """
    if lu.numel() == 0:
        return 1.0
    width = max(_BLOCK, lu.shape[0] // _BLOCKS)
    starts = range(0, lu.shape[0], width)
    # Transposed, since the engine reads by rows.
    above = [lu[:i, i : i + width].T for i in starts[1:]]
    diagonal = [lu[i : i + width, i : i + width].T.tril() for i in starts]
    found = torch.stack([engine.column_max(block).amax() for block in above + diagonal]).amax()
    return float(torch.where(largest > 0, found / largest, 1.0))


Operator = Callable[[torch.Tensor], torch.Tensor]


def recorded(function: Operator, engine: Engine) -> Operator:
    """A function that an engine records when it is called for a shape for the second time."""
    known: dict[torch.Size, Operator] = {}

    def called(x: torch.Tensor) -> torch.Tensor:
        if x.shape not in known:
            known[x.shape] = function
        elif known[x.shape] is function:
            known[x.shape] = engine.recorded(function, x)
        return known[x.shape](x)

    return called


@dataclass(frozen=True, eq=False)
class Recorded(Wrapped):
    """A factorization, the solves of which are recorded: from the second one on an engine may replay them.

    A solve by blocks is dozens of launches, for which a host takes longer than a GPU: 2 ms of one and 0.4 of
    the other at order 10000 (on an H200).
    """

    engine: Engine

    @cached_property
    def solve(self) -> Operator:
        return self._recorded(self.factors.solve)

    @cached_property
    def solve_transposed(self) -> Operator:
        return self.solve if self.symmetric else self._recorded(self.factors.solve_transposed)

    def _recorded(self, function: Operator) -> Operator:
        """Narrow factors solve for a few columns in the time of one: a single recording does for all."""
        solve, most = recorded(function, self.engine), self.engine.tuning.at_a_time
        if not self.narrow or most < 2:
            return solve

        def together(b: torch.Tensor) -> torch.Tensor:
            missing = most - b.shape[1]
            return solve(b) if missing <= 0 else solve(pad(b, (0, missing)))[:, : b.shape[1]]

        return together

    @cached_property
    def _double(self) -> Recorded | None:
        double = self.factors.in_double()
        return None if double is self.factors else replace(self, factors=double)

    def in_double(self) -> Recorded:
        """The recorder of solves in double precision; one for all callers, so that they share its graph."""
        # Itself is kept nowhere: a circle might be dropped, with its graph, while one is captured.
        return self if self._double is None else self._double
