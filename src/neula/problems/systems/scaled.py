"""A batch of linear systems in numbers near 1, exactly those that were given."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from neula.algorithms.scaling import ScaledUnknowns, binary_exponents
from neula.engines.formats import in_double
from neula.engines.graphs import kept
from neula.kernels.magnitudes import MODERATE, ends_of, largest_magnitude, magnitudes
from neula.kernels.shift import LIMIT, shift
from neula.kernels.small_problems.refining import over

ALIKE, NEAR = 3, 100
"""Exponents of rows and columns that stay as they are differ by less, and are no larger: scaling is a pass
over the matrix. Such numbers are near 1 in that float64 holds fourth powers of them."""


@dataclass(frozen=True)
class ScaledSystems(ScaledUnknowns):
    """Systems with rows and columns scaled by powers of two: elements near 1, whatever those of A are."""

    a: torch.Tensor  # shape (batch, n, n): R A C
    rows: torch.Tensor  # int, shape (batch, n, 1): exponents by which the rows were divided
    columns: torch.Tensor  # int, shape (batch, 1, n)
    b: torch.Tensor  # shape (batch, n, k): right-hand sides as they belong to a
    b_columns: torch.Tensor  # int, shape (batch, 1, k)
    # Shape (batch, n, 1). Norms of the columns of A, in the units of solutions with a: the diagonal of D.
    # Near 1.
    norms: torch.Tensor
    synchronizes: bool = True  # whether the host reads numbers to leave out what changes nothing
    given: bool = False  # whether nothing was scaled, since all numbers were near 1
    known_sizes: InfinityNorms | None = None  # norms of a and b, where they are known
    known_frobenius: torch.Tensor | None = None  # shape (batch,): ||R A C||_F, likewise

    @classmethod
    def from_arrays(cls, a: torch.Tensor, b: torch.Tensor, *, synchronizes: bool = True) -> ScaledSystems:
        """Scale columns by their largest elements, then rows; no column becomes much smaller by that."""
        if synchronizes and (found := cls.as_given(a, b)) is not None:
            return found
        a, b = in_double(a), in_double(b)
        columns = _alike(binary_exponents(largest_magnitude(a, 1, keepdim=True)))
        scaled = shift(a, -columns) if not synchronizes or bool(columns.any()) else a
        norms = torch.linalg.vector_norm(scaled, dim=1)[..., None]
        norms = torch.where(norms > 0, norms, 1.0)
        rows = _alike(binary_exponents(largest_magnitude(scaled, 2, keepdim=True)))
        if not synchronizes or bool(rows.any()):
            scaled = shift(a, -rows - columns)
        exponent = torch.where(b != 0, binary_exponents(b) - rows, -2 * LIMIT)
        b_columns = exponent.amax(1, keepdim=True)
        b_columns = torch.where(b_columns > -2 * LIMIT, b_columns, 0)
        return cls(scaled, rows, columns, shift(b, -rows - b_columns), b_columns, norms, synchronizes)

    @classmethod
    def as_given(cls, a: torch.Tensor, b: torch.Tensor) -> ScaledSystems | None:
        """The systems as they are, if all numbers are near 1; the host looks at sizes, once."""
        found, ends = cls.supposed(a, b)
        return found if near_one(ends.tolist()) else None

    @classmethod
    def supposed(cls, a: torch.Tensor, b: torch.Tensor) -> tuple[ScaledSystems, torch.Tensor]:
        """The systems as they are, and the sizes by which :func:`near_one` tells whether they may be."""
        a, b = in_double(a), in_double(b)
        sizes = magnitudes(a)
        ends = ends_of(sizes, b)
        return cls.again(a, b, sizes.norms, ends.of_a, ends.of_b, ends.frobenius), ends.ends

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The arguments of :meth:`again`."""
        return self.a, self.b, self.norms, *self.sizes

    @classmethod
    def again(
        cls,
        a: torch.Tensor,
        b: torch.Tensor,
        norms: torch.Tensor,
        size_of_a: torch.Tensor,
        size_of_b: torch.Tensor,
        frobenius: torch.Tensor | None = None,
    ) -> ScaledSystems:
        """Systems that stay as given, or others of their shapes; nothing looks at the numbers."""
        rows = _no_exponents(len(a), a.shape[1], 1, a.device)
        b_columns = _no_exponents(len(a), 1, b.shape[2], a.device)
        sizes = InfinityNorms(size_of_a, size_of_b)
        return cls(a, rows, rows.mT, b, b_columns, norms, True, True, sizes, frobenius)

    @cached_property
    def has_rows(self) -> bool:
        """Whether rows were scaled, as far as the host knows."""
        return not self.given and (not self.synchronizes or bool(self.rows.any()))

    @cached_property
    def trivial(self) -> bool:
        """Whether it is the systems as given, as far as the host knows."""
        return self.given or (not self.has_rows and not bool(self.columns.any()))

    @cached_property
    def frobenius(self) -> torch.Tensor:
        """``||R A C||_F``, shape (batch,); a pass over the matrix only where it was scaled."""
        if self.known_frobenius is not None:
            return self.known_frobenius
        return (
            torch.linalg.vector_norm(self.norms, dim=(1, 2))
            if self.given
            else torch.linalg.matrix_norm(self.a)
        )

    @cached_property
    def units(self) -> torch.Tensor:
        """Rows of A relative to the largest, shape (batch, n, 1)."""
        return shift(torch.ones_like(self.norms), self.rows - self.rows.amax(1, keepdim=True))

    def backward_error(self, y: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The larger normwise backward error of A as given and with rows and columns scaled.

        In the infinity norm: ``||r|| / (||A|| ||x|| + ||b||)`` (Rigal and Gaches, 1967), shape (batch, k).
        """
        scaled = self._sizes.backward_error(y, residual)
        if self.trivial:
            return scaled
        given = self._given.backward_error(shift(y, -self._relative.mT), self.units * residual)
        return torch.maximum(scaled, given)

    @cached_property
    def _relative(self) -> torch.Tensor:
        """Exponents of the columns relative to the largest."""
        return self.columns - self.columns.amax(2, keepdim=True)

    @property
    def sizes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Norms in the infinity norm: of A, shape (batch, 1), and of b, shape (batch, k)."""
        return self._sizes.a, self._sizes.b

    @cached_property
    def _sizes(self) -> InfinityNorms:
        return InfinityNorms.measure(self.a, self.b) if self.known_sizes is None else self.known_sizes

    @cached_property
    def _given(self) -> InfinityNorms:
        """Infinity norms of A as given, up to one unit for all of it."""
        return InfinityNorms.measure(self.units * shift(self.a, self._relative), self.units * self.b)

    def relative_residual(self, residual: torch.Tensor) -> torch.Tensor:
        """``||r|| / ||b||`` of the systems that were given, shape (batch, k)."""
        pair = (residual, self.b) if self.given else (self.units * residual, self.units * self.b)
        return over(*(torch.linalg.vector_norm(x, dim=1) for x in pair))

    def symmetric(self) -> torch.Tensor:
        """Exponents with which rows and columns of a positive definite A are scaled.

        Its diagonal comes near 1, and then no element is larger.
        """
        diagonal = self.a.diagonal(dim1=1, dim2=2).real
        exponents = binary_exponents(diagonal)[..., None] + self.rows + self.columns.mT
        return exponents.div(2, rounding_mode="floor")


def _no_exponents(count: int, m: int, n: int, device: torch.device) -> torch.Tensor:
    key = ("exponents", count, m, n, device)
    return kept(key, lambda: torch.zeros(count, m, n, dtype=torch.int64, device=device))


def near_one(ends: list[float]) -> bool:
    """Whether rows and columns are of one size, none of them zero, and b is neither huge nor tiny.

    Some matrices and right-hand sides are for :func:`_alike` to tell.

    ``ends``: the smallest rows and columns, the largest ones, the smallest and the largest column of b.
    """
    smallest, least, row, column, of_b, most_of_b = ends
    return (
        min(smallest, least) >= 2.0**-NEAR
        and max(row, column) <= 2.0 ** (NEAR - 1)
        and max(row / smallest, column / least) <= 2.0**ALIKE
        and of_b >= 1 / MODERATE
        and most_of_b <= MODERATE
    )


def _alike(exponents: torch.Tensor) -> torch.Tensor:
    """The exponents, but zero for matrices whose rows or columns have similar sizes near 1."""
    largest, smallest = exponents.amax((1, 2), keepdim=True), exponents.amin((1, 2), keepdim=True)
    return torch.where((largest - smallest <= ALIKE) & (largest.abs() <= NEAR), 0, exponents)


@dataclass(frozen=True)
class InfinityNorms:
    """Norms of systems in the infinity norm: of A, shape (batch, 1), and of b, shape (batch, k).

    Of complex residuals it is the largest magnitude, of b and x in the denominator the largest part: backward
    errors are not underestimated.
    """

    a: torch.Tensor
    b: torch.Tensor

    @classmethod
    def measure(cls, a: torch.Tensor, b: torch.Tensor) -> InfinityNorms:
        return cls(torch.linalg.vector_norm(a, 1, dim=2).amax(1)[:, None], largest_magnitude(b, 1))

    def backward_error(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        size = self.a * largest_magnitude(x, 1) + self.b
        largest = residual.abs().amax(1) if residual.is_complex() else largest_magnitude(residual, 1)
        return over(largest, size).nan_to_num(torch.inf, torch.inf)
