"""A batch of least-squares problems in numbers near 1, exactly those that were given.

Rows are weighted, damping is stacked below, and then everything is multiplied by powers of two, so that no
norm overflows or underflows. What the multiplication with weights rounds off is kept beside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from neula.algorithms.scaling import binary_exponents, two_product
from neula.engines.reduction import HERE, Reduction
from neula.kernels.doubled import Doubled
from neula.kernels.shift import LIMIT, shift

EXACT = 2.0**-900
"""Products below may lose what rounding has lost of them."""

SUMMED = 1_000_000
"""Elements of A whose products are added one by one, which takes less than a second."""

Sum = tuple[torch.Tensor, torch.Tensor | None]
"""A tensor, and what rounding it has lost; None where nothing is."""


@dataclass(frozen=True)
class ScaledProblems:
    """``min ||A x - b||`` with the columns of A and b scaled by powers of two.

    Attributes
    ----------
    a : Tensor, shape (batch, m, n)
        float64, the largest element of each column in [1/2, 1).
    a_low : Tensor or None
        What rounding ``a`` has lost.
    columns : Tensor of int, shape (batch, 1, n)
        Exponents by which its columns were divided.
    b, b_low : Tensor, shape (batch, m, k)
        Likewise.
    b_columns : Tensor of int, shape (batch, 1, k)
    wide : bool
        Whether a solution of minimum norm is asked for: fewer rows than columns, no damping.
    given : bool
        Whether nothing was scaled.
    over_rows : Reduction
        Where other rows are; those of the damping are with the first.
    """

    a: torch.Tensor
    a_low: torch.Tensor | None
    columns: torch.Tensor
    b: torch.Tensor
    b_low: torch.Tensor | None
    b_columns: torch.Tensor
    wide: bool
    given: bool = False
    over_rows: Reduction = HERE

    @classmethod
    def as_given(cls, a: torch.Tensor, b: torch.Tensor, over_rows: Reduction = HERE) -> ScaledProblems:
        """Tall problems whose norms neither overflow nor underflow as they are, not scaled.

        Parameters
        ----------
        a : Tensor, shape (batch, m, n), m >= n
        b : Tensor, shape (batch, m, k)
        over_rows : Reduction
        """
        zero = torch.zeros((), dtype=torch.int64, device=a.device)
        return cls(a.double(), None, zero, b.double(), None, zero, False, given=True, over_rows=over_rows)

    @classmethod
    def from_arrays(
        cls,
        a: torch.Tensor,
        b: torch.Tensor,
        weights: torch.Tensor | None,
        damp: float | torch.Tensor,
        over_rows: Reduction = HERE,
    ) -> ScaledProblems:
        """Weigh, damp and scale.

        Parameters
        ----------
        a : Tensor, shape (batch, m, n)
        b : Tensor, shape (batch, m, k)
        weights : Tensor, shape (m,), or None
        damp : float
            0 for none.
        over_rows : Reduction
        """
        wide = over_rows.count(a.shape[1]) < a.shape[2] and not damp
        (a, a_low), columns = _weighted(a.double(), weights, over_rows)
        if damp:
            a, a_low, columns = _damped(a, a_low, columns, damp, over_rows)
        (b, b_low), b_columns = _weighted(b.double(), weights, over_rows)
        if damp and over_rows.begins:
            zero = b.new_zeros(len(b), a.shape[2], b.shape[2])
            b, b_low = torch.cat([b, zero], 1), None if b_low is None else torch.cat([b_low, zero], 1)
        return cls(a, a_low, columns, b, b_low, b_columns, wide, over_rows=over_rows)

    @cached_property
    def norms(self) -> torch.Tensor:
        """Norms of the columns of ``a``, 1 for zero columns, shape (batch, 1, n): with them B = a / norms."""
        norms = self.over_rows.norms(self.a, dim=1)[0].unsqueeze(1)
        return torch.where(norms > 0, norms, 1.0)

    @cached_property
    def nonzero(self) -> torch.Tensor:
        """Which columns are not zero, shape (batch, 1, n)."""
        return _any(self.a != 0, self.over_rows)

    @cached_property
    def units(self) -> torch.Tensor:
        """The largest exponent of a column that is not zero, shape (batch, 1, 1)."""
        largest = torch.where(self.nonzero, self.columns, -LIMIT).amax(2, keepdim=True)
        return torch.where(largest > -LIMIT, largest, 0)

    @property
    def sizes(self) -> torch.Tensor:
        """Norms of the columns of A in units of the largest one; 0 for zero columns, shape (batch, n, 1)."""
        return torch.where(self.nonzero, shift(self.norms, self.columns - self.units), 0.0).mT

    def unscale(self, y: torch.Tensor) -> torch.Tensor:
        """The x of the problem that was given, for a solution of the scaled one, shape (batch, n, k)."""
        if self.given:
            return y
        return shift(y, self.b_columns - self.columns.mT)

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`unscale`."""
        if self.given:
            return x
        return shift(x, self.columns.mT - self.b_columns)

    def residual_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Norms of residuals of the problem that was given, shape (batch, k)."""
        if self.given:
            return norm
        return shift(norm, self.b_columns[:, 0])

    @cached_property
    def rows(self) -> ScaledRows:
        """The same problem with its rows scaled: for solutions of minimum norm."""
        return ScaledRows.from_problems(self)


@dataclass(frozen=True)
class ScaledRows:
    """``min ||x||`` subject to ``T^T x = b`` with the columns of T, the rows of A, scaled by powers of two.

    Attributes
    ----------
    t, t_low : Tensor, shape (batch, n, m)
    b, b_low : Tensor, shape (batch, m, k)
    exponents : Tensor of int, shape (batch, 1, m)
        Those by which the columns of T were divided.
    units : Tensor of int, shape (batch, 1, 1)
        That by which all of A was divided.
    """

    t: torch.Tensor
    t_low: torch.Tensor | None
    b: torch.Tensor
    b_low: torch.Tensor | None
    exponents: torch.Tensor
    units: torch.Tensor

    @classmethod
    def from_problems(cls, problems: ScaledProblems) -> ScaledRows:
        units = problems.units

        def rescaled(x: torch.Tensor | None, exponents: torch.Tensor) -> torch.Tensor | None:
            return None if x is None else shift(x, exponents)

        # Columns in their units again, relative to the largest; then rows.
        a = shift(problems.a, problems.columns - units)
        exponents = binary_exponents(a.abs().amax(2, keepdim=True))
        columns = problems.columns - units - exponents
        a, a_low = shift(problems.a, columns), rescaled(problems.a_low, columns)
        return cls(
            t=a.mT,
            t_low=None if a_low is None else a_low.mT,
            b=shift(problems.b, -exponents),
            b_low=rescaled(problems.b_low, -exponents),
            exponents=exponents.mT,
            units=units,
        )

    def unscale(self, x: torch.Tensor, problems: ScaledProblems) -> torch.Tensor:
        """The x of the problem that was given, shape (batch, n, k)."""
        return shift(x, problems.b_columns - self.units)

    def scale(self, x: torch.Tensor, problems: ScaledProblems) -> torch.Tensor:
        """The inverse of :meth:`unscale`."""
        return shift(x, self.units - problems.b_columns)


def gradient_vanishes(
    a: torch.Tensor, b: torch.Tensor, weights: torch.Tensor | None, over_rows: Reduction = HERE
) -> torch.Tensor:
    """Whether ``A^T W^2 b = 0``, and zero is the solution, not what has become of it, shape (batch, k)."""
    (a, a_low), _ = _weighted(a.double(), weights, over_rows)
    (b, b_low), _ = _weighted(b.double(), weights, over_rows)
    gradient = over_rows.total_of_pairs(*Doubled.from_matrix(a).transposed_pair(b, torch.zeros_like(b)))
    if a_low is not None and b_low is not None:
        gradient = gradient + over_rows.total(a_low.mT @ b + a.mT @ b_low)
    return ~gradient.any(1)


def gradient_is_zero(
    a: torch.Tensor, b: torch.Tensor, weights: torch.Tensor | None, over_rows: Reduction = HERE
) -> torch.Tensor:
    """Whether ``A^T W^2 b = 0`` beyond doubt, shape (batch, k).

    Products are split into parts that are exact, and their sums are rounded once. Where that cannot be done,
    near the ends of the range, and where it would take long, the answer is no.
    """
    usable = a.isfinite().all(2).all(1)[:, None] & b.isfinite().all(1)
    usable = ~_any(~usable[:, None], over_rows)[:, 0]
    zero = usable & ~_any(b != 0, over_rows)[:, 0]
    if over_rows.count(a.shape[1]) * a.shape[2] > SUMMED:
        return zero
    if over_rows.spread:
        a, b = over_rows.gathered(a[0])[None], over_rows.gathered(b[0])[None]
        weights = None if weights is None else over_rows.gathered(weights)
    for place, column in (usable & ~zero).nonzero().tolist():
        parts = _parts(a[place].double(), weights), _parts(b[place, :, column, None].double(), weights)
        zero[place, column] = _sums_are_zero(*parts)
    return zero


def weighted_norms(
    b: torch.Tensor, weights: torch.Tensor | None, over_rows: Reduction = HERE
) -> torch.Tensor:
    """``||W b||`` of each column, without overflow or underflow on the way, shape (batch, k)."""
    (b, _), exponents = _weighted(b.double(), weights, over_rows)
    return shift(over_rows.norms(b, dim=1)[0], exponents[:, 0])


def _any(x: torch.Tensor, over_rows: Reduction) -> torch.Tensor:
    """Whether any element of each column is true, shape (batch, 1, columns)."""
    return over_rows.largest(x.any(1, keepdim=True))


def _parts(x: torch.Tensor, weights: torch.Tensor | None) -> list[torch.Tensor] | None:
    """Matrices whose sum is ``diag(weights) X``, but for powers of two; None where one of them is inexact."""
    (high, low), _ = _weighted(x[None], weights)
    nonzero = (x != 0) if weights is None else (x != 0) & (weights != 0)[:, None]
    if bool((high[0].abs() < EXACT)[nonzero].any()):
        return None
    return [high[0]] if low is None else [high[0], low[0]]


def _sums_are_zero(a: list[torch.Tensor] | None, b: list[torch.Tensor] | None) -> bool:
    """Whether the columns of A, a sum of parts, are all orthogonal to b."""
    if a is None or b is None:
        return False
    # Rounding errors of a sum of products, and of its terms: nothing larger can be zero.
    noise = (len(a[0]) + 4) * 2.0**-52 * (a[0].abs().mT @ b[0].abs())
    if bool(((a[0].mT @ b[0]).abs() > noise).any()):
        return False
    terms: list[torch.Tensor] = []
    for x in a:
        for y in b:
            product = two_product(x, y)
            if bool(((product[0].abs() < EXACT) & (x != 0) & (y != 0)).any()):
                return False
            terms += product
    return all(math.fsum(column) == 0 for column in torch.cat(terms).T.tolist())


def _weighted(
    x: torch.Tensor, weights: torch.Tensor | None, over_rows: Reduction = HERE
) -> tuple[Sum, torch.Tensor]:
    """``diag(weights) X`` with scaled columns, and their exponents, shape (batch, 1, columns)."""
    if weights is None:
        exponents = binary_exponents(
            over_rows.largest(torch.linalg.vector_norm(x, math.inf, dim=1, keepdim=True))
        )
        return (shift(x, -exponents), None), exponents
    # By significands and exponents: neither the product nor its factors overflow.
    fraction, exponent = torch.frexp(x)
    weight, shifts = torch.frexp(weights)
    high, low = two_product(fraction, weight[:, None])
    exponent = torch.where(high != 0, exponent + shifts[:, None], torch.iinfo(exponent.dtype).min // 2)
    largest = over_rows.largest(exponent.amax(1, keepdim=True))
    exponents = torch.where(_any(high != 0, over_rows), largest, 0)
    return (shift(high, exponent - exponents), shift(low, exponent - exponents)), exponents


def _damped(
    a: torch.Tensor,
    low: torch.Tensor | None,
    columns: torch.Tensor,
    damp: float | torch.Tensor,
    over_rows: Reduction,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """``[A; damp I]``, its columns scaled."""
    n = a.shape[2]
    # Filled, not copied from the host, which no CUDA graph could play back.
    damp = damp if isinstance(damp, torch.Tensor) else a.new_full((), damp)
    fraction, exponent = torch.frexp(damp)
    exponents = torch.where(_any(a != 0, over_rows), torch.maximum(columns, exponent), exponent)
    a, rest = shift(a, columns - exponents), None if low is None else shift(low, columns - exponents)
    if not over_rows.begins:
        return a, rest, exponents
    below = torch.diag_embed(shift(fraction.expand(len(a), n), exponent - exponents[:, 0]))
    return (
        torch.cat([a, below], 1),
        None if rest is None else torch.cat([rest, torch.zeros_like(below)], 1),
        exponents,
    )
