"""Least squares with equality constraints, through the null space of C, and whitened problems: evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import pad

from neula.algorithms.exact_combinations import beyond_combinations
from neula.algorithms.krylov.batched_lstsq import ROUNDING
from neula.algorithms.scaled_problems import OF_ZERO, ScaledProblems, lengths
from neula.algorithms.spectra.condition import extreme_singular_values
from neula.certificates.forward_error import ESTIMATED, least_squares_error, residual_ratio
from neula.certificates.verdict import within
from neula.engines import FP64, Engine
from neula.kernels.doubled.doubled import Doubled, two_sum
from neula.kernels.magnitudes import two_norms
from neula.kernels.shift import shift
from neula.kernels.small_problems.refining import over
from neula.pipeline.call import Call
from neula.pipeline.inputs import Taken
from neula.pipeline.result import Attempt, LstsqResult
from neula.pipeline.shapes import broadcast_system
from neula.problems.least_squares.problem import LeastSquaresOptions
from neula.problems.least_squares.regression import RegressionFit
from neula.problems.least_squares.run import LeastSquaresOutcome, solve_system
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
    rounded: list[int]  # rows with elements that underflow beside others

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
        """Factorize C, shape (p, n), rows of which have largest elements in [1/2, 1), or are zero."""
        p, n = c.shape
        if not p or not n:
            shortest = d.new_zeros(*d.shape[:-2], n, d.shape[-1])
            basis = torch.eye(n, dtype=d.dtype, device=d.device)
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
        least = float(two_norms(residual))
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
        """The nearest combinations of kept constraints to rows, shape (q, n), by doubled arithmetic."""
        # Returns conjugates of the coefficients, shape (rank, q), and of what is left of rows, shape (n, q).
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
        """Which of some rows, nearly combinations of kept constraints, are none as they are stored."""
        # Returns by the index of a row whether the rounding of one row explains the difference.
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
    """Whether a sum of rows with the conjugates of simple factors vanishes up to the rounding of one row."""
    # A row that was computed with simple factors, and rounded, is no longer nearest to the combination with
    # them.
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


UNDERFLOWN = 2.0**-1000
"""A bound on what underflow of scaled numbers comes to in x."""

FARTHEST = 300
"""By so many powers of two columns of A may be larger in the units of those of C than in their own: squares
stay in range."""


@dataclass(frozen=True)
class ConstrainedSolution:
    """A solution in scaled units, and what is known of it."""

    solved: LeastSquaresOutcome  # of the problem without constraints
    x: torch.Tensor  # shape (..., n, k)
    norms: torch.Tensor  # shape (..., n): norms of the columns of A; ones where all of A vanishes
    forward: torch.Tensor  # shape (..., k)
    backward: torch.Tensor  # shape (...)
    problem: ScaledProblems  # in the same units
    of_x: torch.Tensor  # int, shape (..., 1, k): by which x is multiplied, besides those of the columns
    basis: torch.Tensor | None = None  # shape (n, q): of the null space
    constraint_rank: int | None = None
    constraint_error: float = 0.0
    doubt: str = ""  # why the forward error is not known
    remark: str = ""  # for which constraints it holds, if not for those that are stored
    before: tuple[Attempt, ...] = ()

    def residuals(self, rounded: torch.Tensor, rounding: torch.Tensor) -> torch.Tensor:
        """Norms of the residuals of x as it is returned, shape (..., k): as measured, or of x ``rounded``."""
        measured = residuals(self.solved.result, rounding)
        if not bool(rounding.any()):
            return measured
        a, b = self.problem.a.detach(), self.problem.b.detach()
        image = shift(a @ rounded, self.of_x - self.problem.b_columns)
        return lengths(b - image).where(rounding > 0, measured)

    def fit_in_units(self, call: Call, rows: int, factor: torch.Tensor | None, *, is_vector: bool) -> Any:
        """The fit in the user's units, of so many rows that are data."""
        fit = self.solved.result._fit
        if not isinstance(fit, RegressionFit):
            return fit
        units = self.problem.units
        of_b = self.problem.b_columns.expand(*self.x.shape[:-2], 1, self.x.shape[-1])
        of_b = replace(fit.shapes, b=of_b).columns
        basis = self.basis
        if basis is not None and self.problem.columns.numel():
            relative = (units - self.problem.columns).reshape(-1, len(basis))[0]
            basis = shift(basis, relative[:, None])
        of_a = replace(fit.shapes, a=units).matrices
        return replace(
            fit,
            call=call,
            shapes=replace(fit.shapes, is_vector=is_vector),
            x=shift(fit.x, of_b - of_a),
            norms=shift(fit.norms, of_b[:, 0]),
            rows=rows,
            factor=factor,
            basis=basis,
            exponents=(of_a, of_b),
        )


