"""Least squares with equality constraints, through the null space of C, and whitened problems: evidence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from neula.algorithms.scaled_problems import OF_ZERO, ScaledProblems, lengths
from neula.certificates.forward_error import ESTIMATED, least_squares_error, residual_ratio
from neula.engines import FP64
from neula.kernels.shift import shift
from neula.kernels.small_problems.refining import over
from neula.pipeline.call import Call
from neula.pipeline.inputs import Taken
from neula.pipeline.result import Attempt, LstsqResult
from neula.pipeline.shapes import broadcast_system
from neula.problems.least_squares.fit import LinearFit
from neula.problems.least_squares.null_space import NullSpace
from neula.problems.least_squares.problem import LeastSquaresOptions
from neula.problems.least_squares.solution import LeastSquaresOutcome, solve_system

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
        """Norms of the residuals of x as it is returned, shape (..., k).

        ``rounded``, shape (..., n, k): in scaled units. ``rounding``, shape (..., k): relative rounding error
        of x; without one, norms are those that were measured.
        """
        measured = residuals(self.solved.result, rounding)
        if not bool(rounding.any()):
            return measured
        a, b = self.problem.a.detach(), self.problem.b.detach()
        image = shift(a @ rounded, self.of_x - self.problem.b_columns)
        return lengths(b - image).where(rounding > 0, measured)

    def fit_in_units(self, call: Call, rows: int, factor: torch.Tensor | None, *, is_vector: bool) -> Any:
        """Data for the statistics, in the user's units.

        ``rows``: how many are data, and not damping. ``factor``: of the covariance of b.
        """
        fit = self.solved.result._fit
        if not isinstance(fit, LinearFit):
            return fit
        units = self.problem.units
        of_b = self.problem.b_columns.expand(*self.x.shape[:-2], 1, self.x.shape[-1])
        of_b = replace(fit.shapes, b=of_b).columns
        basis = self.basis
        if basis is not None:
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
    """The solution of a problem without constraints.

    ``options``: of a plain problem. ``noise``: relative perturbation of A and b that the covariance comes to.
    """
    problem = problem.in_units(torch.zeros_like(problem.columns))
    solved = _solved(call, problem.a, problem.b, options)
    result, norms = solved.result, norms_of_columns(problem.a.detach())
    size = lengths(norms[..., None] * result.x.detach())
    ratio = residual_ratio(residuals(result, size), 1.0, size)
    forward = result.forward_errors
    if noise:
        condition = ESTIMATED * result.conditions[..., None]
        forward = forward + least_squares_error(condition, torch.full_like(size, noise), ratio)
        forward = forward.masked_fill(~problem.b.detach().any(-2), 0.0)
    if problem.limited is not None:  # statistics depend on A relative to the damping
        solved = replace(solved, result=replace(result, _fit=None))
    return ConstrainedSolution(
        solved, result.x, norms, forward, result.backward_errors, problem, problem.b_columns
    )


def constrained(
    call: Call,
    problem: ScaledProblems,
    options: LeastSquaresOptions,
    constraints: tuple[torch.Tensor, torch.Tensor],
    noise: float,
) -> ConstrainedSolution:
    """The solution of a problem with constraints, through the null space of C.

    Raises ValueError where no x fulfils all constraints.
    """
    units = problem.relative, torch.full_like(problem.relative, OF_ZERO)
    found = _constrained(call, problem, options, constraints, noise, *units)
    left = found.solved.result.ranks < (0 if found.basis is None else found.basis.shape[1])
    scaled = found.problem.columns != problem.units
    if bool(scaled.any()) and bool(left.any()):  # what is shortest is to be so in given units
        return _constrained(call, problem, options, constraints, noise, torch.zeros_like(problem.relative))
    return found


def _constrained(
    call: Call,
    problem: ScaledProblems,
    options: LeastSquaresOptions,
    constraints: tuple[torch.Tensor, torch.Tensor],
    noise: float,
    *units: torch.Tensor,
) -> ConstrainedSolution:
    problem, null, of_x = _null_space(call, problem, constraints, *units)
    of_b = problem.b_columns.masked_fill(~problem.b.any(-2, keepdim=True), OF_ZERO)
    of_b = torch.maximum(of_b, of_x)
    if null.basis.shape[1]:  # x is in the units of the larger one of b and d
        null, of_x = null.scaled(of_x - of_b), of_b
    of_x, of_b = (y.masked_fill(y == OF_ZERO, 0) for y in (of_x, of_b))
    problem = replace(problem, b=shift(problem.b, problem.b_columns - of_b), b_columns=of_b)
    rest = _Rest.from_null_space(problem, null, shift(null.shortest, of_x - of_b), noise)
    options = replace(options, unit=options.unit + null.noise)
    doubt, remark = rest.doubts
    solved = _solved(call, rest.a, rest.b, options)
    z = solved.result.x
    x = null.corrected(null.shortest + null.basis @ z)
    forward = rest.forward_errors(solved.result, x.detach(), z.detach())
    error = null.errors(x.detach())  # of rows
    told = doubt or f"{null.rank} of {len(null.c)} constraints on {len(null.basis)} unknowns independent"
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
        (Attempt("null space of C by QR", not doubt, told),),
    )


def _null_space(
    call: Call,
    problem: ScaledProblems,
    constraints: tuple[torch.Tensor, torch.Tensor],
    relative: torch.Tensor,
    *others: torch.Tensor,
) -> tuple[ScaledProblems, NullSpace, torch.Tensor]:
    """Null space of the constraints in scaled unknowns, the problem in these, and their exponents."""
    found = _in_units(call, problem, constraints, relative)
    for other in others:  # units may have made dependent rows of independent ones
        if found[1].rank == min(constraints[0].shape):
            break
        again = _in_units(call, problem, constraints, other)
        found = again if again[1].rank > found[1].rank else found
    found[1].check(*constraints)
    return found


def _in_units(
    call: Call,
    problem: ScaledProblems,
    constraints: tuple[torch.Tensor, torch.Tensor],
    relative: torch.Tensor,
) -> tuple[ScaledProblems, NullSpace, torch.Tensor]:
    """Unknowns and rows of C are scaled, and d so that x is near 1: the last exponents are those of x.

    Unknowns that are ``OF_ZERO`` next to others are in the units of the columns of C.
    """
    c, d = constraints
    zero, of_c = relative == OF_ZERO, torch.where(c != 0, _exponents(c), OF_ZERO)
    if bool(zero.any()):  # these columns are measured by C alone
        others = (of_c - relative).masked_fill(zero | (of_c == OF_ZERO), OF_ZERO).amax(1, keepdim=True)
        others = torch.where(others == OF_ZERO, of_c.amax(1, keepdim=True), others)
        within = torch.where((of_c != OF_ZERO) & (others != OF_ZERO), of_c - others, OF_ZERO)
        within = within.amax(0) if len(c) else within.sum(0)
        within = within.masked_fill(within == OF_ZERO, 0)
        relative = torch.where(zero, torch.maximum(within, problem.relative - FARTHEST), relative)
    problem = problem.in_units(relative)
    whole = problem.columns[..., :1] - relative[:1]
    of_c = torch.where(c != 0, of_c - relative, OF_ZERO)
    of_rows = of_c.amax(1, keepdim=True) if c.shape[1] else of_c.sum(1, keepdim=True)
    of_rows = of_rows.masked_fill(of_rows == OF_ZERO, 0)
    of_d = torch.where(d != 0, _exponents(d) - of_rows, OF_ZERO)
    of_d = of_d.amax(0, keepdim=True) if len(d) else of_d.new_full((1, d.shape[1]), OF_ZERO)
    with call.computing():
        scaled, d = shift(c, -relative - of_rows), shift(d, -of_rows - of_d)
        lost = (shift(scaled, relative + of_rows) != c).any(1)
        null = NullSpace.factorize(scaled, d, call.engine, lost.nonzero().flatten().tolist())
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
        """Bounds for x from those for z, its part in the null space, shape (..., k).

        To first order: what is off in the constraints moves x by the pseudoinverse of C, and by that of
        ``A Z`` times A of it, and its product with their multipliers moves the minimum (Elden, "Perturbation
        theory for the least squares problem with linear equality constraints", SIAM J. Numer. Anal. 17,
        1980). Rounding errors of ``A Z`` and ``b - A s``, and what is wrong with A and b, are
        perturbations of the problem for z. Errors are those of ``D x``, D being norms of columns of A.
        """
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
            given = given | self.problem.b.detach().any(-2)
        total = (total + UNDERFLOWN).masked_fill(~given, 0.0)
        return over(sizes.amax(-1, keepdim=True) * total, lengths(sizes[..., None] * x))

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
    return torch.linalg.vector_norm(a, dim=-2).where(a.any(-1).any(-1)[..., None], 1.0)


def residuals(result: LstsqResult, like: torch.Tensor) -> torch.Tensor:
    """Norms of residuals as a tensor of the same shape."""
    return torch.as_tensor(result.residual_norm, dtype=like.dtype, device=like.device).reshape(like.shape)


def worst_of(columns: torch.Tensor) -> torch.Tensor:
    """The largest of what is known of right-hand sides, shape (..., k), of each problem."""
    return columns.amax(-1) if columns.shape[-1] else columns.new_zeros(columns.shape[:-1])


def _smallest(sizes: torch.Tensor) -> torch.Tensor:
    """The smallest that is not zero, shape (..., 1)."""
    found = sizes.masked_fill(sizes == 0, torch.inf).amin(-1, keepdim=True)
    return found.masked_fill(found.isinf(), 1.0)


def _solved(
    call: Call, a: torch.Tensor, b: torch.Tensor, options: LeastSquaresOptions
) -> LeastSquaresOutcome:
    """The plain problem, for tensors on the engine's device."""
    b = b.expand(*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *b.shape[-2:])
    operands = {name: Taken(x.detach(), lambda y: y, x) for name, x in (("A", a), ("b", b))}
    inner = replace(call, operands=operands)
    return solve_system(inner, broadcast_system(*inner.tensors), options, None)
