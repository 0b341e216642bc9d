"""A batch of least-squares problems in numbers near 1, exactly those that were given.

Rows are weighted, damping is stacked below, and then everything is multiplied by powers of two, so that no
norm overflows or underflows. Rounding errors of the multiplication with weights are kept separately.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch

from neula.algorithms.krylov.passes import doubled_gradient
from neula.algorithms.scaling import ScaledUnknowns, binary_exponents, power_of_two_scales, two_product
from neula.certificates.rank import rounding_of
from neula.engines import FP64
from neula.engines.formats import in_double
from neula.engines.reduction import HERE, Reduction
from neula.kernels.doubled.doubled import Doubled
from neula.kernels.magnitudes import largest_magnitude, two_norms
from neula.kernels.shift import LIMIT, shift

EXACT = 2.0**-900
"""Products below may lose what rounding has lost of them."""

SUMMED = 1_000_000
"""Elements of A whose products are added one by one, which takes less than a second."""

OF_ZERO = -4 * LIMIT
"""The exponent of zero where exponents are compared: less than that of any other number that occurs."""

ALIKE = 10
"""Columns whose sizes differ by fewer powers of two are not scaled before they are mixed by a null space."""

DOMINATES = 40
"""Damping of ``2^40 ||A||`` leaves ``A^T A`` nothing of a solution in doubled arithmetic."""

Sum = tuple[torch.Tensor, torch.Tensor | None]
"""A tensor, and what rounding it has lost; None where nothing is."""


@dataclass(frozen=True)
class ScaledProblems(ScaledUnknowns):
    """``min ||A x - b||`` with the columns of A and b scaled by powers of two."""

    # Shape (..., m, n): in double precision, the largest part of an element of each column in [1/2, 1);
    # attached to the graph of what was given.
    a: torch.Tensor
    a_low: torch.Tensor | None  # rounding errors of a
    # int, shape (..., 1, n): exponents by which its columns were divided; 0 for zero columns.
    columns: torch.Tensor
    # b, b_low, shape (..., m, k): likewise.
    b: torch.Tensor
    b_low: torch.Tensor | None
    b_columns: torch.Tensor  # int, shape (..., 1, k)
    wide: bool  # whether a minimum-norm solution is requested: fewer rows than columns, no damping
    given: bool = False  # whether nothing was scaled
    over_rows: Reduction = HERE  # where other rows are; those of the damping are with the first
    # bool, shape (..., 1): of which matrices the damping was limited; None for none.
    limited: torch.Tensor | None = None
    unit: float = FP64.u  # unit roundoff of the format in which A was given

    @classmethod
    def as_given(
        cls, a: torch.Tensor, b: torch.Tensor, over_rows: Reduction = HERE, *, narrow: bool = False
    ) -> Self:
        """Tall problems whose norms neither overflow nor underflow as they are, not scaled.

        If ``narrow``, A stays in its dtype, for products that widen it as they read it.
        """
        a = a if narrow else in_double(a)
        zero = torch.zeros((), dtype=torch.int64, device=a.device)
        return cls(a, None, zero, in_double(b), None, zero, False, given=True, over_rows=over_rows)

    @classmethod
    def from_arrays(
        cls,
        a: torch.Tensor,
        b: torch.Tensor,
        weights: torch.Tensor | None,
        damp: float,
        over_rows: Reduction = HERE,
        *,
        factor: torch.Tensor | None = None,
        limits_damping: bool = False,
        keeps_rounding: bool = True,
    ) -> Self:
        """Whiten or weigh, damp and scale.

        Shapes: a (..., m, n), b (..., m, k), weights (m,); the lower Cholesky ``factor`` of a covariance,
        shape (m, m), takes the place of weights. ``limits_damping``: whether damping far above A may be less,
        without constraints: x is ``A^H b / damp^2``, up to ``||A||^2 / damp^2`` of itself, and is scaled by
        what the damping is divided by. No graph of derivatives goes through the rounding that products with
        weights lose.
        """
        wide = over_rows.count(a.shape[-2]) < a.shape[-1] and not damp
        (a, a_low), columns = _scaled(in_double(a), weights, factor, over_rows, keeps_rounding)
        (b, b_low), b_columns = _scaled(in_double(b), weights, factor, over_rows, keeps_rounding)
        found = cls(a, a_low, columns, b, b_low, b_columns, wide, over_rows=over_rows)
        return found._damped(damp, limits=limits_damping) if damp else found

    def _damped(self, damp: float, *, limits: bool) -> Self:
        """``[A; damp I]`` and ``[b; 0]``."""
        m, n = self.a.shape[-2:]
        # Filled, not copied from the host, which a CUDA graph could not contain.
        fraction, exponent = torch.frexp(self.a.new_full((), damp, dtype=torch.float64))
        excess = None
        if limits and n:
            most = self.units + DOMINATES + (m * n).bit_length()
            excess = (exponent - most).clamp(min=0).where(self.nonzero.any(-1, keepdim=True), 0)
            exponent = exponent - excess
        columns = torch.where(self.nonzero, torch.maximum(self.columns, exponent), exponent)
        found = self.with_columns(columns)
        if excess is not None and bool(excess.any()):
            found = replace(found, columns=columns + 2 * excess, limited=excess.squeeze(-2) > 0)
        if not self.over_rows.begins:
            return found
        below = torch.diag_embed(shift(fraction, exponent - columns).squeeze(-2))
        zero = self.b.new_zeros(*self.b.shape[:-2], n, self.b.shape[-1])
        return replace(
            found,
            a=torch.cat([found.a, below], -2),
            a_low=None if found.a_low is None else torch.cat([found.a_low, torch.zeros_like(below)], -2),
            b=torch.cat([self.b, zero], -2),
            b_low=None if self.b_low is None else torch.cat([self.b_low, zero], -2),
        )

    def with_columns(self, columns: torch.Tensor) -> Self:
        """Divide the columns of A by other powers of two."""
        a, a_low = _shifted((self.a, self.a_low), self.columns - columns)
        return replace(self, a=a, a_low=a_low, columns=columns)

    def in_units(self, relative: torch.Tensor) -> Self:
        """Divide the columns of each matrix by its units times ``2^relative``."""
        columns = self.units + relative
        return self if bool((columns == self.columns).all()) else self.with_columns(columns)

    def with_rows(self) -> tuple[Self, torch.Tensor]:
        """These problems in the units of each matrix, with rows divided by powers of two for the minimum-norm
        solution, and the exponents of these powers, shape (batch, m, 1).
        """
        # Columns in their units again, relative to the largest; then rows.
        a = shift(self.a, self.columns - self.units)
        exponents = binary_exponents(a.abs().amax(2, keepdim=True))
        a, a_low = _shifted((self.a, self.a_low), self.columns - self.units - exponents)
        b, b_low = _shifted((self.b, self.b_low), -exponents)
        return replace(self, a=a, a_low=a_low, columns=self.units, b=b, b_low=b_low), exponents

    @cached_property
    def norms(self) -> torch.Tensor:
        """Norms of the columns of ``a``, 1 for zero columns, shape (batch, 1, n): with them B = a / norms."""
        norms = self.over_rows.norms(self.a, dim=1)[0].unsqueeze(1)
        return torch.where(norms > 0, norms, 1.0)

    @cached_property
    def nonzero(self) -> torch.Tensor:
        """Which columns are not zero, shape (..., 1, n)."""
        return _any(self.a != 0, self.over_rows)

    @property
    def matters(self) -> torch.Tensor:
        """Where neither A nor b is zero, shape (..., k): else x = 0 is exact."""
        return self.b.detach().any(-2) & self.nonzero.any(-1)

    @cached_property
    def units(self) -> torch.Tensor:
        """The largest exponent of a column that is not zero, shape (..., 1, 1)."""
        if not self.columns.shape[-1]:
            return self.columns.sum(-1, keepdim=True)
        largest = self.columns.masked_fill(~self.nonzero, OF_ZERO).amax(-1, keepdim=True)
        return largest.masked_fill(largest == OF_ZERO, 0)

    @property
    def relative(self) -> torch.Tensor:
        """Exponents of the columns relative to the largest one, of all matrices, shape (n,): zeros if their
        sizes are similar, and ``OF_ZERO`` of columns that are zero in all matrices.
        """
        n = self.columns.shape[-1]
        if not self.columns.numel():
            return self.columns.new_zeros(n)
        relative = (self.columns - self.units).masked_fill(~self.nonzero, OF_ZERO).reshape(-1, n).amax(0)
        alike = bool(((relative >= -ALIKE) | (relative == OF_ZERO)).all())
        return relative.masked_fill(relative != OF_ZERO, 0) if alike else relative

    @property
    def sizes(self) -> torch.Tensor:
        """Norms of the columns of A in units of the largest one; 0 for zero columns, shape (batch, n, 1)."""
        return torch.where(self.nonzero, shift(self.norms, self.columns - self.units), 0.0).mT

    @property
    def sizes_below_one(self) -> torch.Tensor:
        """``sizes`` of a single matrix divided by a power of two, so that none exceeds 1; shape (n,)."""
        sizes = self.sizes[0, :, 0]
        return sizes * 2.0 ** -math.ceil(math.log2(max(1.0, float(sizes.max()))))

    @property
    def rounding(self) -> float:
        """Bound on the singular values that rounding A makes of zero ones, columns having norm 1."""
        return rounding_of(self.a.shape[-1], self.unit)

    @property
    def used_rows(self) -> int:
        """How many rows of a single matrix there are without those that weights have made zero."""
        used = self.a.any(2) | self.b.any(2)
        return int(self.over_rows.total(used.sum().double()))

    @cached_property
    def doubled(self) -> Doubled:
        """A, for products in twice the working precision."""
        return Doubled.from_matrix(self.a)

    def gradient(
        self, y: torch.Tensor, y_low: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Residual and gradient for an unevaluated sum, with nothing lost to rounding."""
        known = self.doubled, self.b, y, y_low
        return doubled_gradient(*known, a_low=self.a_low, b_low=self.b_low, over_rows=self.over_rows)