def whitened(
    call: Call, problem: ScaledProblems, options: LeastSquaresOptions, noise: float
) -> ConstrainedSolution:
    """The solution without constraints; the covariance perturbs A and b by ``noise``, relatively."""
    problem = problem.in_units(torch.zeros_like(problem.columns))
    solved = _solved(call, problem.a, problem.b, options)
    result, norms = solved.result, norms_of_columns(problem.a.detach())
    size = lengths(norms[..., None] * result.x.detach())
    ratio = residual_ratio(residuals(result, size), 1.0, size)
    forward = result.forward_errors
    if noise:
        condition = ESTIMATED * result.conditions[..., None]
        forward = forward + least_squares_error(condition, torch.full_like(size, noise), ratio)
        forward = forward.masked_fill(~problem.matters, 0.0)
    if problem.limited is not None:  # statistics depend on A relative to the damping
        solved = replace(solved, result=replace(result, _fit=None))
    return ConstrainedSolution(
        solved, result.x, norms, forward, result.backward_errors, problem, problem.b_columns
    )


@dataclass(frozen=True)
class Elimination:
    """A problem with constraints, which is solved through the null space of C."""

    call: Call
    problem: ScaledProblems
    options: LeastSquaresOptions
    constraints: tuple[torch.Tensor, torch.Tensor]
    noise: float  # relative perturbation of A and b that the covariance comes to

    def solved(self) -> ConstrainedSolution:
        """The solution; a ValueError where no x fulfils all constraints."""
        relative = self.problem.relative
        found = self._in(relative, torch.full_like(relative, OF_ZERO))
        left = found.solved.result.ranks < (0 if found.basis is None else found.basis.shape[1])
        scaled = found.problem.columns != found.problem.units
        if bool(scaled.any()) and bool(left.any()):  # what is shortest is to be so in given units
            return self._in(torch.zeros_like(relative))
        return found

    def _in(self, *units: torch.Tensor) -> ConstrainedSolution:
        problem, null, of_x = self._null_space(*units)
        of_b = problem.b_columns.masked_fill(~problem.b.any(-2, keepdim=True), OF_ZERO)
        of_b = torch.maximum(of_b, of_x)
        if null.basis.shape[1]:  # x is in the units of the larger one of b and d
            null, of_x = null.scaled(of_x - of_b), of_b
        of_x, of_b = (y.masked_fill(y == OF_ZERO, 0) for y in (of_x, of_b))
        problem = replace(problem, b=shift(problem.b, problem.b_columns - of_b), b_columns=of_b)
        rest = _Rest.from_null_space(problem, null, shift(null.shortest, of_x - of_b), self.noise)
        options = replace(self.options, unit=self.options.unit + null.noise)
        doubt, remark = rest.doubts
        solved = _solved(self.call, rest.a, rest.b, options)
        z = solved.result.x
        x = null.corrected(null.shortest + null.basis @ z)
        forward = rest.forward_errors(solved.result, x.detach(), z.detach())
        error = null.errors(x.detach())  # of rows
        reason = (
            doubt or f"{null.rank} of {len(null.c)} constraints on {len(null.basis)} unknowns independent"
        )
        return ConstrainedSolution(
            solved,
            x,
            norms_of_columns(problem.a.detach()),
            torch.full_like(forward, torch.inf) if doubt else forward,
            torch.maximum(solved.result.backward_errors, error[..., null.kept, :].flatten(-2).amax(-1))
            if null.kept and forward.shape[-1]
            else solved.result.backward_errors,
            problem,
            of_x,
            null.basis,
            null.rank,
            float(error.max()) if error.numel() else 0.0,
            doubt,
            remark,
            (Attempt("null space of C by QR", not doubt, reason),),
        )

    def _null_space(
        self, relative: torch.Tensor, *others: torch.Tensor
    ) -> tuple[ScaledProblems, NullSpace, torch.Tensor]:
        """Null space of the constraints in scaled unknowns, the problem in these, and their exponents."""
        found = self._in_units(relative)
        for other in others:  # units may have made dependent rows of independent ones
            if found[1].rank == min(self.constraints[0].shape):
                break
            again = self._in_units(other)
            found = again if again[1].rank > found[1].rank else found
        found[1].check(*self.constraints)
        return found

    def _in_units(self, relative: torch.Tensor) -> tuple[ScaledProblems, NullSpace, torch.Tensor]:
        """Unknowns and rows of C are scaled, and d so that x is near 1: the last exponents are those of x."""
        # Unknowns that are ``OF_ZERO`` next to others are in the units of the columns of C.
        (c, d), problem = self.constraints, self.problem
        zero, of_c = relative == OF_ZERO, torch.where(c != 0, _exponents(c), OF_ZERO)
        if bool(zero.any()):  # these columns are measured by C alone
            others = (of_c - relative).masked_fill(zero | (of_c == OF_ZERO), OF_ZERO).amax(1, keepdim=True)
            others = torch.where(others == OF_ZERO, of_c.amax(1, keepdim=True), others)
            within = torch.where((of_c != OF_ZERO) & (others != OF_ZERO), of_c - others, OF_ZERO)
            within = within.amax(0) if len(c) else within.sum(0)
            within = within.masked_fill(within == OF_ZERO, 0)
            relative = torch.where(zero, torch.maximum(within, problem.relative - FARTHEST), relative)
        problem, whole = problem.in_units(relative), problem.units
        of_c = torch.where(c != 0, of_c - relative, OF_ZERO)
        of_rows = of_c.amax(1, keepdim=True) if c.shape[1] else of_c.sum(1, keepdim=True)
        of_rows = of_rows.masked_fill(of_rows == OF_ZERO, 0)
        of_d = torch.where(d != 0, _exponents(d) - of_rows, OF_ZERO)
        of_d = of_d.amax(0, keepdim=True) if len(d) else of_d.new_full((1, d.shape[1]), OF_ZERO)
        with self.call.computing():
            scaled, d = shift(c, -relative - of_rows), shift(d, -of_rows - of_d)
            lost = (shift(scaled, relative + of_rows) != c).any(1)
            null = NullSpace.factorize(scaled, d, self.call.engine, lost.nonzero().flatten().tolist())
        return problem, null, torch.where(of_d == OF_ZERO, OF_ZERO, of_d + whole)


