"""Ridge solutions and errors of prediction that an SVD leaves without digits, by the refinement of lstsq."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from neula.algorithms.krylov.batched_lstsq import DampedProblems, Underdetermined
from neula.algorithms.krylov.doubled_refinement import MAX_STEPS, FactoredProblems, Refinement
from neula.algorithms.orthogonal.r_only import householder_r
from neula.algorithms.scaling import binary_exponents
from neula.algorithms.spectra.inverse_norm import schatten_bounds
from neula.certificates.forward_error import MAX_RATE, SURE, enlarged, measured_error
from neula.certificates.verdict import Evidence, Limits, within
from neula.engines import FP64
from neula.kernels.shift import shift
from neula.kernels.small_problems.refining import over
from neula.problems.least_squares.prepared import LeastSquaresProblems
from neula.problems.least_squares.problem import LeastSquaresOptions, LeastSquaresSolutions
from neula.problems.least_squares.ridge_solutions import BoundedEstimate, Path, ScaledRidgeProblem, norm
from neula.problems.least_squares.run import solve_problems, with_exact_zeros

HALF = 2.0**-26
"""Forward error of small problems from which on they are refined: half of the digits are lost."""

QUARTER = 2.0**-13
"""Forward error from which on errors of prediction are refined, with as many right-hand sides as rows."""


@dataclass(frozen=True)
class Estimates:
    """Solutions and errors of prediction, with bounds on their errors."""

    path: Path
    # Solutions of the scaled problem, shape (p, n, k), and their forward errors, shape (p, k).
    x: BoundedEstimate
    residual: BoundedEstimate  # norms of residuals divided by the size of W, shape (p, k)
    left_out: BoundedEstimate  # errors of prediction of rows that are left out, shape (p, m, k)
    trace: BoundedEstimate  # sums of W_ii divided by the size of W, shape (p, 1)
    backward: torch.Tensor  # shape (p, k): backward errors of solutions
    limits: Limits  # numbers that are smaller than backward errors may be, relative to b, are as good as zero

    @classmethod
    def from_path(cls, path: Path, limits: Limits, options: LeastSquaresOptions) -> Estimates:
        """By the SVD, whose rank without damping is to be that which :func:`lstsq` finds; refined where that
        leaves too few digits.
        """
        scaled, zero = path.scaled, path.scaled.damps == 0
        if bool(zero.any()) and not bool(path.kept.all()):
            solved, accepted = _solved(scaled.a, scaled.b, options)
            same = solved.rank == path.kept[zero][0].sum()
            path = replace(path, certain=bool(accepted & same))
        x, residual = path.solutions(), path.residual_norms()
        errors = path.error_of_x(x, residual), path.error_of_residual(x, residual)
        predicted = path.left_out(x, residual)
        found = (x, errors[0]), (residual, errors[1]), predicted
        nothing = path.b_norm == 0
        first, second, third = (
            BoundedEstimate.from_arrays(y, error.masked_fill(nothing, 0)) for y, error in found
        )
        backward = path.backward_errors(*first)
        estimates = cls(path, first, second, third, path.trace, backward, limits)
        estimates._refine_all(options)
        return estimates

    @property
    def leave_one_out(self) -> BoundedEstimate:
        """Root mean squares of errors of prediction, shape (p, k)."""
        root = max(1, len(self.path.scaled.a)) ** 0.5
        return BoundedEstimate(*(norm(y, dim=1) / root for y in self.left_out))

    @property
    def gcv(self) -> BoundedEstimate:
        """Square roots of the errors of generalized cross-validation, shape (p, k)."""
        m, trace = len(self.path.scaled.a), self.trace
        value, error = (m**0.5 * y / trace.value.abs() for y in self.residual)
        return BoundedEstimate.from_arrays(
            value, error + torch.where(value == 0, 0.0, value * trace.relative)
        )

    def known(self, found: BoundedEstimate, most: float = SURE) -> torch.Tensor:
        """Whether numbers have so few errors, or are zero as far as b can say."""
        return (found.relative <= most) | (found.error <= self.limits.backward_error * self.path.b_norm)

    def _accepted(self, backward: torch.Tensor, most: float = SURE) -> torch.Tensor:
        """Whether solutions are accepted, with so few errors; shape (p, k)."""
        evidence = Evidence.from_errors(backward, self.x.error)
        return replace(self.limits, forward_error=most).accept(evidence)

    def _refine_all(self, options: LeastSquaresOptions) -> None:
        """Replace what has too few digits."""
        scaled, (m, n) = self.path.scaled, self.path.scaled.a.shape
        if not m or not n or not self.x.value.numel():
            return
        small, wide = replace(options, damp=1.0).refines_doubled(m, n), m < n and scaled.mean is None
        most = HALF if small else SURE
        few = ~(self._accepted(self.backward, most) & self.known(self.residual, most))
        doubtful = self._doubtful(QUARTER)
        of_trace = ~(self.trace.relative <= QUARTER)
        places = (few | doubtful.any(1) | of_trace).any(1).nonzero()[:, 0]
        rows = (doubtful.any(2).any(0) | of_trace.any()).nonzero()[:, 0]
        chunk, rhs = options.engine.tuning.chunk_elements, scaled.b.shape[1]
        if not len(places):
            return
        if (m + n) * len(rows) > chunk and len(rows) > n:  # more than those with a leverage of 1
            rows = rows[:0]
        size = (m + n) * max(n, rhs + len(rows))
        for part in places.split(max(1, chunk // size)):
            if small or not wide:
                self._refine(part, rows, by_multipliers=False)
            if wide:
                self._refine(part, rows, by_multipliers=True)
        few = ~self._accepted(self._backward())
        for place in few.any(1).nonzero()[:, 0].tolist():
            self._solve(place, options)
        self.backward.copy_(self._backward())
        doubtful = self._doubtful(SURE).any(2)
        doubtful &= doubtful.sum(1, keepdim=True) <= n  # leverages add up to the rank: no more are 1
        for place, row in doubtful.nonzero().tolist():
            self._leave_out(place, row, options)

    def _backward(self) -> torch.Tensor:
        """Backward errors, those that are too large with gradients in twice the working precision."""
        found = self.path.backward_errors(*self.x)
        places = (~within((found, self.limits.backward_error))).any(1).nonzero()[:, 0].tolist()
        return self.path.backward_errors(*self.x, places) if places else found

    def _doubtful(self, most: float) -> torch.Tensor:
        """Which rows leave too few digits of the errors of prediction, shape (p, m, k)."""
        missed = ~self.known(self.leave_one_out, most)[:, None]
        if not bool(missed.any()):
            return missed.expand_as(self.left_out.value)
        return missed & ~self.known(self.left_out, most)

    def _refine(self, places: torch.Tensor, rows: torch.Tensor, *, by_multipliers: bool) -> None:
        """Some dampings, with residuals of some unit vectors, in twice the working precision."""
        scaled = self.path.scaled
        k, n = scaled.b.shape[1], scaled.a.shape[1]
        units = torch.eye(len(scaled.a), dtype=torch.float64, device=rows.device)[:, rows]
        b, damps = torch.cat([scaled.b, units], 1), scaled.damps[places, None]
        if by_multipliers:
            x, residual = _refined_wide(scaled.a.expand(len(damps), -1, -1), damps, b)
            factor = torch.where(self.path.vanishes[places], self.path.least[places], damps).square()
        else:
            x, residual = _refined(scaled, scaled.damps[places], b)
            factor = 1 / self.path.size[places]
        self.x.put_at(places, x.value[:, :n, :k], x.error[:, :k])
        self.residual.put_at(
            places, *BoundedEstimate.from_arrays(*(factor * norm(y[..., :k], dim=1) for y in residual))
        )
        if not len(rows) or scaled.is_projected:
            return
        own = k + torch.arange(len(rows), device=rows.device)
        of_units, of_unit = (y[:, rows, own][..., None].real for y in residual)
        if len(rows) == len(scaled.a):
            self.trace.put_at(
                places, *BoundedEstimate.from_arrays(*(factor * y.sum(1) for y in (of_units, of_unit)))
            )
        found, error = (y[:, rows, :k] for y in residual)
        value = over(found, of_units)
        wrong = (error + value.abs() * of_unit) / (of_units - of_unit)
        wrong = torch.where(of_units > of_unit, wrong, torch.inf)
        self.left_out.put_at((places[:, None], rows), *BoundedEstimate.from_arrays(value, wrong))

    def _solve(self, place: int, options: LeastSquaresOptions) -> None:
        """Solve for one damping by the chain of :func:`lstsq`; answers below full rank are not accepted."""
        scaled = self.path.scaled
        damp = float(scaled.damps[place])
        found, accepted = _solved(scaled.a, scaled.b, replace(options, damp=damp))
        if damp:
            accepted = accepted & (found.rank == scaled.a.shape[1])
        error = torch.where(accepted, found.forward_error[0], torch.inf)
        where = torch.tensor([place], device=error.device)
        self.x.put_at(where, found.x, error[None])
        length = norm(scaled.columns[place] * found.x[0], dim=0)
        length, rounding = scaled.a.shape[1] ** 0.5 * length, sum(scaled.a.shape) * FP64.u
        error = enlarged(error, error) * length + rounding * (length + self.path.b_norm)
        residual, size = norm(scaled.b - scaled.a @ found.x[0], dim=0), self.path.size[place]
        self.residual.put_at(
            where, *BoundedEstimate.from_arrays((residual / size)[None], (error / size)[None])
        )

    def _leave_out(self, place: int, row: int, options: LeastSquaresOptions) -> None:
        """Fit all rows but one."""
        scaled = self.path.scaled
        if scaled.is_projected:
            return
        rest = torch.arange(len(scaled.a), device=scaled.a.device) != row
        where = torch.tensor([place], device=scaled.a.device)
        a = stacked(scaled, where)[0]
        below = a.new_zeros(len(a) - len(rest), scaled.b.shape[1])
        rest = torch.cat([rest, torch.ones(len(below), dtype=torch.bool, device=rest.device)])
        b = torch.cat([scaled.b, below])
        found, accepted = _solved(a[rest], b[rest], options)
        if scaled.damps[place]:
            accepted = accepted & (found.rank == a.shape[1])
        columns = norm(a[rest], dim=0)[:, None]
        error = found.forward_error[0]
        size = enlarged(error, error) * norm(columns * found.x[0], dim=0)
        error = norm(a[row] / torch.where(columns[:, 0] > 0, columns[:, 0], torch.inf)) * size
        error = error + len(a) * FP64.u * (scaled.b[row].abs() + a[row].abs() @ found.x[0].abs())
        error = torch.where(accepted, error, torch.inf)
        places = where, torch.tensor([row], device=a.device)
        value = scaled.b[row] - a[row] @ found.x[0]
        self.left_out.put_at(places, *BoundedEstimate.from_arrays(value[None], error[None]))


def stacked(scaled: ScaledRidgeProblem, places: torch.Tensor) -> torch.Tensor:
    """A with some dampings below, and the one vector that A is orthogonal to beside it."""
    (m, n), damps, beside = scaled.a.shape, scaled.damps[places, None], scaled.mean
    a = scaled.a.expand(len(damps), m, n)
    found = torch.cat([a, torch.diag_embed(damps.expand(-1, n))], 1)
    if beside is None:
        return found
    beside = torch.cat([beside, beside.new_zeros(n, 1)]).expand(len(damps), m + n, 1)
    return torch.cat([found, beside], 2)


def _refined(
    scaled: ScaledRidgeProblem, damps: torch.Tensor, b: torch.Tensor
) -> tuple[BoundedEstimate, BoundedEstimate]:
    """Solutions for some dampings with their forward errors, and residuals.

    The one vector that A is orthogonal to is another column.
    """
    beside = scaled.a[:, :0] if scaled.mean is None else scaled.mean
    a, damps = torch.cat([scaled.a, beside], 1), damps[:, None, None].expand(-1, scaled.a.shape[1], 1)
    damps = torch.cat([damps, damps.new_zeros(len(damps), beside.shape[1], 1)], 1)
    # In numbers near 1: columns by the larger of their elements and the smallest damping.
    of_a = binary_exponents(torch.cat([a.abs(), damps.amin(0).T]).amax(0))[:, None]
    of_b = binary_exponents(b.abs().amax(0))
    system = DampedProblems(shift(a, -of_a.mT), shift(damps, -of_a))
    b = torch.cat([shift(b, -of_b), b.new_zeros(a.shape[1], b.shape[1])]).expand(len(damps), -1, -1)
    refinement = _steps(system, b)
    found, residual = refinement.solution(), system.residual(b, refinement.high, refinement.low)
    error = torch.where(system.rate[:, None] <= MAX_RATE, system.norm_bound * refinement.left, torch.inf)
    error = error[:, None] + 4 * FP64.u * residual.abs()
    x = BoundedEstimate.from_arrays(shift(found.x, of_b - of_a), found.forward_error)
    return x, BoundedEstimate.from_arrays(shift(residual, of_b), shift(error, of_b))


def _refined_wide(
    a: torch.Tensor, damps: torch.Tensor, b: torch.Tensor
) -> tuple[BoundedEstimate, BoundedEstimate]:
    """Refine by the minimum-norm solution of ``A x + damp z = b``. Its multipliers are the residuals divided
    by the
    square of the damping, so that they do not vanish with it.
    """
    m, n = a.shape[1:]
    stacks = torch.cat([a, torch.diag_embed(damps.expand(-1, m))], 2)
    of_rows = binary_exponents(stacks.abs().amax(2, keepdim=True))
    b = shift(b, -of_rows)
    of_b = binary_exponents(b.abs().amax(1, keepdim=True))
    t, b = shift(stacks, -of_rows).mH, shift(b, -of_b)
    columns = torch.cat([torch.hypot(norm(a, dim=1), damps), damps.expand(-1, m)], 1)[..., None]
    columns = torch.where(columns > 0, columns, 1.0)
    system = Underdetermined(t, householder_r(t), columns)
    refinement = _steps(system, b)
    high, low = (columns[:, :n] * y[:, :n] for y in (refinement.high, refinement.low))
    known = torch.where(system.rate[:, None] <= MAX_RATE, refinement.left, torch.inf)
    x = BoundedEstimate.from_arrays(
        shift(refinement.high[:, :n], of_b), measured_error(known + norm(low, dim=1), norm(high, dim=1))
    )
    inverse_norm = schatten_bounds(system.inverse, upper=True)[1]
    error = (inverse_norm * known / columns.amax(1))[:, None]
    residual = refinement.high[:, n + m :]
    error = error + 4 * FP64.u * residual.abs()
    return x, BoundedEstimate.from_arrays(*(shift(y, of_b - of_rows) for y in (residual, error)))


def _steps(system: FactoredProblems, b: torch.Tensor) -> Refinement:
    """Refine until a step no longer reduces the error."""
    refinement = Refinement(system, b, 0.0)
    refinement.advance(MAX_STEPS)
    return refinement


def _solved(
    a: torch.Tensor, b: torch.Tensor, options: LeastSquaresOptions
) -> tuple[LeastSquaresSolutions, torch.Tensor]:
    problems = LeastSquaresProblems(a[None], b[None], options)
    run = with_exact_zeros(solve_problems(problems, is_batch=False), problems)
    return run.found, torch.from_numpy(run.accepted).to(a.device)