def gradient_vanishes(
    a: torch.Tensor, b: torch.Tensor, weights: torch.Tensor | None, over_rows: Reduction = HERE
) -> torch.Tensor:
    """Whether ``A^H W^2 b = 0``, and zero is the solution, not what has become of it, shape (batch, k)."""
    (a, a_low), _ = _weighted(in_double(a), weights, over_rows)
    (b, b_low), _ = _weighted(in_double(b), weights, over_rows)
    gradient = over_rows.total_of_pairs(*Doubled.from_matrix(a).transposed_pair(b, torch.zeros_like(b)))
    if a_low is not None and b_low is not None:
        gradient = gradient + over_rows.total(a_low.mH @ b + a.mH @ b_low)
    return ~gradient.any(1)


def gradient_is_zero(
    a: torch.Tensor, b: torch.Tensor, weights: torch.Tensor | None, over_rows: Reduction = HERE
) -> torch.Tensor:
    """Whether ``A^H W^2 b = 0`` beyond doubt, shape (batch, k).

    Products are split into parts that are exact, and their sums are rounded once. Where that cannot be done,
    near the ends of the range, and where it would take long, the answer is no.
    """
    if a.is_complex():  # both parts of A^H b are products of [A1; A2] with [b1; b2] and with [b2; -b1]
        a, twice = torch.cat([a.real, a.imag], 1), None if weights is None else weights.repeat(2)
        b = torch.cat([torch.cat([b.real, b.imag], 1), torch.cat([b.imag, -b.real], 1)], 2)
        return gradient_is_zero(a, b, twice, over_rows).unflatten(1, (2, -1)).all(1)
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
    (b, _), exponents = _weighted(in_double(b), weights, over_rows)
    return shift(over_rows.norms(b, dim=1)[0], exponents[:, 0])


