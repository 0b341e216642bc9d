"""Least squares on the free variables of many problems, whose other variables stay at their bounds.

Each problem has a set of free variables of its own, and so a matrix of its own: columns of R. Problems are
sorted by the number of them and worked on in batches that fit a cache, or fill a GPU; a set that many
problems share is factorized once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch.nn import functional

from neula.engines.random_vectors import gaussian


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

    def sizes_of_equalities(self, x: torch.Tensor) -> torch.Tensor:
        """``|d| + |E| |x|``, shape (C, p)."""
        assert self.equalities is not None
        return self.equalities.right.abs() + (self.rows_of_equalities.abs() @ x.abs()[..., None])[..., 0]

    @property
    def rows_of_equalities(self) -> torch.Tensor:
        """E of each problem, shape (C, p, n) or (1, p, n)."""
        assert self.equalities is not None
        return self.equalities.of_each(self.owner)

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


SHARED = 32
"""Problems with the same free variables from which on they are solved together, as several right-hand sides
with one matrix."""

STEPS = 2
"""Solves with each factor: the second one removes the error of the first, as in the corrected seminormal
equations."""

POWER_STEPS = 4
"""Of the power method: an estimate is rarely less than a third of what it stands for."""

DEPENDENT, DEPENDENT_GRAM = 1e-14, 1e-5
"""Diagonal elements of a factor, relative to the norm of their column, below which the column counts as one
that depends on the others: by Householder, and by a Gram matrix, whose errors are those of double precision
times the square of that."""


@dataclass(frozen=True)
class FreeBatch:
    """Problems that are worked on together."""

    rows: torch.Tensor  # int, shape (S,): which ones
    # int, shape (S, w) or (1, w): their free variables, filled up with n; of problems that share them once.
    index: torch.Tensor

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The free components of a tensor of shape (S, n), zeros where filled up, shape (S, w)."""
        return functional.pad(x, (0, 1)).gather(1, self.index.expand(len(x), -1))

    def spread(self, part: torch.Tensor, n: int) -> torch.Tensor:
        """The inverse of :meth:`take`, zeros where variables are not free, shape (S, n)."""
        room = part.new_zeros(len(part), n + 1)
        return room.scatter_(1, self.index.expand(len(part), -1), part)[:, :n]


