"""Ridge solutions for many dampings and their errors of prediction, with bounds on the errors of both.

With ``A = U S V^H`` and ``W = I - A (A^H A + damp^2)^-1 A^H`` the residual is ``W b``, and a row that is left
out is predicted with the error ``(W b)_i / W_ii``. The eigenvalues of W are computed as
``damp^2 / (s^2 + damp^2)``: one minus the filter ``s^2 / (s^2 + damp^2)`` cancels. Where all rows of b are in
the range of A, W vanishes with the damping, and its size is a factor that quotients do not need.

Bounds are those of perturbation theory for the backward error E of the SVD, which is measured: the residual
moves by ``W E x + A (A^H A + damp^2)^-1 E^H r``, and ``W_ii`` likewise, with a unit vector as b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch

from neula.algorithms.krylov.batched_lstsq import DampedProblems, Underdetermined
from neula.algorithms.krylov.doubled_refinement import MAX_STEPS, Refinement
from neula.algorithms.orthogonal.r_only import householder_r
from neula.algorithms.scaling import binary_exponents
from neula.algorithms.spectra.inverse_norm import schatten_bounds
from neula.certificates.forward_error import MAX_RATE, SURE, enlarged, measured_error
from neula.certificates.kkt import KKTNorms
from neula.certificates.verdict import Evidence, Limits, within
from neula.engines import FP64, Engine
from neula.kernels.doubled.doubled_normal import doubled_normal
from neula.kernels.magnitudes import squares
from neula.kernels.polar.svd import svd
from neula.kernels.shift import shift
from neula.kernels.small_problems.refining import over
from neula.pipeline.result import Attempt
from neula.problems.least_squares.problem import (
    LeastSquaresOptions,
    LeastSquaresProblems,
    LeastSquaresSolutions,
)
from neula.problems.least_squares.run import solve_problems, with_exact_zeros
from neula.problems.orthogonal.certified import certified_qr

norm = torch.linalg.vector_norm

HIGHER_ORDER = 1.5
"""Changes of ``1 / s^2`` by those of s up to a tenth, relative to what they are to first order."""


@dataclass(frozen=True)
class ScaledRidgeProblem:
    """A, b and dampings in numbers near 1, so that no square is lost."""

    a: torch.Tensor  # shape (m, n)
    b: torch.Tensor  # shape (m, k)
    damps: torch.Tensor  # shape (p,)
    of_a: torch.Tensor  # binary exponent that was taken out of A and of the dampings
    of_b: torch.Tensor  # shape (k,): of the right-hand sides
    before: torch.Tensor  # shape (m, 1): leverages of what A and b are orthogonal to

    @classmethod
    def from_arrays(cls, a: torch.Tensor, b: torch.Tensor, damps: torch.Tensor, before: torch.Tensor) -> Self:
        of_a = binary_exponents(torch.cat([damps.new_zeros(1), damps, a.abs().flatten()]).amax())
        of_b = binary_exponents(torch.cat([b.real.new_zeros(1, b.shape[1]), b.abs()]).amax(0))
        return cls(shift(a, -of_a), shift(b, -of_b), shift(damps, -of_a), of_a, of_b, before)

    def in_units(self, x: torch.Tensor) -> torch.Tensor:
        """Solutions in the units that were given."""
        return shift(x, self.of_b - self.of_a)

    @cached_property
    def columns(self) -> torch.Tensor:
        """Norms of the columns of A with each damping below, shape (p, n, 1); 1 for zero."""
        columns = torch.hypot(norm(self.a, dim=0), self.damps[:, None])[..., None]
        return torch.where(columns > 0, columns, 1.0)

    @cached_property
    def mean(self) -> torch.Tensor | None:
        """The one vector that A and b are orthogonal to, shape (m, 1), the largest element 1; None where that
        is not known from its leverages: of means it has no negative element.
        """
        z, m = self.before.sqrt().to(self.a.dtype), len(self.a)
        if not m or abs(float(self.before.sum()) - 1) > m * FP64.u:
            return None
        given = torch.cat([self.a, self.b], 1)
        sizes = norm(given, dim=0)
        return z / z.real.max() if bool(((z.mH @ given).abs() <= 8 * m * FP64.u * sizes).all()) else None

    @property
    def is_projected(self) -> bool:
        """Whether leverages are there of directions that are not known."""
        return self.mean is None and bool(self.before.any())

    def rounding(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Relative rounding error of x as it is returned, shape (p, k)."""
        lost = x - shift(given, self.of_a - self.of_b)
        return over(norm(self.columns * lost, dim=1), norm(self.columns * x, dim=1))