def _any(x: torch.Tensor, over_rows: Reduction) -> torch.Tensor:
    """Whether any element of each column is true, shape (..., 1, columns)."""
    return over_rows.largest(x.any(-2, keepdim=True))


def _parts(x: torch.Tensor, weights: torch.Tensor | None) -> list[torch.Tensor] | None:
    """Matrices whose sum is ``diag(weights) X``, up to powers of two; None where one of them is inexact."""
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
    noise = (len(a[0]) + 4) * 2.0**-52 * (a[0].abs().mH @ b[0].abs())
    if bool(((a[0].mH @ b[0]).abs() > noise).any()):
        return False
    terms: list[torch.Tensor] = []
    for x in a:
        for y in b:
            product = two_product(x, y)
            if bool(((product[0].abs() < EXACT) & (x != 0) & (y != 0)).any()):
                return False
            terms += product
    return all(math.fsum(column) == 0 for column in torch.cat(terms).T.tolist())


def _scaled(
    x: torch.Tensor,
    weights: torch.Tensor | None,
    factor: torch.Tensor | None,
    over_rows: Reduction,
    keeps_rounding: bool,
) -> tuple[Sum, torch.Tensor]:
    """``diag(weights) X``, or ``factor^-1 X``, with scaled columns, and their exponents."""
    if factor is None or not len(factor):
        return _weighted(x, weights, over_rows, keeps_rounding=keeps_rounding)
    rows = power_of_two_scales(factor.abs().amax(1))
    (x, _), exponents = _weighted(x, rows, keeps_rounding=False)
    whitened = torch.linalg.solve_triangular(factor * rows[:, None], x, upper=False)
    scaled, more = _weighted(whitened, None)
    return scaled, exponents + more


