"""Options of least squares with bounds, the problems, and their measured solutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch

from neula.algorithms.bounded.free_sets import Equalities, Reduced, TriangularFactors
from neula.algorithms.scaling import binary_exponents
from neula.certificates.bounds import lstsq_bound
from neula.certificates.forward_error import SURE
from neula.certificates.verdict import Evidence, Limits, within
from neula.engines import Engine, Format
from neula.errors import of_batch
from neula.kernels.magnitudes import SQUARABLE_EXPONENT
from neula.kernels.shift import shift
from neula.pipeline.batches import Batch, Values
from neula.pipeline.chain import Answer, Verdict
from neula.problems.orthogonal.certified import RFactors, certified_triangle

LABEL = "block pivoting cholesky"
"""First attempt if there are as many rows as columns."""

FULL_RANK = 1e-13
"""Diagonal elements of R, relative to their column, from which on the problem without bounds is solved
first."""


NOTHING = -4096
"""An exponent below those of all numbers."""


@dataclass(frozen=True, kw_only=True)
class BoundedOptions:
    """Options of least squares with bounds."""

    engine: Engine
    target: Format  # whose accuracy the result is to have
    dtype: torch.dtype  # of x as it is returned
    # Exchanges, or sets of free variables that are solved for, of each problem and in each attempt.
    max_iterations: int | None

    def limits(self, shape: Sequence[int]) -> Limits:
        """Limits of the evidence for matrices of m rows and n columns."""
        return Limits.for_shape(shape, lstsq_bound(self.target, max(1, min(shape[-2:]))), SURE)


@dataclass(frozen=True)
class Whole:
    """Scaled problems of a call, and R of their matrices."""

    a: torch.Tensor  # shape (P, m, n): columns divided by powers of two, to norms in [1/2, 1)
    # Shape (P, m, K): divided by one power of two for each matrix, which brings it near 1, or what bounds
    # make of the solution where that is longer.
    b: torch.Tensor
    # int, shape (P, n): what solutions are divided by, as exponents: x as given is 2^e x.
    exponents: torch.Tensor
    b_exponents: torch.Tensor  # int, shape (P, 1)
    reduced: Reduced  # with C = P K problems, those of one matrix in a row
    factors: RFactors  # of a and b
    bounds: tuple[torch.Tensor, torch.Tensor]  # shape (P, n) or (1, n) each: as given
    without_b: torch.Tensor  # bool, shape (C,): whether b was zero as given
    options: BoundedOptions

    @classmethod
    def from_arrays(
        cls,
        a: torch.Tensor,
        b: torch.Tensor,
        lower: torch.Tensor,
        upper: torch.Tensor,
        options: BoundedOptions,
        equalities: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Whole:
        """Scale and factorize A, shape (P, m, n), and b, shape (P, m, K)."""
        a, b = a.double(), b.double()
        without_b = ~b.any(1).flatten()
        exponents = _exponents_of_columns(a)
        b_exponents = _units(b, lower, upper, exponents, equalities)
        a, b = shift(a, -exponents[:, None]), shift(b, -b_exponents[:, None, None])
        factors = certified_triangle(a, b, options.engine)
        k = b.shape[2]
        c = factors.c.mT.flatten(0, 1)
        x_exponents = b_exponents[:, None] - exponents
        reduced = Reduced(
            triangles=TriangularFactors(factors.r),
            c=c,
            owner=torch.arange(len(a), device=a.device).repeat_interleave(k),
            lower=shift(lower, -x_exponents),
            upper=shift(upper, -x_exponents),
            chunk=options.engine.tuning.chunk_elements,
            equalities=None if equalities is None else _in_units(*equalities, x_exponents, k),
        )
        given = (lower, upper), without_b
        return cls(a, b, x_exponents, b_exponents[:, None], reduced, factors, *given, options)

    @cached_property
    def unbounded(self) -> torch.Tensor:
        """Solutions without bounds, shape (C, n); zeros where columns are dependent."""
        r, n = self.reduced.r, self.reduced.n
        c = self.by_matrix(self.reduced.c).mT
        zeros = c.new_zeros(len(self.reduced), n)
        if r.shape[1] < n:
            return zeros
        diagonal = r.diagonal(dim1=1, dim2=2).abs()
        regular = (diagonal > FULL_RANK * self.reduced.norms).all(1)
        safe = torch.where(regular[:, None, None], r, torch.eye(n, dtype=r.dtype, device=r.device))
        found = torch.linalg.solve_triangular(safe, c, upper=True).mT
        return torch.where(regular[:, None, None], found, 0.0).reshape(zeros.shape)

    @cached_property
    def keeps_bounds(self) -> torch.Tensor:
        """Whether scaling keeps every bound, without underflow or overflow, shape (P,)."""
        kept = torch.ones(len(self.a), dtype=torch.bool, device=self.a.device)
        for given, scaled in zip(self.bounds, (self.reduced.lower, self.reduced.upper), strict=True):
            kept = kept & (shift(scaled, self.exponents) == given).all(1)
        return kept

    def by_matrix(self, x: torch.Tensor) -> torch.Tensor:
        """Reshape values of the problems, shape (C, s), to shape (P, K, s)."""
        return x.reshape(len(self.a), self.b.shape[2], x.shape[1])

    def unscale(self, x: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
        """Solutions as they are returned."""
        return shift(x, self.exponents[owner])

    def rounded(self, x: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
        """Solutions rounded to the dtype of the result, in the numbers that are worked with."""
        given = self.unscale(x, owner).to(self.options.dtype).double()
        return shift(given, -self.exponents[owner])

    @cached_property
    def limits(self) -> Limits:
        """Limits of the evidence."""
        return self.options.limits(self.a.shape)


def _units(
    b: torch.Tensor,
    lower: torch.Tensor,
    upper: torch.Tensor,
    exponents: torch.Tensor,
    equalities: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Exponents of the larger one of b and of terms that bounds and constraints enforce, shape (P,)."""
    nearest = torch.zeros_like(lower).clamp(lower, upper)
    sizes = torch.where(nearest != 0, binary_exponents(nearest) + exponents, NOTHING)
    largest = _largest(b)
    of_b = torch.where(largest > 0, binary_exponents(largest), NOTHING)
    found = torch.maximum(of_b, sizes.amax(1)) if exponents.shape[1] else of_b
    for row, right in () if equalities is None else zip(*equalities, strict=True):
        size, used = right.abs().max(), row != 0
        if bool(size > 0) and bool(used.any()):
            least = (exponents - binary_exponents(row))[:, used].amin(1)
            found = torch.maximum(found, binary_exponents(size) + least)
    return torch.where(found > NOTHING, found, 0)