class BoundedEstimate(NamedTuple):
    """Numbers, and bounds on their errors."""

    value: torch.Tensor
    error: torch.Tensor

    @classmethod
    def from_arrays(cls, value: torch.Tensor, error: torch.Tensor) -> Self:
        """Errors are infinite where they are not known."""
        return cls(value, error.nan_to_num(torch.inf, posinf=torch.inf))

    @property
    def relative(self) -> torch.Tensor:
        """Bound on the error relative to the exact number; infinite where that may be zero."""
        return measured_error(self.error, self.value.abs())

    def put_at(self, places: Any, value: torch.Tensor, error: torch.Tensor) -> None:
        """Take others at some places where they are not worse."""
        better = error <= self.error[places]
        self.error[places] = torch.where(better, error, self.error[places])
        better = better if better.ndim == value.ndim else better[:, None]
        self.value[places] = torch.where(better, value, self.value[places])


@dataclass(frozen=True)
class Path:
    """Solutions for many dampings, in terms of singular vectors."""

    scaled: ScaledRidgeProblem
    u: torch.Tensor  # shape (m, r): left singular vectors of A
    v: torch.Tensor  # shape (n, r)
    s: torch.Tensor  # shape (r,)
    noise: float  # ||A - U S V^H||, with what U and V lack in orthogonality
    outside: int  # dimension of what is orthogonal to U, and to what A and b are orthogonal to
    attempts: tuple[Attempt, ...]  # how A was factorized
    certain: bool = False  # whether the rank without damping is

    @classmethod
    def factorize(cls, scaled: ScaledRidgeProblem, engine: Engine) -> Self:
        """Factorize by a QR of A and the SVD of R; one direction orthogonal to A is reflected out of the way,
        since rounding makes a singular vector of it.
        """
        a, z, n = scaled.a, scaled.mean, scaled.a.shape[1]
        if z is not None:
            z = z / norm(z)
            z = torch.cat([z[:1] + 1, z[1:]]) / (1 + z[0]).sqrt()  # I - z z^H takes it to -e_1
            a = (a - z @ (z.mH @ a))[1:]
        qr = certified_qr(a[None], engine)
        left, s, vt = svd(qr.r[0])
        u = qr.q[0] @ left
        errors = [norm(a - (u * s) @ vt)]
        for x in (u, vt.mH):
            lacks = norm(x.mH @ x - torch.eye(len(s), dtype=x.dtype, device=x.device))
            errors.append(lacks * s.amax() if len(s) else lacks)
        noise = float(torch.stack(errors).sum()) + 4 * FP64.u * float(norm(a))
        if z is not None:
            u = torch.cat([u.new_zeros(1, len(s)), u])
            u = u - z @ (z.mH @ u)
        outside = 0 if n >= len(a) else len(a) - n
        return cls(scaled, u, vt.mH, s, noise, outside, qr.attempts)

    # --- eigenvalues, shape (p, r) ---

    @cached_property
    def kept(self) -> torch.Tensor:
        """Singular values that count: without damping not those that are rounding errors."""
        if not len(self.s):
            return self.scaled.damps[:, None] > self.s
        size = max(len(self.u), len(self.v))
        return (self.s > size * 2.0**-52 * self.s.max()) | (self.scaled.damps[:, None] > 0)

    @cached_property
    def lengths(self) -> torch.Tensor:
        """``sqrt(s^2 + damp^2)``, 1 where that is zero."""
        found = torch.hypot(torch.where(self.kept, self.s, 0.0), self.scaled.damps[:, None])
        return torch.where(found > 0, found, 1.0)

    @cached_property
    def cosines(self) -> torch.Tensor:
        """Square roots of the filters ``s^2 / (s^2 + damp^2)``."""
        return torch.where(self.kept, self.s, 0.0) / self.lengths

    @cached_property
    def gains(self) -> torch.Tensor:
        """``s / (s^2 + damp^2)``."""
        return self.cosines / self.lengths

    @cached_property
    def least(self) -> torch.Tensor:
        """The smallest ``sqrt(s^2 + damp^2)`` that counts, shape (p, 1)."""
        if not len(self.s):
            return torch.ones_like(self.scaled.damps)[:, None]
        return torch.where(self.kept, self.lengths, torch.inf).amin(1, keepdim=True).nan_to_num(posinf=1.0)

    @cached_property
    def vanishes(self) -> torch.Tensor:
        """Whether W vanishes with the damping, shape (p, 1): all of b is in the range of A."""
        square = bool(len(self.s)) and not self.outside and not self.scaled.is_projected
        return self.kept.all(1, keepdim=True) & square

    @cached_property
    def size(self) -> torch.Tensor:
        """The largest eigenvalue of W, shape (p, 1), which all that follows is divided by."""
        return torch.where(self.vanishes, (self.scaled.damps[:, None] / self.least).square(), 1.0)

    @cached_property
    def weights(self) -> torch.Tensor:
        """Eigenvalues ``damp^2 / (s^2 + damp^2)`` of W divided by its size; 1 where s does not count."""
        top = torch.where(self.vanishes, self.least, self.scaled.damps[:, None])
        return torch.where(self.kept, (top / self.lengths).square(), 1.0)

    @property
    def effective(self) -> torch.Tensor:
        """Effective degrees of freedom, shape (p,)."""
        return self.cosines.square().sum(1)

    @cached_property
    def backward(self) -> torch.Tensor:
        """Norm of the perturbation of A for which all is exact, shape (p, 1), with terms of higher order;
        infinite where singular values that count may be rounding errors.
        """
        dropped = torch.where(self.kept, 0.0, self.s).sum(1, keepdim=True)
        found = self.noise + dropped
        known = (found <= SURE * self.least) & (self.kept.all(1, keepdim=True) | self.certain)
        return torch.where(known, HIGHER_ORDER * found, torch.inf)

    @cached_property
    def unit(self) -> float:
        """Rounding errors of products with U and V, relative to A."""
        largest = float(self.s.max()) if len(self.s) else 0.0
        return self.noise / largest if largest > 0 else 4 * FP64.u

    # --- what is made of b ---

    @cached_property
    def c(self) -> torch.Tensor:
        """``U^H b``, shape (r, k)."""
        return self.u.mH @ self.scaled.b

    @cached_property
    def rest(self) -> torch.Tensor:
        """The part of b outside the range of A, shape (m, k)."""
        if not self.outside:
            return torch.zeros_like(self.scaled.b)
        left = self.scaled.b - self.u @ self.c
        return left - self.u @ (self.u.mH @ left)

    @cached_property
    def rest_of_units(self) -> torch.Tensor:
        """The part of ``W_ii`` outside the range of A, shape (m, 1)."""
        before = self.scaled.before
        if self.outside:
            return (1 - before - squares(self.u).sum(1, keepdim=True)).clamp_min(0)
        return -before if self.scaled.is_projected else torch.zeros_like(before)

    @cached_property
    def b_norm(self) -> torch.Tensor:
        return norm(self.scaled.b, dim=0)

    @cached_property
    def trace(self) -> BoundedEstimate:
        """Trace of W divided by its size, shape (p, 1)."""
        before = float(self.scaled.before.sum()) if self.scaled.is_projected else 0.0
        found = self.weights.sum(1, keepdim=True) + self.outside - before
        wrong = self.weights * torch.where(self.kept, self.gains, 0.0)
        return BoundedEstimate.from_arrays(
            found, 2 * self.backward * wrong.sum(1, keepdim=True) + self.unit * found.abs()
        )

    def estimates(self) -> tuple[BoundedEstimate, BoundedEstimate, BoundedEstimate]:
        """Solutions, shape (p, n, k), with ``||D (x - x*)|| / ||D x*||``; norms of residuals divided by the
        size of W, shape (p, k); and errors with which rows are predicted without them, shape (p, m, k).
        """
        x = self.v @ (self.gains[:, :, None] * self.c)
        residual = torch.hypot(norm(self.weights[:, :, None] * self.c, dim=1), norm(self.rest, dim=0))
        length = error = norm(x, dim=1)
        if x.numel():
            moved = residual / self.least / self.least + self.steepest * length
            wrong = self.backward * moved + self.unit * (length + self.steepest * self.b_norm)
            columns = self.scaled.columns
            error = measured_error(columns.amax(1) * wrong, norm(columns * x, dim=1))
        of_residual = self.backward * (length + self.steepest * residual) + self.unit * self.b_norm
        return (
            BoundedEstimate.from_arrays(x, error),
            BoundedEstimate.from_arrays(residual, of_residual),
            self._left_out(length, residual),
        )

    @cached_property
    def steepest(self) -> torch.Tensor:
        """The largest gain, shape (p, 1)."""
        return self.gains.amax(1, keepdim=True) if len(self.s) else torch.zeros_like(self.least)

    def _left_out(self, length: torch.Tensor, residual: torch.Tensor) -> BoundedEstimate:
        """Errors with which rows are predicted by fits without them, shape (p, m, k)."""
        of_rows = squares(self.u)
        found = _times(self.u, self.weights.mT[:, :, None] * self.c[:, None]).add_(self.rest[:, None])
        of_units = (of_rows @ self.weights.mT + self.rest_of_units)[..., None]
        row = (of_rows @ self.weights.square().mT + self.rest_of_units.clamp_min(0)).sqrt()[..., None]
        column = (of_rows @ self.gains.square().mT).sqrt()[..., None]
        # Of rows: W E x + A (A^H A + damp^2)^-1 E^H r, and the same of unit vectors.
        at_least = self.unit * (bool(self.outside) or self.scaled.is_projected)
        wrong = row * (self.backward * length + self.unit * self.b_norm)
        wrong += column * (self.backward * residual)
        wrong += at_least * self.b_norm
        of_unit = 2 * self.backward * row * column + self.unit * of_units.abs() + at_least
        value = over(found, of_units)
        error = wrong.addcmul_(value.abs(), of_unit).div_((of_units - of_unit).clamp_min_(0))
        return BoundedEstimate.from_arrays(value.movedim(1, 0), error.movedim(1, 0))

    def backward_errors(
        self, x: torch.Tensor, forward_errors: torch.Tensor, doubled: Sequence[int] = ()
    ) -> torch.Tensor:
        """Backward error of each solution, for the problem with damping stacked below A, shape (p, k)."""
        # As measured, of some dampings with gradients in twice the working precision, or what a change of b
        # by ``A (x - x*)`` comes to.
        scaled, a = self.scaled, self.scaled.a
        damps, x = scaled.damps[:, None], x.movedim(0, 1)
        residual = scaled.b[:, None] - _times(a, x)
        gradient = _times(a.mH, residual).sub_(damps.square() * x)
        below = x.new_zeros(len(x), x.shape[2])
        for place in doubled:
            stack = torch.cat([a, damps[place].expand(len(x)).diag()])
            of_b = torch.cat([scaled.b, below])
            gradient[:, place] = doubled_normal(stack, x[:, place].contiguous(), below, of_b)[1][0]
        weight = torch.hypot(self.s[:, None], damps.mT)
        if len(self.s):
            weight = torch.where(weight > self.s.max() * 1e-15, weight, torch.inf)
        columns = scaled.columns.movedim(0, 1)
        projected = norm(_times(self.v.mH, gradient) / weight[..., None], dim=0)
        image, b = norm(columns * x, dim=0), norm(scaled.b, dim=0)
        of_error = len(columns) ** 0.5 * over(forward_errors / (1 - forward_errors) * image, image + b)
        measured = KKTNorms(
            residual=torch.hypot(norm(residual, dim=0), damps * norm(x, dim=0)),
            wrong=norm(gradient / columns, dim=0),
            projected=projected,
            rest=torch.zeros_like(projected),
            image=image,
            b=b,
        )
        return torch.fmin(measured.backward_error, of_error)


