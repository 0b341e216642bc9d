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
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch

from neula.algorithms.scaling import binary_exponents
from neula.certificates.forward_error import SURE, measured_error
from neula.certificates.kkt import KKTNorms
from neula.engines import FP64, Engine
from neula.kernels.doubled.doubled_normal import doubled_normal
from neula.kernels.magnitudes import squares
from neula.kernels.polar.svd import svd
from neula.kernels.shift import shift
from neula.kernels.small_problems.refining import over
from neula.pipeline.result import Attempt
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

    def near_one(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`in_units`."""
        return shift(x, self.of_a - self.of_b)

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
        lost = x - self.near_one(given)
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

    def solutions(self) -> torch.Tensor:
        """Solutions for all dampings, shape (p, n, k)."""
        return self.v @ (self.gains[:, :, None] * self.c)

    def residual_norms(self) -> torch.Tensor:
        """``||b - A x||`` for all dampings, divided by the size of W, shape (p, k)."""
        return torch.hypot(norm(self.weights[:, :, None] * self.c, dim=1), norm(self.rest, dim=0))

    @cached_property
    def trace(self) -> BoundedEstimate:
        """Trace of W divided by its size, shape (p, 1)."""
        before = float(self.scaled.before.sum()) if self.scaled.is_projected else 0.0
        found = self.weights.sum(1, keepdim=True) + self.outside - before
        wrong = self.weights * torch.where(self.kept, self.gains, 0.0)
        return BoundedEstimate.from_arrays(
            found, 2 * self.backward * wrong.sum(1, keepdim=True) + self.unit * found.abs()
        )

    def error_of_x(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Bound on ``||D (x - x*)|| / ||D x*||``, shape (p, k)."""
        if not x.numel():
            return norm(x, dim=1)
        moved = residual / self.least / self.least + self.steepest * norm(x, dim=1)
        wrong = self.backward * moved + self.unit * (norm(x, dim=1) + self.steepest * self.b_norm)
        return measured_error(self.scaled.columns.amax(1) * wrong, norm(self.scaled.columns * x, dim=1))

    def error_of_residual(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Bound on the error of its norm, divided by the size of W, shape (p, k)."""
        return self.backward * (norm(x, dim=1) + self.steepest * residual) + self.unit * self.b_norm

    @cached_property
    def steepest(self) -> torch.Tensor:
        """The largest gain, shape (p, 1)."""
        return self.gains.amax(1, keepdim=True) if len(self.s) else torch.zeros_like(self.least)

    def left_out(self, x: torch.Tensor, residual: torch.Tensor) -> BoundedEstimate:
        """Errors with which rows are predicted by fits without them, shape (p, m, k)."""
        of_rows = squares(self.u)
        found = _times(self.u, self.weights.mT[:, :, None] * self.c[:, None]).add_(self.rest[:, None])
        of_units = (of_rows @ self.weights.mT + self.rest_of_units)[..., None]
        row = (of_rows @ self.weights.square().mT + self.rest_of_units.clamp_min(0)).sqrt()[..., None]
        column = (of_rows @ self.gains.square().mT).sqrt()[..., None]
        # Of rows: W E x + A (A^H A + damp^2)^-1 E^H r, and the same of unit vectors.
        at_least = self.unit * (bool(self.outside) or self.scaled.is_projected)
        wrong = row * (self.backward * norm(x, dim=1) + self.unit * self.b_norm)
        wrong += column * (self.backward * residual)
        wrong += at_least * self.b_norm
        of_unit = 2 * self.backward * row * column + self.unit * of_units.abs() + at_least
        value = over(found, of_units)
        error = wrong.addcmul_(value.abs(), of_unit).div_((of_units - of_unit).clamp_min_(0))
        return BoundedEstimate.from_arrays(value.movedim(1, 0), error.movedim(1, 0))

    def backward_errors(
        self, x: torch.Tensor, forward_errors: torch.Tensor, doubled: Sequence[int] = ()
    ) -> torch.Tensor:
        """Backward error of each solution, for the problem with damping stacked below A, shape (p, k).

        As measured, of some dampings with gradients in twice the working precision, or what a change of b by
        ``A (x - x*)`` comes to.
        """
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