def _exponents(x: torch.Tensor) -> torch.Tensor:
    """Binary exponents of elements, of complex ones that of the larger part."""
    return torch.frexp(torch.view_as_real(x).abs().amax(-1) if x.is_complex() else x)[1]


@dataclass(frozen=True)
class _Rest:
    """The problem on the null space of the constraints: ``min ||A Z z - (b - A s)||``."""

    problem: ScaledProblems
    null: NullSpace
    # a, b, shape (..., m, q), (..., m, k): A Z, zero where it is only rounding errors, and b - A s.
    a: torch.Tensor
    b: torch.Tensor
    noise: float  # relative to the norms of A and b, what rounding errors and the covariance come to
    # Rows of a wide A that are nearly combinations of rows of C, as NullSpace.not_following says.
    independent: dict[int, bool]

    @classmethod
    def from_null_space(
        cls, problem: ScaledProblems, null: NullSpace, shortest: torch.Tensor, noise: float
    ) -> _Rest:
        a, norm, independent = problem.a, torch.linalg.vector_norm, {}
        mixed, right = a @ null.basis, problem.b - a @ shortest
        rounded = 4 * a.shape[-1] ** 0.5 * FP64.u
        sizes = norm(a.detach(), dim=-2, keepdim=True) @ null.basis.abs()
        vanish = norm(mixed.detach(), dim=-2, keepdim=True) <= rounded * sizes
        if null.rank and mixed.shape[-2] < mixed.shape[-1]:  # where rows may be scaled
            rows = norm(mixed.detach(), dim=-1) <= rounded * norm(a.detach(), dim=-1)
            if bool(rows.any()):
                independent = null.not_following(a.detach()[rows])
            vanish = vanish | rows[..., None]
        return cls(problem, null, mixed.masked_fill(vanish, 0.0), right, rounded + noise, independent)

    def forward_errors(self, result: LstsqResult, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Bounds for x from those for z, its part in the null space, shape (..., k)."""
        # To first order: what is off in the constraints moves x by the pseudoinverse of C, and by that of ``A
        # Z`` times A of it, and its product with their multipliers moves the minimum (Elden, "Perturbation
        # theory for the least squares problem with linear equality constraints", SIAM J. Numer. Anal. 17,
        # 1980). Rounding errors of ``A Z`` and ``b - A s``, and what is wrong with A and b, are perturbations
        # of the problem for z. Errors are those of ``D x``, D being norms of columns of A.
        norm, null, a = torch.linalg.vector_norm, self.null, self.problem.a.detach()
        sizes = norms_of_columns(a)
        size = lengths(null.shortest) + lengths(x)
        total = null.noise * size
        if self.a.shape[-1]:
            mixed = norm(self.a.detach(), dim=-2)
            least = _smallest(mixed)
            inverse = ESTIMATED * result.conditions[..., None] / least
            if self.a.shape[-2] < self.a.shape[-1]:
                least = torch.minimum(least, _smallest(norm(self.a.detach(), dim=-1)))
                inverse = ESTIMATED * result.conditions[..., None] / least
            of_a = torch.linalg.matrix_norm(a)[..., None]
            of_residual = inverse**2 * of_a * residuals(result, size)
            total = null.noise * ((1 + inverse * of_a) * size + of_residual)
            of_data = inverse * (of_a * (size + lengths(z)) + lengths(self.problem.b.detach()))
            total = total + self.noise * (of_data + of_residual)
            total = total + result.forward_errors * lengths(mixed[..., None] * z) / least
        # Numbers that are much smaller than others may have underflowed.
        given = null.d.any(-2)
        if self.a.shape[-1]:
            given = given | self.problem.matters
        total = (total + UNDERFLOWN).masked_fill(~given, 0.0)
        return over(worst_of(sizes)[..., None] * total, lengths(sizes[..., None] * x))

    @property
    def doubts(self) -> tuple[str, str]:
        """Why ranks of the numbers as they are stored may be others, and which ones only rounding decides."""
        of_c, of_a = self.null.independent, self.independent
        row = next(iter(sorted(of_c, key=of_c.__getitem__)), None)
        which, advice = f"row {row} of C", "leave out constraints that follow from others"
        if row is None:
            which, advice = "a row of A", "leave rows out of A that are constraints"
        if not all((*of_c.values(), *of_a.values())):
            return (
                f"C of shape {tuple(self.null.c.shape)} has numerical rank {self.null.rank}, but {which} is "
                f"nearly a combination of its rows, and not exactly: no digit of x is guaranteed; {advice}"
            ), ""
        if not of_c and not of_a:
            return "", ""
        return "", (
            f"{which} is dropped as a combination of rows of C: it is one up to rounding, and the forward "
            f"error assumes that it is one exactly; {advice}"
        )


def norms_of_columns(a: torch.Tensor) -> torch.Tensor:
    """Norms of the columns of A, shape (..., n); ones where all of A vanishes."""
    return two_norms(a, -2).where(a.any(-1).any(-1)[..., None], 1.0)


def residuals(result: LstsqResult, like: torch.Tensor) -> torch.Tensor:
    """Norms of residuals as a tensor of the same shape."""
    return torch.as_tensor(result.residual_norm, dtype=like.dtype, device=like.device).reshape(like.shape)


def worst_of(columns: torch.Tensor) -> torch.Tensor:
    """The largest of what is known of right-hand sides, shape (..., k), of each problem."""
    return columns.amax(-1) if columns.shape[-1] else columns.new_zeros(columns.shape[:-1])


def _smallest(sizes: torch.Tensor) -> torch.Tensor:
    """The smallest that is not zero, shape (..., 1)."""
    found = pad(sizes.masked_fill(sizes == 0, torch.inf), (0, 1), value=torch.inf).amin(-1, keepdim=True)
    return found.masked_fill(found.isinf(), 1.0)


def _solved(
    call: Call, a: torch.Tensor, b: torch.Tensor, options: LeastSquaresOptions
) -> LeastSquaresOutcome:
    """The plain problem, for tensors on the engine's device."""
    b = b.expand(*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *b.shape[-2:])
    operands = {name: Taken(x.detach(), lambda y: y, x) for name, x in (("A", a), ("b", b))}
    inner = replace(call, operands=operands, weights=None)
    return solve_system(inner, broadcast_system(*inner.tensors), options)
