"""Equality constraints ``C x = d``: the points that fulfil them, by QR of ``C^H``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from neula.algorithms.exact_combinations import beyond_combinations
from neula.algorithms.krylov.batched_lstsq import ROUNDING
from neula.algorithms.spectra.condition import extreme_singular_values
from neula.certificates.verdict import within
from neula.engines import FP64, Engine
from neula.kernels.doubled.doubled import Doubled, two_sum
from neula.kernels.shift import shift
from neula.kernels.small_problems.refining import over
from neula.problems.orthogonal.qr import qr

NEGLIGIBLE = 8.0
"""Factor on ``max(n, p) u``: smaller diagonal elements of R, and residuals of constraints, count as zero."""

STEPS = 5
"""Updates of coefficients in doubled arithmetic: each leaves ``u cond(C)`` of their error."""

CORRECTIONS = 2
"""Refinement steps of a point that fulfils the constraints."""

COARSE = 2.0**-20
"""Coefficients of a combination that are multiples of this up to its square are taken to be: the rounding
errors of a row that was computed with them have moved them."""


@dataclass(frozen=True)
class NullSpace:
    """Solutions of ``C x = d``: the one of minimum norm, and a basis of the null space of C."""

    shortest: torch.Tensor  # shape (..., n, k): the x of smallest norm
    basis: torch.Tensor  # shape (n, n - rank): orthonormal
    # kept, dropped: rows of C that determine it, as many as its numerical rank, and the others.
    kept: list[int]
    dropped: list[int]
    condition: float  # of the rows of C that are kept; an estimate from below
    # c, d, shape (p, n), (..., p, k): the constraints.
    c: torch.Tensor
    d: torch.Tensor
    # q, r, shape (n, rank), (rank, p): QR factors of the columns of C^H, those that are kept first.
    q: torch.Tensor
    r: torch.Tensor
    rounded: list[int]  # rows with elements that underflow relative to others

    @property
    def rank(self) -> int:
        """Numerical rank of C."""
        return len(self.kept)

    @property
    def noise(self) -> float:
        """Bound on the effect of rounding errors on the basis and on the minimum-norm x."""
        return ROUNDING * self.condition * FP64.u

    @classmethod
    def factorize(cls, c: torch.Tensor, d: torch.Tensor, engine: Engine, rounded: list[int]) -> NullSpace:
        """Factorize.

        Shapes: d (..., p, k). ``c``, shape (p, n): in double precision, the largest part of an element of
        each row in [1/2, 1), or all of it zero. ``rounded``: rows with elements that underflow.
        """
        p, n = c.shape
        if not p or not n:
            shortest, basis = (
                d.new_zeros(*d.shape[:-2], n, d.shape[-1]),
                torch.eye(n, dtype=d.dtype, device=d.device),
            )
            empty = d.new_zeros(n, 0), d.new_zeros(0, p)
            return cls(shortest, basis, [], list(range(p)), 1.0, c, d, *empty, rounded)
        q, r, order = qr(c.mH, mode="complete", pivoting=True, engine=engine)
        diagonal = r.diagonal().abs()
        rank = int((diagonal > NEGLIGIBLE * max(n, p) * FP64.u * diagonal.max()).sum())
        kept, dropped = order.tolist()[:rank], order.tolist()[rank:]
        triangle = r[:rank, :rank]
        y = torch.linalg.solve_triangular(triangle.mH, d[..., kept, :], upper=False)
        condition = _condition(triangle) if rank else 1.0
        shortest, basis = q[:, :rank] @ y, q[:, rank:]
        found = cls(shortest, basis, kept, dropped, condition, c, d, q[:, :rank], r[:rank], rounded)
        return replace(found, shortest=found.corrected(shortest))

    def scaled(self, exponents: torch.Tensor) -> NullSpace:
        """Solutions for d times powers of two, exponents of shape (..., 1, k)."""
        return replace(self, shortest=shift(self.shortest, exponents), d=shift(self.d, exponents))

    def corrected(self, x: torch.Tensor) -> torch.Tensor:
        """Move x by rounding errors, so that it fulfils the kept constraints up to its own rounding."""
        if not self.rank or not x.numel():
            return x
        kept, right = self.c[self.kept][None], self.d[..., self.kept, :]
        right = right.detach().expand(*x.shape[:-2], *right.shape[-2:]).movedim(-2, 0)
        doubled, moved = Doubled.from_matrix(kept), torch.zeros_like(x.detach().movedim(-2, 0))
        for _ in range(CORRECTIONS):
            at = x.detach().movedim(-2, 0) + moved
            left = doubled.residual(at.flatten(1)[None], right.flatten(1)[None])[0][0]
            y = torch.linalg.solve_triangular(self.r[:, : self.rank].mH, left, upper=False)
            moved = moved + (self.q @ y).unflatten(1, moved.shape[1:])
        return x + moved.movedim(0, -2)

    def sizes(self, x: torch.Tensor) -> torch.Tensor:
        """``|C| |x| + |d|``, shape (..., p, k)."""
        return self.c.abs() @ x.abs() + self.d.abs()

    def errors(self, x: torch.Tensor) -> torch.Tensor:
        """``|C x - d| / (|C| |x| + |d|)`` of each row, shape (..., p, k); 0 where both vanish."""
        return over((self.c @ x - self.d).abs(), self.sizes(x))

    @property
    def tolerance(self) -> float:
        """Largest error of a row that rounding explains."""
        return NEGLIGIBLE * max(*self.c.shape, 1) * FP64.u * max(1.0, self.condition**0.5)

    def check(self, c: torch.Tensor, d: torch.Tensor) -> None:
        """Refuse constraints, as given, that no x fulfils."""
        if not bool(d[~c.any(1)].any()) and self.follows:
            return
        nearest = torch.linalg.pinv(c) @ d
        residual = c @ nearest - d
        worst = int(residual.abs().amax(1).argmax())
        least = float(torch.linalg.vector_norm(residual))
        raise ValueError(
            f"the constraints contradict one another: C of shape {tuple(c.shape)} has rank {self.rank}, and "
            f"||C x - d|| is at least {least:.3g} (most of it in row {worst}): "
            "leave out constraints that follow from others, or change d"
        )

    @property
    def follows(self) -> bool:
        """Whether dropped constraints agree with the kept ones, up to rounding."""
        return bool(within((self.contradictions, self.tolerance)).all())

    @property
    def contradictions(self) -> torch.Tensor:
        """Errors of dropped constraints where the kept ones hold, relative to their terms and to those of the
        nearest combinations, shape (..., dropped rows, k).
        """
        if not self.dropped or not self.rank:
            return self.d[..., :0, :].abs()
        x, (factors, left) = self.shortest.detach().abs(), self.combined(self.c[self.dropped])
        sizes = self.sizes(x)
        sizes = sizes[..., self.dropped, :] + factors.abs().mH @ sizes[..., self.kept, :]
        rest = (self.c @ self.shortest.detach() - self.d)[..., self.dropped, :].abs()
        return over((rest - left.abs().mH @ x).clamp_min(0.0), sizes)

    @property
    def independent(self) -> dict[int, bool]:
        """Dropped constraints that do not follow from the kept ones, as :meth:`not_following` says."""
        if not self.rank or not self.dropped:
            return {}
        if self.rounded:
            return dict.fromkeys(self.rounded, False)
        return {self.dropped[i]: x for i, x in self.not_following(self.c[self.dropped]).items()}

    def combined(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The nearest combinations of kept constraints to rows, shape (q, n), by doubled arithmetic.

        Returns conjugates of the coefficients, shape (rank, q), and of what is left of rows, shape (n, q).
        """
        kept, triangle = self.c[self.kept].mH.resolve_conj(), self.r[:, : self.rank]
        wanted = left = rows.mH.resolve_conj().contiguous()
        prepared = Doubled.from_matrix(kept[None].contiguous())
        factors = low = rows.new_zeros(self.rank, len(rows))
        for _ in range(STEPS):
            update = torch.linalg.solve_triangular(triangle, self.q.mH @ left, upper=True)
            factors, low = two_sum(factors, low + update)
            left = prepared.residual(factors[None], wanted[None], low[None])[0][0]
        return factors, left

    def not_following(self, rows: torch.Tensor) -> dict[int, bool]:
        """Which of some rows, nearly combinations of kept constraints, are none as they are stored.

        Returns by the index of a row whether the rounding of one row explains the difference.
        """
        kept, found = self.c[self.kept], {}
        for i in beyond_combinations(*_real(kept, rows)):
            row = rows[i, None]
            factors = torch.cat([-self.combined(row)[0][:, 0], rows.new_ones(1)])
            found[i] = _is_rounding(torch.cat([kept, row]), factors)
        return found