@dataclass(frozen=True)
class FreeSetFactors:
    """Triangles of the matrices of a batch, and how they solve."""

    triangle: torch.Tensor  # shape (S, w, w) or (1, w, w): upper triangular; the identity where filled up
    # Shape (S, k, w): orthonormal columns; without them the seminormal equations are solved.
    q: torch.Tensor | None = None

    @property
    def singular(self) -> torch.Tensor:
        """Whether columns are dependent, shape (S,) or (1,); NaN are."""
        diagonal = self.triangle.diagonal(dim1=1, dim2=2).abs()
        least = DEPENDENT_GRAM if self.q is None else DEPENDENT
        return ~(diagonal > least * torch.linalg.vector_norm(self.triangle, dim=1)).all(1)

    def solve(self, residual: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """``min ||R_F y - t||`` for residuals t, shape (S, k), with gradients ``R_F^T t``, shape (S, w)."""
        if self.q is None:
            return self._substitute(self._substitute(gradient, transposed=True))
        return self._substitute(self._coordinates(residual))

    def _coordinates(self, residual: torch.Tensor) -> torch.Tensor:
        """``Q^T t``, shape (S, w)."""
        assert self.q is not None
        return (residual[:, None] @ self.q)[:, 0] if len(self.q) > 1 else residual @ self.q[0]

    def _basis_times(self, y: torch.Tensor) -> torch.Tensor:
        """``Q y``, shape (S, k)."""
        assert self.q is not None
        return (self.q @ y[..., None])[..., 0] if len(self.q) > 1 else y @ self.q[0].mT

    def _substitute(self, y: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
        shared = len(self.triangle) == 1
        columns = y.mT[None] if shared else y[..., None]
        matrix = self.triangle.mT if transposed else self.triangle
        found = torch.linalg.solve_triangular(matrix, columns, upper=not transposed)
        return found[0].mT if shared else found[..., 0]

    def image(self, problems: Reduced, batch: FreeBatch, gradient: torch.Tensor) -> torch.Tensor:
        """The projection of residuals on the ranges of the free columns, by their gradients: shape (S, k)."""
        y = self._substitute(gradient, transposed=True)
        if self.q is None:
            return problems.times(batch.spread(self._substitute(y), problems.n))
        return self._basis_times(y)

    def projection(self, problems: Reduced, batch: FreeBatch, residual: torch.Tensor) -> torch.Tensor:
        """Project the residual on the range of the free columns; its gradient would be less accurate."""
        if self.q is None:
            return self.image(problems, batch, batch.take(problems.back(residual)))
        return self._basis_times(self._coordinates(residual))

    def norm(self) -> torch.Tensor:
        """Estimate of ``||R_F||``, shape (S,) or (1,), by the power method."""
        return self._power(lambda v: self.triangle.mT @ (self.triangle @ v))

    def inverse_norm(self) -> torch.Tensor:
        """Estimate of ``||R_F^+||``, likewise."""

        def solve(v: torch.Tensor) -> torch.Tensor:
            v = torch.linalg.solve_triangular(self.triangle.mT, v, upper=False)
            return torch.linalg.solve_triangular(self.triangle, v, upper=True)

        return self._power(solve)

    def _power(self, step: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Root of the largest eigenvalue of what a step multiplies by, from two random vectors."""
        count, w = self.triangle.shape[:2]
        start = gaussian(w, 2, torch.float64, self.triangle.device, seed=w)
        v = start.expand(count, w, 2)
        for _ in range(POWER_STEPS):
            v = step(v / torch.linalg.vector_norm(v, dim=1, keepdim=True))
        return torch.linalg.vector_norm(v, dim=1).amax(1).sqrt()


Factorize = Callable[[Reduced, FreeBatch], FreeSetFactors]


def by_cholesky(problems: Reduced, batch: FreeBatch) -> FreeSetFactors:
    """From parts of the Gram matrix, which are gathered in a fraction of the time of any QR."""
    owner, index = problems.owner[batch.rows[: len(batch.index)]], batch.index
    gram, n = problems.triangles.gram, problems.n
    # The filled-up rows and columns of zeros get ones on their diagonals.
    found = gram[owner[:, None, None], index[:, :, None], index[:, None, :]]
    found.diagonal(dim1=1, dim2=2).add_((index == n).double())
    lower, info = torch.linalg.cholesky_ex(found)
    return FreeSetFactors(lower.masked_fill((info > 0)[:, None, None], torch.nan).mT)


def by_householder(problems: Reduced, batch: FreeBatch) -> FreeSetFactors:
    """Householder QR of columns of R: as good as double precision allows."""
    owner, index = problems.owner[batch.rows[: len(batch.index)]], batch.index
    columns = problems.triangles.columns.mT[owner[:, None], index].mT
    q, triangle = torch.linalg.qr(columns)
    missing = index.shape[1] - triangle.shape[1]
    if missing > 0:  # more free variables than rows: those beyond depend on the others
        triangle = functional.pad(triangle, (0, 0, 0, missing))
        q = functional.pad(q, (0, missing))
    filled = index == problems.n
    # Zero columns stand last, and so do not touch what is before them.
    triangle = triangle.masked_fill(filled[:, :, None] | filled[:, None, :], 0.0)
    triangle.diagonal(dim1=1, dim2=2).add_(filled.double())
    return FreeSetFactors(triangle, q.masked_fill(filled[:, None, :], 0.0))


@dataclass(frozen=True)
class EqualityFactors:
    """Factors ``R_F^-T E_F^T = W T`` of equality constraints ``E x = d``, W with orthonormal columns."""

    basis: torch.Tensor  # W, shape (S, w, p) or (1, w, p)
    images: torch.Tensor  # R_F^-1 W, likewise
    triangle: torch.Tensor  # T, upper triangular, shape (S, p, p) or (1, p, p)
    singular: torch.Tensor  # bool, shape (S,) or (1,): where constraints on free variables are dependent

    @classmethod
    def of_free(cls, problems: Reduced, batch: FreeBatch, factor: FreeSetFactors) -> EqualityFactors:
        """Factorize the constraints on free variables, one problem for each row of the batch."""
        assert problems.equalities is not None
        count = len(batch.index)
        rows = functional.pad(problems.equalities.of_each(problems.owner[:count]), (0, 1)).expand(
            count, -1, -1
        )
        rows = rows.gather(2, batch.index[:, None].expand(-1, rows.shape[1], -1))
        # Zeros below make W and T as large where fewer variables are free than there are constraints.
        images = torch.linalg.solve_triangular(factor.triangle.mT, rows.mT, upper=False)
        w = images.shape[1]
        basis, triangle = torch.linalg.qr(functional.pad(images, (0, 0, 0, max(0, rows.shape[1] - w))))
        singular = FreeSetFactors(triangle, None if factor.q is None else basis).singular
        eye = torch.eye(len(triangle[0]), dtype=basis.dtype, device=basis.device)
        triangle = torch.where(singular[:, None, None], eye, triangle)
        basis = basis[:, :w]
        images = torch.linalg.solve_triangular(factor.triangle, basis, upper=True)
        return cls(basis, images, triangle, singular)

    def step(self, left: torch.Tensor) -> torch.Tensor:
        """Free variables' part of the shortest step that leaves nothing of constraints, shape (S, w)."""
        part = FreeSetFactors(self.triangle)._substitute(left, transposed=True)
        return (self.images @ part[..., None])[..., 0]

    def multipliers(self, gradient: torch.Tensor) -> torch.Tensor:
        """Lagrange multipliers that make the gradient vanish along free variables, shape (S, p)."""
        return -FreeSetFactors(self.triangle)._substitute((gradient[:, None] @ self.images)[:, 0])

    def projected(self, factor: FreeSetFactors, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient along free variables with the multipliers, ``R_F^T (I - W W^T) R_F^-T g``."""
        y = factor._substitute(gradient, transposed=True)[:, None]
        for _ in range(STEPS):
            y = y - (y @ self.basis) @ self.basis.mT
        return (y @ factor.triangle)[:, 0]

    def moved(self, left: torch.Tensor) -> torch.Tensor:
        """Bound on ``||R_F y||`` of the shortest step y by which constraints change by up to so much, shape
        (S,).
        """
        eye = torch.eye(left.shape[1], dtype=left.dtype, device=left.device)
        inverse = torch.linalg.solve_triangular(self.triangle, eye.expand_as(self.triangle), upper=True)
        return torch.linalg.vector_norm((left[:, None] @ inverse.abs())[:, 0], dim=1)


def batches(problems: Reduced, free: torch.Tensor) -> Iterator[FreeBatch]:
    """Problems in batches of about as many free variables, a mask of shape (C, n); those without any are left
    out.
    """
    group = _shared_sets(problems, free) if len(free) >= SHARED else None
    rest = torch.arange(len(free), device=free.device)
    if group is not None:
        members, sizes = group
        for rows in members[: sum(sizes)].split(sizes):
            index = free[rows[0]].nonzero()[:, 0]
            if len(index):
                yield from (FreeBatch(part, index[None]) for part in rows.split(_rows(problems, len(index))))
        rest = members[sum(sizes) :]
    yield from _own_sets(problems, free, rest)


def _rows(problems: Reduced, width: int) -> int:
    return max(SHARED, problems.chunk // max(1, width))


def _own_sets(problems: Reduced, free: torch.Tensor, rows: torch.Tensor) -> Iterator[FreeBatch]:
    """Problems with sets of their own, those with the fewest free variables first."""
    counts, order = free[rows].sum(1).sort()
    rows, widths = rows[order], counts.cpu().numpy()
    start = int(np.searchsorted(widths, 0, "right"))
    while start < len(widths):
        # Not wider than a quarter more than the narrowest: the rest is filled up.
        some = widths[start : np.searchsorted(widths, 1.25 * widths[start] + 8, "right")]
        elements = np.arange(1, len(some) + 1) * some**2
        stop = start + max(1, int(np.searchsorted(elements, problems.chunk, "right")))
        part = rows[start:stop]
        yield FreeBatch(part, _indices(free[part], int(widths[stop - 1])))
        start = stop


def _indices(free: torch.Tensor, width: int) -> torch.Tensor:
    """Places of the free variables of each row, filled up with n, shape (S, width)."""
    n = free.shape[1]
    places = torch.where(free, torch.arange(n, device=free.device), n)
    return places.sort(1).values[:, :width]


def _shared_sets(problems: Reduced, free: torch.Tensor) -> tuple[torch.Tensor, list[int]] | None:
    """Problems sorted by sets that many of them share, those with sets of their own last, and how many share.

    Sets are compared by a random number for each; where two of them have the same one, none is shared.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    codes = torch.randint(-(2**62), 2**62, (free.shape[1] + 1,), generator=generator, device="cpu")
    codes = codes.to(free.device)
    code = torch.where(free, codes[:-1], 0).sum(1) + problems.owner * codes[-1]
    _, inverse, counts = code.unique(return_inverse=True, return_counts=True)
    shared = counts >= SHARED
    if not bool(shared.any()):
        return None
    # Groups that are shared come first, in order.
    rank = torch.where(shared, shared.cumsum(0) - 1, len(counts))
    order = rank[inverse].argsort(stable=True)
    sizes: list[int] = counts[shared].tolist()
    members = order[: sum(sizes)]
    group = rank[inverse[members]]
    first = torch.tensor([0, *sizes[:-1]], device=free.device).cumsum(0)
    same = (free[members] == free[members[first][group]]).all()
    return (order, sizes) if bool(same) else None


@dataclass(frozen=True)
class FreeSetMinimum:
    """Minimizers over the free variables, with the other variables fixed."""

    x: torch.Tensor  # shape (C, n): as it was where columns are dependent
    # Shape (C, k): orthogonal to the columns of free variables, to rounding errors of its own length: that of
    # a right-hand side that differs by rounding errors.
    # Equality constraints add their multipliers to the gradient.
    residual: torch.Tensor
    gradient: torch.Tensor  # shape (C, n): R^T t of that residual
    singular: torch.Tensor  # bool, shape (C,): where columns are dependent


def minimize(
    problems: Reduced, x: torch.Tensor, free: torch.Tensor, factorize: Factorize = by_cholesky
) -> FreeSetMinimum:
    """Minimize over the free variables, a mask of shape (C, n), from x, shape (C, n)."""
    x, singular = x.clone(), torch.zeros(len(x), dtype=torch.bool, device=x.device)
    residual, equalities = problems.residual(x), problems.equalities
    multipliers = x.new_zeros(len(x), 0 if equalities is None else equalities.count)
    for batch in batches(problems, free):
        rows = batch.rows
        factor, some = factorize(problems, batch), problems.at(rows)
        border = None if equalities is None else EqualityFactors.of_free(some, batch, factor)
        bad = (factor.singular if border is None else factor.singular | border.singular).expand(len(rows))
        singular[rows] = bad
        part, start = x[rows], residual[rows]
        for _ in range(STEPS):
            t = some.residual(part)
            part = part + batch.spread(factor.solve(t, batch.take(some.back(t))), problems.n)
            if border is not None:
                part = part + batch.spread(border.step(some.left_of_equalities(part)), problems.n)
        if border is not None:  # x may be far shorter than the steps to it
            part = part + batch.spread(border.step(some.left_of_equalities(part)), problems.n)
        t = some.residual(part)
        if border is None:
            t = t - factor.projection(some, batch, t)
        else:
            multipliers[rows] = border.multipliers(batch.take(some.back(t)))
        x[rows] = torch.where(bad[:, None], x[rows], part)
        residual[rows] = torch.where(bad[:, None], start, t)
    gradient = problems.back(residual)
    if equalities is not None:
        gradient = problems.with_multipliers(gradient, multipliers)
    return FreeSetMinimum(x, residual, gradient, singular)