def _times(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A product with vectors for all dampings and right-hand sides at once, shape (n, p, k) to (m, p, k)."""
    return (a @ x.flatten(1)).unflatten(1, x.shape[1:])


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
        """By the SVD, refined where digits are few; without damping of the rank that :func:`lstsq` has."""
        scaled, zero = path.scaled, path.scaled.damps == 0
        if bool(zero.any()) and not bool(path.kept.all()):
            solved, accepted = _solved(scaled.a, scaled.b, options)
            same = solved.rank == path.kept[zero][0].sum()
            path = replace(path, certain=bool(accepted & same))
        nothing = path.b_norm == 0
        x, residual, left_out = (BoundedEstimate(y, e.masked_fill(nothing, 0)) for y, e in path.estimates())
        backward = path.backward_errors(*x)
        estimates = cls(path, x, residual, left_out, path.trace, backward, limits)
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
        self.residual.put_at(places, *(factor * norm(y[..., :k], dim=1) for y in residual))
        if not len(rows) or scaled.is_projected:
            return
        own = k + torch.arange(len(rows), device=rows.device)
        of_units, of_unit = (y[:, rows, own][..., None].real for y in residual)
        if len(rows) == len(scaled.a):
            self.trace.put_at(places, *(factor * y.sum(1) for y in (of_units, of_unit)))
        found, error = (y[:, rows, :k] for y in residual)
        value = over(found, of_units)
        wrong = (error + value.abs() * of_unit) / (of_units - of_unit)
        wrong = torch.where(of_units > of_unit, wrong, torch.inf)
        self.left_out.put_at((places[:, None], rows), value, wrong)

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
        self.residual.put_at(where, (residual / size)[None], (error / size)[None])

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
        self.left_out.put_at(places, value[None], error[None])


def stacked(scaled: ScaledRidgeProblem, places: torch.Tensor) -> torch.Tensor:
    """A with some dampings below, and in another column the vector that A is orthogonal to."""
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
    """Solutions for some dampings with their forward errors, and residuals."""
    # The one vector that A is orthogonal to is another column.
    beside = scaled.a[:, :0] if scaled.mean is None else scaled.mean
    a, damps = torch.cat([scaled.a, beside], 1), damps[:, None, None].expand(-1, scaled.a.shape[1], 1)
    damps = torch.cat([damps, damps.new_zeros(len(damps), beside.shape[1], 1)], 1)
    # In numbers near 1: columns by the larger of their elements and the smallest damping.
    of_a = binary_exponents(torch.cat([a.abs(), damps.amin(0).T]).amax(0))[:, None]
    of_b = binary_exponents(b.abs().amax(0))
    system = DampedProblems(shift(a, -of_a.mT), shift(damps, -of_a))
    b = torch.cat([shift(b, -of_b), b.new_zeros(a.shape[1], b.shape[1])]).expand(len(damps), -1, -1)
    refinement = Refinement(system, b, 0.0)  # until a step no longer reduces the error
    refinement.advance(MAX_STEPS)
    found, residual = refinement.solution(), system.residual(b, refinement.high, refinement.low)
    error = torch.where(system.rate[:, None] <= MAX_RATE, system.norm_bound * refinement.left, torch.inf)
    error = error[:, None] + 4 * FP64.u * residual.abs()
    x = BoundedEstimate.from_arrays(shift(found.x, of_b - of_a), found.forward_error)
    return x, BoundedEstimate.from_arrays(shift(residual, of_b), shift(error, of_b))


def _refined_wide(
    a: torch.Tensor, damps: torch.Tensor, b: torch.Tensor
) -> tuple[BoundedEstimate, BoundedEstimate]:
    """Refine by the minimum-norm solution of ``A x + damp z = b``. Its multipliers are the residuals divided
    by the square of the damping, so that they do not vanish with it.
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
    refinement = Refinement(system, b, 0.0)
    refinement.advance(MAX_STEPS)
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


def _solved(
    a: torch.Tensor, b: torch.Tensor, options: LeastSquaresOptions
) -> tuple[LeastSquaresSolutions, torch.Tensor]:
    problems = LeastSquaresProblems(a[None], b[None], options)
    run = with_exact_zeros(solve_problems(problems, is_batch=False), problems)
    return run.found, torch.from_numpy(run.accepted).to(a.device)
