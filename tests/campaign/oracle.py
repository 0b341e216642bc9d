"""Exact answers: least squares of any rank and linear systems, in ball arithmetic.

Everything is that of the problem as it is stored: A and b (weights and damping applied without rounding) are
integers times powers of two. Solutions come with error bounds (Arb's balls), and precision doubles until
these are negligible. Singular values are those of ``B = A D^-1``, D the Euclidean norms of A's columns (1 for
zero columns), in proven enclosures; ranks are counted by Sylvester's law of inertia in integers.

A complex problem is the real one of its parts, twice as large (``exact.embedded``): it has the same solution
and the same norms, and every singular value twice. What is asked and answered is of the complex problem.

F. Johansson, "Arb: efficient arbitrary-precision midpoint-radius interval arithmetic", IEEE Trans. Comput.
66, 2017.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np
from flint import arb, arb_mat, ctx, fmpz_mat

from . import spectrum
from .exact import (
    Dyadic,
    balls,
    columns,
    dyadic,
    embedded,
    integers,
    norm,
    parts,
    rounded,
    scaled_rows,
    stacked,
    times,
)  # fmt: skip
from .shortest import sensitivity
from .spectrum import UndecidedError

AMBIGUOUS = 1e-3
"""A singular value that is this close to the threshold, relative to it, may count or not: either rank is
right."""

DOUBLED = 2.0**-100
"""Relative error of doubled products, with room for sums of some terms."""

FIRST_BITS, LAST_BITS, ACCURATE_BITS = 320, 1 << 15, 100

RESOLVED = 2.0**-170
"""Relative to the largest one, singular values above are correct to five digits; of those below it is only
known whether they are zero."""

INVARIANT = 2.0**-260
"""How nearly a computed dominant space is invariant, relative to ``||B||^2``."""


class LeastSquares:
    """``min ||B_r D x - b||``, and of all minimizers the one of smallest ``||x||``. Weights are those of
    the rows, for damping rows ``damp I`` are stacked below A, and singular values of B count that exceed
    ``rcond`` times the largest. ``fold`` is 2 for complex numbers: dimensions of the real problem in units
    of those of the complex one. ``in_arithmetic_of_a`` is the same problem; if only b is complex, the real
    one with real and imaginary parts of b as columns.
    """

    def __init__(
        self,
        a: np.ndarray,
        b: np.ndarray,
        *,
        weights: np.ndarray | None = None,
        damp: float = 0.0,
        rcond: float,
    ) -> None:
        matrix, rhs = self._of_parts(a, b)
        if weights is not None:
            factors = dyadic(np.tile(weights, self.fold)[:, None])
            matrix, rhs = times(matrix, factors), times(rhs, factors)
        if damp:
            n, k = matrix[0].shape[1], b.shape[1]
            matrix, rhs = stacked(matrix, dyadic(damp * np.eye(n))), stacked(rhs, dyadic(np.zeros((n, k))))
        self.rcond = rcond
        self._set(matrix, rhs)
        self.in_arithmetic_of_a = self
        if np.iscomplexobj(b) and not np.iscomplexobj(a):
            b = np.concatenate([b.real, b.imag], 1)
            self.in_arithmetic_of_a = LeastSquares(a, b, weights=weights, damp=damp, rcond=rcond)

    def _of_parts(self, a: np.ndarray, b: np.ndarray) -> tuple[Dyadic, Dyadic]:
        """A and b of the real problem."""
        self.fold = 1 + (np.iscomplexobj(a) or np.iscomplexobj(b))
        return (dyadic(a), dyadic(b)) if self.fold == 1 else (dyadic(embedded(a)), dyadic(parts(b)))

    def _set(self, matrix: Dyadic, rhs: Dyadic) -> None:
        self._a, self._a_exponent = integers(matrix)
        self._b, self._b_exponent = integers(rhs)
        self._solutions: dict[int, tuple[int, arb_mat]] = {}
        self._norms_at: dict[int, list[arb]] = {}
        self._scaled_at: dict[int, arb_mat] = {}

    @property
    def shape(self) -> tuple[int, int]:
        return self._a.nrows() // self.fold, self._a.ncols() // self.fold

    def solution_of(self, x: np.ndarray) -> np.ndarray:
        """A solution as one of the real problem."""
        return x if self.fold == 1 else parts(x)

    # --- norms, singular values, rank ---

    def _norms(self, bits: int) -> list[arb]:
        """D, for the matrix of integers."""
        if bits not in self._norms_at:
            with ctx.workprec(bits):
                one = arb((1, -self._a_exponent))
                squares = [sum((v * v for v in column), 0) for column in self._a.transpose().tolist()]
                self._norms_at[bits] = [arb(s).sqrt() if s else one for s in squares]
        return self._norms_at[bits]

    def _scaled(self, bits: int) -> arb_mat:
        """B."""
        if bits not in self._scaled_at:
            with ctx.workprec(bits):
                inverses = [1 / d for d in self._norms(bits)]
                transposed = scaled_rows(arb_mat(self._a.transpose()), inverses)
                self._scaled_at[bits] = transposed.transpose()
        return self._scaled_at[bits]

    @cached_property
    def enclosures(self) -> list[arb]:
        """Of the singular values of B."""
        return spectrum.singular_values(self._scaled(spectrum.BITS))[:: self.fold]

    @cached_property
    def singular_values(self) -> np.ndarray:
        """Singular values of B relative to the largest (zeros if A is zero), descending, to five digits."""
        rank = self._a.rank() // self.fold
        s = np.zeros(min(self.shape))
        if rank:
            top = self.enclosures[0].mid()
            relative = [x / top for x in self.enclosures[:rank]]
            if not all(spectrum.resolved(x) or x < RESOLVED for x in relative):
                raise UndecidedError("singular values are not resolved")
            s[:rank] = np.maximum([float(x.mid()) for x in relative], RESOLVED)
        return s

    @cached_property
    def norm(self) -> float:
        """The 2-norm of B."""
        return float(self.enclosures[0].mid()) if self._a.rank() else 0.0

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The rank of B, all that are right if a singular value is on the threshold."""
        if self._a.rank() == 0:
            return (0,)
        low, high = (self.count(self.rcond * factor) for factor in (1 + AMBIGUOUS, 1 - AMBIGUOUS))
        return tuple(range(max(low, 1), max(high, 1) + 1))

    def count(self, part: float) -> int:
        """How many singular values of B exceed ``part`` of the largest one, by exact inertia.

        The threshold is as accurate as the enclosure of the largest one: to five digits and more.
        """
        threshold = Fraction(part) * Fraction(float(self.enclosures[0].mid()))
        return spectrum.count_above(self._a, (threshold * threshold).as_integer_ratio()) // self.fold

    def condition(self, rank: int) -> float:
        """``sigma_1 / sigma_rank``."""
        if rank == 0:
            return 1.0
        smallest = self.singular_values[rank - 1]
        return float(1 / smallest) if smallest > RESOLVED else math.inf

    # --- solutions ---

    def _solution(self, rank: int) -> tuple[int, arb_mat]:
        """``D x*`` for integers A and b, with the bits that it took; precise relative to its norm.

        Of the real problem, as are all below.
        """
        if rank not in self._solutions:
            self._solutions[rank] = self._find(rank * self.fold)
        return self._solutions[rank]

    def _find(self, rank: int) -> tuple[int, arb_mat]:
        n, k = self._a.ncols(), self._b.ncols()
        if rank == 0 or not any(int(v) for v in (self._a.transpose() * self._b).entries()):
            return FIRST_BITS, arb_mat(n, k)
        bits = FIRST_BITS
        while bits <= LAST_BITS:
            with ctx.workprec(bits):
                try:
                    found = self._solve(rank, bits)
                except ZeroDivisionError:
                    found = None
                found = None if found is None else self._tightened(found, bits)
                if found is not None:
                    return bits, found
            bits *= 2
        raise UndecidedError(f"no solution with {LAST_BITS} bits")

    def _tightened(self, found: arb_mat, bits: int) -> arb_mat | None:
        """The solution if its errors are negligible beside the norm of each column.

        A zero that the integers do not show stays a small ball around zero at any precision: it becomes one.
        """
        tight = []
        for column, b in zip(columns(found), columns(arb_mat(self._b)), strict=True):
            size, radius = norm(v.mid() for v in column), norm(v.rad() for v in column)
            if radius == 0 or radius < size * arb((1, -ACCURATE_BITS)):
                tight.append(column)
            elif bits >= 8 * FIRST_BITS and radius + size < norm(b) * arb((1, -bits // 2)):
                tight.append([arb()] * len(column))
            else:
                return None
        return arb_mat(tight).transpose()

    def _solve(self, rank: int, bits: int) -> arb_mat:
        """``D x*`` at this precision. With a basis V of the rows' dominant space, minimizers are those with
        ``V^T D x = V^T V (B V)^+ b``, and the smallest of them is in the range of ``D V``.
        """
        b, rhs = self._scaled(bits), arb_mat(self._b)
        if rank == b.ncols():
            return _tall(b, rhs)
        basis = self._rows(rank, bits)
        wanted = basis.transpose() * basis * _tall(b * basis, rhs)
        norms = self._norms(bits)
        directions = scaled_rows(basis, norms)
        # Columns of one size, for the balls' sake.
        weights = (directions.transpose() * directions).solve(wanted)
        return scaled_rows(directions * weights, norms)

    def _rows(self, rank: int, bits: int) -> arb_mat:
        """A basis of the space of B's rows that counts."""
        b = self._scaled(bits)
        return b.transpose() if rank == b.nrows() else self._without_zero_columns(self._dominant(b, rank))

    def _dominant(self, b: arb_mat, rank: int) -> arb_mat:
        """A basis of the space of B's rows that belongs to its largest singular values: eigenvectors, which
        are checked to span an invariant space.
        """
        m, n = self.shape
        with ctx.workprec(max(spectrum.BITS, ctx.prec)):
            wide = b.mid()
            gram = wide * wide.transpose() if m < n else wide.transpose() * wide
            basis = spectrum.eigen(gram).dominant(rank)
            image, transposed = gram * basis, basis.transpose()
            rest = image - basis * (transposed * basis).solve(transposed * image)
            if not norm(rest.entries()) < INVARIANT * norm(gram.entries()):
                raise UndecidedError("the dominant space was not found")
            return (wide.transpose() * basis if m < n else basis).mid()

    def _without_zero_columns(self, basis: arb_mat) -> arb_mat:
        """Exactly zero where A is: errors there would count as much as those where A is tiny."""
        nonzero = [any(int(v) for v in column) for column in self._a.transpose().tolist()]
        return scaled_rows(basis, [arb(int(used)) for used in nonzero])

    # --- what is judged ---

    def errors(self, x: np.ndarray, rank: int) -> np.ndarray:
        """``||D (x - x*)|| / ||D x*||`` for each column of x (n x k); 0 / 0 is 0."""
        bits, exact = self._solution(rank)
        with ctx.workprec(bits):
            found = []
            for given, column in zip(self.solution_of(x).T, columns(exact), strict=True):
                if not np.isfinite(given).all():
                    found.append(math.inf)
                    continue
                y = scaled_rows(self._unknowns(given), self._norms(bits)).entries()
                size, distance = norm(column), norm(p - q for p, q in zip(y, column, strict=True))
                if size == 0:
                    found.append(0.0 if distance == 0 else math.inf)
                else:
                    found.append(float(distance / size))
            return np.array(found)

    def _unknowns(self, x: np.ndarray) -> arb_mat:
        """The x of integer A and b that belongs to this one."""
        return balls(x, self._a_exponent - self._b_exponent)

    def largest_component(self, rank: int) -> np.ndarray:
        """``log2`` of the largest component of each column of x*; -inf for zero."""
        bits, exact = self._solution(rank)
        with ctx.workprec(bits):
            found = []
            for column in columns(exact):
                y = [abs(v / d) for v, d in zip(column, self._norms(bits), strict=True)]
                top = max((_log2(v) for v in y), default=-math.inf)
                found.append(top + self._b_exponent - self._a_exponent)
            return np.array(found)

    def bounds(self, rank: int, u: float) -> np.ndarray:
        """``kappa u (2 + (kappa + 1) ||r|| / (||B|| ||D x*||))``: what the forward error can be expected to
        be with a backward error of u. Below full rank that is the error of coefficients, and spaces turn by
        ``kappa u`` over the gap in the spectrum. Anything can be expected where rounding errors of A decide
        which singular values count.
        """
        kappa, s = self.condition(rank), self.singular_values
        if (np.abs(s - self.rcond) <= max(self.shape) * 2.0**-53).any() and s[0] > 0:
            return np.full(self._b.ncols(), math.inf)
        if self._a.rank() == 0 or rank == 0:
            return np.zeros(self._b.ncols())
        bits, exact = self._solution(rank)
        with ctx.workprec(bits):
            residual = arb_mat(self._b) - self._scaled(bits) * exact
            ratios = []
            for r, dx in zip(columns(residual), columns(exact), strict=True):
                size, rest = norm(dx), norm(r)
                ratios.append(float(rest / size) if size != 0 else (0.0 if rest == 0 else math.inf))
        ratio = np.array(ratios) / self.norm
        with np.errstate(invalid="ignore"):
            expected = np.where(ratio > 0, kappa * u * (2 + (kappa + 1) * ratio), 2 * kappa * u)
        if rank == self.shape[1]:
            return expected
        with ctx.workprec(bits):
            found = sensitivity(self._rows(rank * self.fold, bits), self._norms(bits), exact)
        gap = 1 - s[rank] / s[rank - 1] if rank < len(s) else 1.0
        angle = kappa * u / max(gap, u)
        factors = zip(expected.tolist(), found.coefficients, found.angle, strict=True)
        return np.array([e * float(c) + angle * float(t) if e < math.inf else e for e, c, t in factors])

    def rounded_solution(self, rank: int) -> np.ndarray:
        """x* in float64."""
        bits, exact = self._solution(rank)
        with ctx.workprec(bits):
            unit = arb((1, self._b_exponent - self._a_exponent))
            x = rounded(scaled_rows(exact, [unit / d for d in self._norms(bits)]))
        if self.fold == 1:
            return x
        found = x[: len(x) // 2].astype(np.complex128)
        found.imag = x[len(x) // 2 :]
        return found

    def underflow(self, rank: int, spacing: int) -> np.ndarray:
        """Error from rounding x* to multiples of ``2^spacing``, the smallest number, relative to x*."""
        bits, exact = self._solution(rank)
        with ctx.workprec(bits):
            step = norm(self._norms(bits)) * arb((1, spacing + self._a_exponent - self._b_exponent - 1))
            sizes = [norm(column) for column in columns(exact)]
            return np.array([float(step / size) if size != 0 else 0.0 for size in sizes])

    def residual_ratios(self, x: np.ndarray) -> np.ndarray:
        """``||b - A x|| / ||b||`` of each column, without what twice the working precision cannot see."""
        with ctx.workprec(FIRST_BITS * 2):
            a, found = arb_mat(self._a), []
            sizes = arb_mat([[abs(v) for v in row] for row in a.tolist()])
            for given, b in zip(self.solution_of(x).T, columns(arb_mat(self._b)), strict=True):
                if not np.isfinite(given).all():
                    found.append(math.inf)
                    continue
                r = norm(p - q for p, q in zip(b, (a * self._unknowns(given)).entries(), strict=True))
                r -= DOUBLED * norm((sizes * self._unknowns(abs(given))).entries())
                size = norm(b)
                found.append(float(r / size) if size != 0 else (math.inf if r > 0 else 0.0))
            return np.array(found)


class System(LeastSquares):
    """``A x = b``, A square."""

    def __init__(self, a: np.ndarray, b: np.ndarray) -> None:
        self.rcond = 0.0
        self._set(*self._of_parts(a, b))

    @cached_property
    def singular(self) -> bool:
        """Whether A is exactly singular."""
        n = self._a.nrows()
        return bool(self.singular_values[-1] < 1e-10) and self._a.rank() < n

    @cached_property
    def definite(self) -> bool:
        """Whether a Hermitian A is positive definite: by Sylvester's criterion, all leading minors are."""
        a = self._a.tolist()
        leading = (fmpz_mat([row[:k] for row in a[:k]]) for k in range(1, len(a) + 1))
        return all(minor.det() > 0 for minor in leading)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The exact rank."""
        return (self._a.rank() // self.fold,)

    def _solve(self, rank: int, bits: int) -> arb_mat:
        return self._scaled(bits).solve(arb_mat(self._b))

    def bounds(self, rank: int, u: float) -> np.ndarray:
        """``2 kappa u`` for each right-hand side."""
        return np.full(self._b.ncols(), 2 * self.condition(self.shape[0]) * u)


def system(a: np.ndarray, b: np.ndarray) -> System:
    """A system; the exact solution of one that was here before is found already."""
    dtype = np.result_type(a, b, np.float64)
    return _system(*(x.astype(dtype).tobytes() for x in (a, b)), len(a), dtype)


@lru_cache(maxsize=256)
def _system(a: bytes, b: bytes, n: int, dtype: np.dtype) -> System:
    return System(np.frombuffer(a, dtype).reshape(n, n), np.frombuffer(b, dtype).reshape(n, -1))


def _tall(c: arb_mat, rhs: arb_mat) -> arb_mat:
    """``min ||C s - rhs||``, C of full column rank, by the normal equations: balls bound their errors."""
    transposed = c.transpose()
    return (transposed * c).solve(transposed * rhs)


def _log2(value: arb) -> float:
    middle = value.mid()
    if middle == 0:
        return -math.inf
    mantissa, exponent = middle.man_exp()
    bits = int(mantissa).bit_length()
    return int(exponent) + bits + math.log2(float(arb((int(mantissa), -bits))))