def _in_units(rows: torch.Tensor, right: torch.Tensor, exponents: torch.Tensor, k: int) -> Equalities:
    """Constraints on unknowns divided by powers of two, for k right-hand sides of each matrix."""
    of_rows = torch.where(rows != 0, binary_exponents(rows) + exponents[:, None], NOTHING).amax(
        2, keepdim=True
    )
    of_rows = torch.where(of_rows > NOTHING, of_rows, 0)
    scaled = shift(rows.expand(len(exponents), *rows.shape), exponents[:, None] - of_rows)
    right = shift(right.expand(len(exponents), len(right), k), -of_rows)
    return Equalities(scaled, right.mT.reshape(len(exponents) * k, len(rows)))


def _largest(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in each matrix, shape (P,); 0 of no elements."""
    return x.abs().flatten(1).amax(1) if x.numel() else x.new_zeros(len(x))


def _exponents_of_columns(a: torch.Tensor) -> torch.Tensor:
    """Exponents that bring norms of columns into [1/2, 1), whatever overflows on the way, shape (P, n)."""
    if not a.shape[1]:
        return torch.zeros(len(a), a.shape[2], dtype=torch.int64, device=a.device)
    norms = torch.linalg.vector_norm(a, dim=1)
    found = binary_exponents(norms)
    if bool(((norms > 0) & norms.isfinite() & (found.abs() <= SQUARABLE_EXPONENT)).all()):
        return found
    first = binary_exponents(torch.linalg.vector_norm(a, torch.inf, dim=1))
    norms = torch.linalg.vector_norm(shift(a, -first[:, None]), dim=1)
    return first + binary_exponents(norms)


@dataclass(frozen=True)
class BoundedProblems(Batch):
    """Some problems of a call."""

    places: torch.Tensor  # int, shape (C,): which ones
    whole: Whole

    @cached_property
    def reduced(self) -> Reduced:
        """The open problems, reduced to R."""
        return self.whole.reduced.at(self.places)


@dataclass(frozen=True)
class BoundedValues(Values):
    """Solutions of problems with their evidence."""

    x: torch.Tensor  # shape (C, n): in the numbers that are worked with, rounded to the dtype of the result
    side: torch.Tensor  # int8, shape (C, n): -1 at the lower bound, 1 at the upper one, 0 between them
    # Shape (C, n): A^T r without components that point out of the bounds, for columns of norm 1.
    wrong: torch.Tensor
    residual_norm: torch.Tensor  # shape (C,)
    backward_error: torch.Tensor  # shape (C,)
    forward_error: torch.Tensor  # shape (C,)
    condition: torch.Tensor  # shape (C,)
    iterations: torch.Tensor  # int, shape (C,)

    names: ClassVar[tuple[str, ...]] = ("backward_error", "forward_error", "condition")

    def measured(self) -> torch.Tensor:
        """The numbers called :attr:`names`, shape (3, C)."""
        return torch.stack([self.backward_error, self.forward_error, self.condition])

    def in_units(self, whole: Whole) -> BoundedValues:
        """X and lengths of residuals as they are returned."""
        owner = whole.reduced.owner
        norms = shift(self.residual_norm, whole.b_exponents[owner, 0])
        # Bounds that underflow relative to other numbers are kept all the same.
        lower, upper = (x.expand(len(whole.a), -1)[owner] for x in whole.bounds)
        return replace(self, x=whole.unscale(self.x, owner).clamp(lower, upper), residual_norm=norms)


def in_words(bound: float, backward_error: float, forward_error: float, condition: float) -> str:
    """The reason in an attempt."""
    return (
        f"backward error {backward_error:.1e} (bound {bound:.1e}), forward error {forward_error:.1e}, "
        f"condition number {condition:.1e}"
    )


@dataclass(frozen=True)
class BoundedJudge:
    """Solutions are accepted by backward error, which no other link improves then, and forward error."""

    limits: Limits

    def verdict(self, answer: Answer[BoundedValues], numbers: np.ndarray) -> Verdict:
        """Among solutions that are not accepted, prefer the smallest backward error."""
        backward, forward, condition = numbers
        bound = self.limits.backward_error
        optimal, evidence = within((backward, bound)), Evidence.from_errors(backward, forward)
        accepted = self.limits.accept(evidence)
        error = np.where(np.isnan(backward), np.inf, np.maximum(backward, bound))
        worst = backward.max(initial=0.0), forward.max(initial=0.0), condition.max(initial=1.0)
        reason = in_words(bound, *worst)
        reason = of_batch(reason, int((~accepted).sum()), len(accepted), "problems")
        return Verdict(accepted, np.array([~optimal, error, forward]), reason, optimal)
