"""Running sums over the rows of a least-squares problem: rows can be added and removed.

Solutions come from R of ``[A b]``, which is merged with each block of rows. As evidence,
although A is gone, products with few columns are kept in twice the working precision: ``A^H (A G)`` for
random vectors G, and ``A^H b``. R applied to the same vectors shows how far ``R^H R`` is from ``A^H A``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch.nn import functional

from neula.algorithms.krylov.streamed_lstsq import merged
from neula.algorithms.orthogonal.cholesky_qr import upper_cholesky
from neula.algorithms.scaling import two_product
from neula.certificates.orthogonality import PROBES
from neula.engines import FP64
from neula.kernels.doubled.doubled import Pair, two_sum
from neula.kernels.doubled.doubled_normal import doubled_normal
from neula.kernels.magnitudes import largest_magnitude, squares
from neula.kernels.polar.svd import converged_eigh
from neula.kernels.shift import LIMIT, shift

LEFT = 2.0**-20
"""Part of what is known along any direction that must be left when rows are removed: its rounding errors are
those of what was there, so that six of sixteen digits may go."""

ROOM = 100
"""Binary exponents between which numbers have squares, and quotients, that float64 holds."""

BELOW_ZERO = 2.0**-40
"""By what part of itself a sum of squares may fall below zero for rounding errors, when rows are removed."""


@dataclass(frozen=True)
class Gathered:
    """Rows that R is not merged with yet; replaced, never changed."""

    enough: ClassVar[int] = 1024
    """Rows that R is merged with, and at least four times as many as A has columns."""

    parts: tuple[torch.Tensor, ...] = ()  # shape (rows, n + k + 1) each: A, b, and weights
    rows: int = 0
    weighted: bool = False  # whether any weight is not 1

    def plus(self, a: torch.Tensor, b: torch.Tensor, weights: list[torch.Tensor]) -> Gathered:
        """Add a copy of more rows."""
        last = weights[0][:, None] if weights else a.new_ones(len(a), 1)
        parts = (*self.parts, torch.cat([a, b, last], 1))
        return Gathered(parts, self.rows + len(a), self.weighted or bool(weights))

    @property
    def is_full(self) -> bool:
        """Whether there are enough rows to merge R with."""
        return self.rows >= max(self.enough, 4 * self.parts[-1].shape[1])


@dataclass(frozen=True)
class HeldSums:
    """Factors and sums of all rows so far; replaced, never changed."""

    r: torch.Tensor  # shape (n + k, n + k): [[R, Q^H b], [0, S]]: R of [A b], up to an orthogonal factor of S
    # probes, probes_low, shape (n, 4): A^H (A G), as an unevaluated sum. G is real also for a complex A: the
    # Frobenius norm that it estimates is that of real and imaginary parts, one below the other.
    probes: torch.Tensor
    probes_low: torch.Tensor
    # products, products_low, shape (n, k): A^H b.
    products: torch.Tensor
    products_low: torch.Tensor
    of_b: torch.Tensor  # int, shape (k,): exponents of two by which right-hand sides were divided
    of_a: int = 0  # that by which A was divided
    # rows, updates: how many rows there are, and in how many blocks they came and left.
    rows: int = 0
    updates: int = 0
    roundings: int = 0  # how often elements of A and b were rounded at most, by weights and by forgetting

    @classmethod
    def begin(cls, n: int, k: int, device: torch.device, dtype: torch.dtype = torch.float64) -> HeldSums:
        """Sums over no rows."""
        shapes = ((n + k, n + k), (n, PROBES), (n, PROBES), (n, k), (n, k))
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        units = torch.zeros(k, dtype=torch.int64, device=device)
        # Columns are divided by 2 by default: so nothing is left to divide elements near 1 by.
        return cls(zeros[0], zeros[1], zeros[2], zeros[3], zeros[4], units, of_a=-1)

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """R, ``Q^H b`` and S."""
        n = len(self.probes)
        return self.r[:n, :n], self.r[:n, n:], self.r[n:, n:]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: x for name, x in known.items() if isinstance(x, torch.Tensor)}

    def each(self, function: Callable[[torch.Tensor], torch.Tensor]) -> HeldSums:
        """Apply a function to each tensor."""
        changed: dict[str, Any] = {name: function(x) for name, x in self.tensors.items()}
        return replace(self, **changed)

    def in_dtype(self, dtype: torch.dtype) -> HeldSums:
        """Sums over real rows as those over complex ones, where that is the dtype."""
        if not dtype.is_complex or self.r.is_complex():
            return self
        return self.each(lambda x: x.to(dtype) if x.is_floating_point() else x)

    def plus(self, other: HeldSums) -> HeldSums:
        """Sums over the rows of both."""
        here = self.with_room_for(other.r[:, : len(self.probes)], other.r[:, len(self.probes) :], other)
        other = other.in_units(here)
        return here._with(merged(here.r, other.r), other, other.rows, max(1, other.updates))

    def in_units(self, other: HeldSums) -> HeldSums:
        """These sums, divided by the powers of two that scale other sums."""
        of_a, of_b = self.of_a - other.of_a, self.of_b - other.of_b
        if not of_a and not bool(of_b.any()):
            return self
        whole = of_b.new_full((len(self.probes),), of_a)
        probes, products = 2 * whole[:, None], (of_a + of_b)[None]
        return replace(
            self,
            r=shift(self.r, torch.cat([whole, of_b])[None]),
            probes=shift(self.probes, probes),
            probes_low=shift(self.probes_low, probes),
            products=shift(self.products, products),
            products_low=shift(self.products_low, products),
            of_a=other.of_a,
            of_b=other.of_b,
        )

    def with_room_for(self, a: torch.Tensor, b: torch.Tensor, units: HeldSums) -> HeldSums:
        """These sums in units in which no square overflows, including those of rows in other units."""
        n = len(self.probes)
        of_a, of_b = (
            torch.maximum(_exponents(mine) + own, _exponents(theirs) + given)
            for mine, own, theirs, given in (
                (self.r[:, :n], self.of_a, a, units.of_a),
                (self.r[:, n:], self.of_b, b, units.of_b),
            )
        )
        of_a = of_a.amax()
        own = int(of_a)
        near = abs(own - self.of_a) <= ROOM or own < -LIMIT
        kept = ((of_b - self.of_b).abs() <= ROOM) | (of_b < -LIMIT)
        if near and bool(kept.all()):
            return self
        wanted = replace(self, of_a=self.of_a if near else own, of_b=torch.where(kept, self.of_b, of_b))
        return self.in_units(wanted)

    def plus_gathered(self, gathered: Gathered, vectors: torch.Tensor, exponents: torch.Tensor) -> HeldSums:
        """Add gathered rows; ``exponents`` as for :func:`scaled_rows`."""
        if not gathered.rows:
            return self
        (n, k), updates = self.products.shape, self.updates + len(gathered.parts)
        rows = torch.cat(gathered.parts)
        a, b, w = rows.tensor_split([n, n + k], 1)
        apart, units = _units(a, b, exponents)
        same = units.of_a == self.of_a and torch.equal(units.of_b, self.of_b) and not bool(units.of_b.any())
        if same and not gathered.weighted and bool((apart.abs() <= ROOM).all()):
            # Reflections and products err equally for columns that are divided by powers of two afterwards.
            both = functional.pad(apart, (0, k))[None]
            r = shift(merged(shift(self.r, -both), rows[:, :-1]), both)
            return self._with(r, _seen(a, b, vectors, apart[:, None]), len(a), len(gathered.parts))
        weights = [w[:, 0].real] if gathered.weighted else []
        rows, right, units = scaled_rows(a, b, weights, exponents)
        return replace(self.plus_rows(rows, right, vectors, units), updates=updates)

    def _rows_in_units(
        self, a: torch.Tensor, b: torch.Tensor, units: HeldSums
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of_a, of_b = units.of_a - self.of_a, units.of_b - self.of_b
        if of_a:
            a = shift(a, of_b.new_tensor([of_a]))
        return a, shift(b, of_b[None])

    def plus_rows(self, a: torch.Tensor, b: torch.Tensor, vectors: torch.Tensor, units: HeldSums) -> HeldSums:
        """Add rows of A and b, divided as ``units`` says; ``vectors``, shape (n, 4), are G, the same each
        time.
        """
        if not len(a):
            return self
        here = self.with_room_for(a, b, units)
        a, b = here._rows_in_units(a, b, units)
        seen = replace(_seen(a, b, vectors), roundings=units.roundings)
        return here._with(merged(here.r, torch.cat([a, b], 1)), seen, len(a), 1)

    def minus_rows(
        self, a: torch.Tensor, b: torch.Tensor, vectors: torch.Tensor, units: HeldSums
    ) -> HeldSums:
        """Remove rows; a ValueError where that is unstable, or the rows cannot have been among those that are
        there.

        With ``P = R^-H A^H`` of these rows, ``R'^H R' = R^H (I - P P^H) R``, so that ``R' = L R`` for the
        Cholesky factor ``L^H L = I - P P^H``, and ``L^H z' = z - P b`` for ``z = Q^H b``.
        """
        a, b = self._rows_in_units(a, b, units)
        r, z, s = self.parts
        p = torch.linalg.solve_triangular(r.mH, a.mH, upper=False)
        identity = torch.eye(len(r), dtype=r.dtype, device=r.device)
        known = bool(p.isfinite().all())  # not where R is singular
        left = float(1 - torch.linalg.matrix_norm(p, 2) ** 2) if known and p.numel() else float(known)
        if not left >= LEFT:
            raise ValueError(
                f"these {len(a)} rows hold nearly all information about some direction: {max(left, 0.0):.1e} "
                f"of it would be left, and {LEFT:.1e} is needed: begin a new fit with the other rows"
            )
        lower = upper_cholesky(identity - p @ p.mH)[0]
        expected = b - p.mH @ z
        hidden = torch.linalg.solve_triangular(lower.mH, p @ expected, upper=False)
        gram = s.mH @ s
        rest = gram - expected.mH @ expected - hidden.mH @ hidden
        values, basis = converged_eigh(rest)
        before = gram.diagonal().real + squares(z).sum(0)
        sizes = (before + squares(b).sum(0)).sum()
        if bool((values < -BELOW_ZERO * sizes).any()):
            raise ValueError(f"these {len(a)} rows have larger residuals than all rows of the fit together")
        changed = torch.zeros_like(self.r)
        n = len(r)
        changed[:n, :n] = lower @ r
        changed[:n, n:] = torch.linalg.solve_triangular(lower.mH, z - p @ b, upper=False)
        changed[n:, n:] = values.clamp_min(0).sqrt()[:, None] * basis.mH
        # Zero may be a right-hand side that rounding errors of what was there have hidden.
        before = before.sqrt().masked_fill(changed[:, n:].any(0), 0.0)
        changed[n:, n:].diagonal().add_(FP64.u * before)
        gone = _seen(a, b, vectors).each(torch.neg)
        return self._with(changed, gone, -len(a), 1)

    def times(self, root: float) -> HeldSums:
        """Sums for rows multiplied by ``root``."""
        root, exponent = math.frexp(root)
        probes = _times(_times((self.probes, self.probes_low), root), root)
        products = _times(_times((self.products, self.products_low), root), root)
        counts = (self.rows, self.updates + 1, self.roundings + 1)
        units = (self.of_b + exponent, self.of_a + exponent)
        return HeldSums(self.r * root, *probes, *products, *units, *counts)

    def _with(self, r: torch.Tensor, other: HeldSums, rows: int, updates: int) -> HeldSums:
        probes = _sum((self.probes, self.probes_low), (other.probes, other.probes_low))
        products = _sum((self.products, self.products_low), (other.products, other.products_low))
        rows, updates = self.rows + rows, self.updates + updates
        roundings = max(self.roundings, other.roundings)
        return HeldSums(r, *probes, *products, self.of_b, self.of_a, rows, updates, roundings)


def normal_product(
    a: torch.Tensor, x: torch.Tensor, x_low: torch.Tensor | None = None, b: torch.Tensor | None = None
) -> Pair:
    """``A^H (A x)`` as an unevaluated sum, for A of shape (m, n), and ``A^H b`` in columns of its own.

    x may be an unevaluated sum, too.
    """
    x, k = x.to(a.dtype), 0 if b is None else b.shape[1]
    negative, low = functional.pad(-x, (0, k)), None if x_low is None else functional.pad(-x_low, (0, k))
    right = a.new_zeros(len(a), negative.shape[1])
    if b is not None:
        right[:, -k:] = b
    return two_sum(*doubled_normal(a, negative, low, right)[1])


def _seen(
    a: torch.Tensor, b: torch.Tensor, vectors: torch.Tensor, apart: torch.Tensor | None = None
) -> HeldSums:
    """Products of some rows, without their R; ``apart``, shape (n, 1): exponents to scale columns of A by."""
    units = torch.zeros(b.shape[1], dtype=torch.int64, device=b.device)
    found = normal_product(a, vectors if apart is None else shift(vectors, apart), b=b)
    found = found if apart is None else (shift(found[0], apart), shift(found[1], apart))
    (high, products), (low, products_low) = (x.tensor_split([PROBES], 1) for x in found)
    return HeldSums(a, high, low, products, products_low, of_b=units)


def _exponents(x: torch.Tensor) -> torch.Tensor:
    """Binary exponents of the largest elements of columns; of zeros far below all others."""
    largest = largest_magnitude(x, 0) if len(x) else x.real.new_zeros(x.shape[1])
    return torch.frexp(largest)[1].long().masked_fill(largest == 0, -4 * LIMIT)


def _far_from_one(exponents: torch.Tensor) -> torch.Tensor:
    """Zero for those of numbers whose squares are in range, and of zeros."""
    return exponents.clamp(min=-LIMIT).masked_fill((exponents.abs() <= ROOM) | (exponents < -2 * LIMIT), 0)


def _sum(one: Pair, other: Pair) -> Pair:
    total, error = two_sum(one[0], other[0])
    return two_sum(total, error + (one[1] + other[1]))


def _times(pair: Pair, number: float) -> Pair:
    if pair[0].is_complex():
        high, low = _times((torch.view_as_real(pair[0]), torch.view_as_real(pair[1])), number)
        return torch.view_as_complex(high), torch.view_as_complex(low)
    high, error = two_product(pair[0], torch.full_like(pair[0], number))
    return two_sum(high, error + number * pair[1])


def _units(a: torch.Tensor, b: torch.Tensor, exponents: torch.Tensor) -> tuple[torch.Tensor, HeldSums]:
    """Exponents to scale columns of A by, shape (n,), and sums over no rows in the units of rows."""
    units = HeldSums.begin(a.shape[1], b.shape[1], a.device)
    of_a = int(_far_from_one((_exponents(a) - exponents).amax())) or units.of_a
    return -exponents - of_a, replace(units, of_a=of_a, of_b=_far_from_one(_exponents(b)))


def scaled_rows(
    a: torch.Tensor, b: torch.Tensor, weights: list[torch.Tensor], exponents: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, HeldSums]:
    """Rows times their weights in numbers whose squares are in range, and sums over no rows in their units.

    There is one tensor of weights at most, shape (rows,). Columns are divided by powers of two with the
    ``exponents``, shape (n,), before all of A is.
    """
    apart, units = _units(a, b, exponents)
    of_a, of_b = units.of_a, units.of_b
    a = shift(a, apart[None]) if bool(apart.any()) else a
    b = shift(b, -of_b[None]) if bool(of_b.any()) else b
    for w in weights:
        of_w = _far_from_one(_exponents(w[:, None]))
        w = shift(w, -of_w)[:, None]
        a, b, of_a, of_b = a * w, b * w, of_a + int(of_w), of_b + of_w
    return a, b, replace(units, of_a=of_a, of_b=of_b, roundings=len(weights))