def _weighted(
    x: torch.Tensor, weights: torch.Tensor | None, over_rows: Reduction = HERE, *, keeps_rounding: bool = True
) -> tuple[Sum, torch.Tensor]:
    """``diag(weights) X`` with scaled columns, and their exponents, shape (..., 1, columns)."""
    if not x.shape[-2]:
        return (x, None), x.new_zeros(*x.shape[:-2], 1, x.shape[-1], dtype=torch.int32)
    if weights is None:
        largest = largest_magnitude(x.detach(), -2, keepdim=True)
        exponents = binary_exponents(over_rows.largest(largest))
        return (shift(x, -exponents), None), exponents
    weights = weights.to(x.device, torch.float64)[:, None]
    # By significands and exponents: neither the product nor its factors overflow.
    exponent, shifts = binary_exponents(x.detach()), binary_exponents(weights.detach())
    scaled, factors = shift(x, -exponent), shift(weights, -shifts)
    product: Sum = two_product(scaled, factors) if keeps_rounding else (scaled * factors, None)
    exponent = torch.where(product[0] != 0, exponent + shifts, OF_ZERO)
    exponents = over_rows.largest(exponent.amax(-2, keepdim=True))
    exponents = exponents.masked_fill(exponents == OF_ZERO, 0)
    return _shifted(product, exponent - exponents), exponents


def _shifted(x: Sum, exponents: torch.Tensor) -> Sum:
    high, low = x
    return shift(high, exponents), None if low is None else shift(low, exponents)


def lengths(x: torch.Tensor) -> torch.Tensor:
    """Norms of columns, shape (..., columns), whose squares may be out of range."""
    x = x.detach()
    largest = x.abs().amax(-2, keepdim=True) if x.shape[-2] else x.abs().sum(-2, keepdim=True)
    return two_norms(x / largest.masked_fill(largest == 0, 1.0), -2) * largest.squeeze(-2)
