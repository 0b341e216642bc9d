"""Least squares with bounds once A is factorized: ``min ||R x - c||`` subject to ``l <= x <= u``.

Every right-hand side is a problem of its own, a row of the tensors here; problems of one matrix share its R.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.nn import functional


@dataclass(frozen=True)
class TriangularFactors:
    """R of P matrices, and what all problems with them take from it."""

    r: torch.Tensor  # shape (P, k, n): float64, the norms of columns near 1; zero columns are zero

    @cached_property
    def gram(self) -> torch.Tensor:
        """``R^T R`` with a row and a column of zeros added, shape (P, n + 1, n + 1)."""
        return functional.pad(self.r.mT @ self.r, (0, 1, 0, 1))

    @cached_property
    def columns(self) -> torch.Tensor:
        """R with a column of zeros added, shape (P, k, n + 1)."""
        return functional.pad(self.r, (0, 1))

    @cached_property
    def norms(self) -> torch.Tensor:
        """Norms of the columns, 1 for zero columns, shape (P, n)."""
        norms = torch.linalg.vector_norm(self.r, dim=1)
        return torch.where(norms > 0, norms, 1.0)


@dataclass(frozen=True)
class Equalities:
    """Constraints ``E x = d`` of all problems."""

    rows: torch.Tensor  # E, shape (P, p, n): the largest element of each row near 1
    right: torch.Tensor  # d, shape (C, p)

    @property
    def count(self) -> int:
        """How many there are, p."""
        return self.rows.shape[1]

    def of_each(self, owner: torch.Tensor) -> torch.Tensor:
        """E of each problem, shape (C, p, n), or (1, p, n) where all have the same."""
        return self.rows if len(self.rows) == 1 else self.rows[owner]


@dataclass(frozen=True)
class Reduced:
    """Problems with bounds on R."""

    triangles: TriangularFactors
    c: torch.Tensor  # shape (C, k): Q^T b of C problems
    owner: torch.Tensor  # int, shape (C,): which matrix a problem has
    # lower, upper, shape (P, n): l < u; perhaps infinite.
    lower: torch.Tensor
    upper: torch.Tensor
    chunk: int  # elements of matrices that are worked on together
    equalities: Equalities | None = None

    def __len__(self) -> int:
        return len(self.c)

    @property
    def r(self) -> torch.Tensor:
        """R of each matrix, shape (P, k, n)."""
        return self.triangles.r

    @property
    def n(self) -> int:
        """Unknowns of each problem."""
        return self.r.shape[2]

    @property
    def norms(self) -> torch.Tensor:
        """Norms of the columns of each R, 1 for zero columns, shape (P, n)."""
        return self.triangles.norms

    @cached_property
    def low(self) -> torch.Tensor:
        """Lower bounds of each problem, shape (C, n); rows may share memory."""
        return self.of_each(self.lower)

    @cached_property
    def high(self) -> torch.Tensor:
        """Upper bounds of each problem, shape (C, n); rows may share memory."""
        return self.of_each(self.upper)

    def of_each(self, x: torch.Tensor) -> torch.Tensor:
        """Expand a quantity per matrix, shape (P, n), to one per problem."""
        return x.expand(len(self), -1) if len(x) == 1 else x[self.owner]

    def at(self, rows: torch.Tensor) -> Reduced:
        """The problems in some places."""
        some = self.equalities
        some = some and replace(some, right=some.right[rows])
        return replace(self, c=self.c[rows], owner=self.owner[rows], equalities=some)

    def weighted(self, weight: float = 2.0**20) -> Reduced:
        """Problems with equality constraints as more rows, times a weight: nearly the same solutions."""
        assert self.equalities is not None
        r = torch.cat([self.r, weight * self.equalities.rows], 1)
        c = torch.cat([self.c, weight * self.equalities.right], 1)
        return replace(self, triangles=TriangularFactors(r), c=c, equalities=None)

    def left_of_equalities(self, x: torch.Tensor) -> torch.Tensor:
        """``d - E x``, shape (C, p)."""
        assert self.equalities is not None
        return self.equalities.right - (self.equalities.of_each(self.owner) @ x[..., None])[..., 0]

    def with_multipliers(self, gradient: torch.Tensor, multipliers: torch.Tensor) -> torch.Tensor:
        """``R^T t + E^T y`` for multipliers y, shape (C, p)."""
        assert self.equalities is not None
        return gradient + (multipliers[:, None] @ self.equalities.of_each(self.owner))[:, 0]

    def residual(self, x: torch.Tensor) -> torch.Tensor:
        """``c - R x``, shape (C, k)."""
        return self.c - self.times(x)

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """``R x``, shape (C, k)."""
        return self._times(self.r.mT, x)

    def back(self, residual: torch.Tensor) -> torch.Tensor:
        """``R^T t`` of residuals, shape (C, n)."""
        return self._times(self.r, residual)

    def noise(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Upper bound on the rounding errors of the gradient ``R^T t``, shape (C, n).

        Infinite where the residual t itself is rounding errors, and its gradient says nothing.
        """
        u, norms = 4 * self.n**0.5 * 2.0**-53, self.of_each(self.norms)
        size = torch.linalg.vector_norm(self.c, dim=1) + (x * norms).abs().sum(1)
        if self.equalities is not None:
            # The residual is not orthogonal to the free columns, and multipliers err as its gradient does.
            sizes = self.equalities.of_each(self.owner).abs()
            least = torch.where(sizes > 0, sizes, torch.inf).amin(2, keepdim=True)
            return 2 * u * size[:, None] * (norms + (sizes / least).nan_to_num(0.0, 0.0).amax(1))
        length = torch.linalg.vector_norm(residual, dim=1)
        return torch.where(length > u * size, 2 * u * length, torch.inf)[:, None] * norms

    def wrong(self, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient without components that point out of the bounds, shape (C, n): zero at a solution."""
        gradient = torch.where(x >= self.high, gradient.clamp(max=0.0), gradient)
        return torch.where(x <= self.low, gradient.clamp(min=0.0), gradient)

    def _times(self, matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """``y^T M`` for each row y, with the matrix of its problem."""
        if len(matrix) == 1:
            return rows @ matrix[0]
        size = max(1, self.chunk // max(1, matrix[0].numel()))
        parts = zip(rows.split(size), self.owner.split(size), strict=True)
        found = [torch.bmm(part[:, None], matrix[owner])[:, 0] for part, owner in parts]
        return torch.cat(found) if found else rows.new_zeros(0, matrix.shape[2])