def _real(kept: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Real rows that are real combinations of others where the complex ones are complex combinations."""
    if not kept.is_complex():
        return kept, rows
    kept = torch.cat([kept, 1j * kept])
    return torch.cat([kept.real, kept.imag], 1), torch.cat([rows.real, rows.imag], 1)


def _is_rounding(rows: torch.Tensor, factors: torch.Tensor) -> bool:
    """Whether a sum of rows with the conjugates of simple factors vanishes up to the rounding of one row.

    A row that was computed with simple factors, and rounded, is no longer nearest to the combination with
    them.
    """
    factors = factors.where(factors.abs() > COARSE * factors.abs().max(), 0.0)
    factors = factors / factors[factors != 0].abs().min()
    simple = _by_parts(factors / COARSE, torch.round) * COARSE
    if bool(((factors - simple).abs() > COARSE**2 * factors.abs()).any()):
        return False
    conjugate = rows.mH[None].resolve_conj().contiguous()
    rest = Doubled.from_matrix(conjugate).product(simple[None, :, None])[0, :, 0].abs()
    return bool((rest <= simple.abs()[:, None] * _half_spacing(rows)).all(1).any())


def _by_parts(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A function of each element, of complex ones of each part."""
    return torch.complex(function(x.real), function(x.imag)) if x.is_complex() else function(x)


def _half_spacing(x: torch.Tensor) -> torch.Tensor:
    """Half the distance from x to the next float64 number towards zero, which a rounding error may be."""
    if x.is_complex():
        return _by_parts(x, _half_spacing).abs()
    smaller = torch.nextafter(x.abs(), torch.zeros_like(x))
    return torch.ldexp(torch.ones_like(x), torch.frexp(smaller)[1] - 54).masked_fill(x == 0, 0.0)


def _condition(r: torch.Tensor) -> float:
    """Condition number of a triangle."""
    largest, smallest = extreme_singular_values(r.contiguous(), r.contiguous()).tolist()
    return float(largest / max(smallest, torch.finfo(torch.float64).tiny))
