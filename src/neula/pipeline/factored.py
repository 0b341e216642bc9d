"""Solutions, determinants and inverses by factors ``A = M1 M2`` that are there, with evidence and gradients.

The factors may be as inaccurate as any: solutions are refined with A in double precision, and
:mod:`neula.certificates.factored` measures how far ``M1 M2`` is from A. Everything is that of ``R A C``,
where R and C are powers of two that bring columns, and of definite matrices rows and columns, near norm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import torch

from neula.algorithms.krylov.iterative_refinement import MAX_ITERATIONS
from neula.algorithms.scaling import binary_exponents, power_of_two_scales
from neula.certificates.factored import logdet_error, shown_norm
from neula.certificates.forward_error import MAX_RATE, enlarged, left_by_update, where
from neula.certificates.orthogonality import DIRECTIONS, directions, margin
from neula.certificates.residuals import quotient
from neula.engines import FP64
from neula.engines.formats import in_double
from neula.kernels.cholesky.symmetric import hermitian_from_lower
from neula.kernels.magnitudes import largest_magnitude, two_norms
from neula.kernels.phases import phases
from neula.kernels.precision import plain_arithmetic
from neula.kernels.shift import shift
from neula.kernels.triangular_inverse import triangular_inverse
from neula.pipeline.gradients import attach_system
from neula.pipeline.solutions import applied, does_not_fit

Tensor = torch.Tensor


class FactorErrors(NamedTuple):
    """Measured errors of factors, shape (P, 1), for the logarithm (P,)."""

    rate: Tensor  # ||E||_2
    left: Tensor  # ||M1^-1||_2
    right: Tensor  # ||M2^-1||_2
    inverse: Tensor  # ||M2^-1 M1^-1||_2
    logdet: Tensor  # | log |det A| - log |det M1 M2| |
    condition: Tensor  # ||R A C||_F ||M2^-1 M1^-1||_2


class RefinedColumns(NamedTuple):
    """Solutions of ``A x = b`` in double precision, and bounds of their remaining errors."""

    z: Tensor  # shape (P, n, K): x is C z 2^powers
    powers: Tensor  # shape (P, 1, K)
    size: Tensor  # ||z||, shape (P, K)
    error: Tensor  # bound on that of the difference from the solution
    energy: Tensor  # bound on ||M2 (z - z*)||, for b^H x
    backward_error: Tensor  # of the solution before its last correction, in the 2-norm
    steps: int  # solves with the factors


def near_one(b: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``scales * b`` with columns brought near 1, and the exponents of the powers of two that did so."""
    # Squares of other numbers overflow or underflow.
    if not b.numel():
        return b, b.real.new_zeros(*b.shape[:-2], 1, b.shape[-1], dtype=torch.int32)
    powers = binary_exponents(largest_magnitude(b, -2, keepdim=True))
    b = shift(b, -powers)
    if scales is None or bool((scales == 1).all()):
        return b, powers
    b, more = near_one(scales * b)
    return b, powers + more


def rounded_shift(z: Tensor, exponents: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``z 2^e`` rounded to a dtype, in double precision, and its rounding errors relative to z."""
    # OverflowError if it does not fit; errors are larger than u if it underflows.
    x = shift(z, exponents).to(dtype).to(z)
    if bool((x.isinf() & z.isfinite()).any()):
        raise does_not_fit(dtype)
    return x, (shift(x, -exponents) - z).abs()


@dataclass(frozen=True, eq=False)
class FactoredMatrix:
    """Factors of a batch of square matrices, all in double precision."""

    a: Tensor  # shape (P, n, n): A as given, Hermitian if its factors are L L^H
    scales: tuple[Tensor, Tensor]  # R, shape (P, n, 1), and C, shape (P, 1, n)
    left: Tensor  # M1 of R A C: lower triangular, with a diagonal of ones, or orthonormal
    right: Tensor  # M2: upper triangular
    kind: str  # {"lower", "unit", "orthonormal"}: which of these M1 is
    order: Tensor | None = None  # shape (P, n, 1): M1 M2 has the rows of A in this order
    swaps: Tensor | None = None  # shape (P,): interchanges of two rows that lead to it

    @classmethod
    def definite(cls, a: Tensor, lower: Tensor) -> Self:
        """Factors of ``A = L L^H``, shape (P, n, n), of which the lower triangle is read."""
        a = hermitian_from_lower(in_double(a.to(lower.device)))
        diagonal = a.diagonal(dim1=-2, dim2=-1).real
        rows = torch.ldexp(torch.ones_like(diagonal), -(torch.frexp(diagonal)[1] // 2))[..., None]
        left = _times(in_double(lower), rows)
        return cls(a, (rows, rows.mT), left, left.mH, "lower")

    @classmethod
    def general(
        cls,
        a: Tensor,
        left: Tensor,
        right: Tensor,
        kind: str,
        order: Tensor | None = None,
        swaps: Tensor | None = None,
    ) -> Self:
        """Factors of ``A = M1 M2``, shape (P, n, n), with rows in an order, shape (P, n)."""
        a = in_double(a.to(left.device))
        nothing = a.real.new_zeros(len(a), 1, a.shape[-1])
        columns = power_of_two_scales(a.abs().amax(-2, keepdim=True) if a.numel() else nothing)
        scales = torch.ones_like(columns.mT), columns
        where = None if order is None else order[..., None]
        return cls(a, scales, in_double(left), _times(in_double(right), columns), kind, where, swaps)

    @cached_property
    def scaled(self) -> Tensor:
        rows, columns = self.scales
        return _times(_times(self.a, rows), columns)

    def by_left(self, y: Tensor) -> Tensor:
        """``M1^-1 y``."""
        if self.order is not None:
            y = torch.take_along_dim(y, self.order, -2)
        if self.kind == "orthonormal":
            return applied(self.left.mH.__matmul__, self.left, y)
        return _substituted(self.left, y, upper=False, unitriangular=self.kind == "unit")

    def by_right(self, y: Tensor) -> Tensor:
        """``M2^-1 y``."""
        return _substituted(self.right, y, upper=True)

    def by_right_transposed(self, y: Tensor) -> Tensor:
        """``M2^-H y``."""
        return _substituted(self.right.mH, y, upper=False)

    def by_transposed(self, y: Tensor) -> Tensor:
        """``M1^-H M2^-H y``."""
        y = self.by_right_transposed(y)
        if self.kind == "orthonormal":
            y = applied(self.left.__matmul__, self.left, y)
        else:
            y = _substituted(self.left.mH, y, upper=True, unitriangular=self.kind == "unit")
        return y if self.order is None else torch.take_along_dim(y, self.order.argsort(-2), -2)

    @cached_property
    def errors(self) -> FactorErrors:
        """How far the product of the factors is from A, and norms of their inverses."""
        n, norm = self.a.shape[-1], torch.linalg.vector_norm
        g = directions(n, self.a.device, self.a.dtype).expand(len(self.a), -1, -1)
        beside = g.shape[-1]
        v = self.by_right(g)
        y = self.by_left(torch.cat([self.scaled @ v, g], -1))
        image, y = y[..., :beside] - g, y[..., beside:]
        rate, left, right, inverse = (shown_norm(x) for x in (image, y, v, self.by_right(y)))
        logdet = logdet_error(image, g, self._noise(g, v))
        if self.kind == "orthonormal":  # log |det Q| is half of that of Q^T Q
            lost = self.left.mH @ (self.left @ g) - g
            logdet = logdet + logdet_error(lost, g, math.sqrt(n) * FP64.u * g.abs()) / 2
        condition = inverse * norm(self.scaled, dim=(-2, -1))[..., None]
        return FactorErrors(rate, left, right, inverse, logdet, condition)

    def _noise(self, g: Tensor, v: Tensor) -> Tensor:
        """Rounding errors of ``E G`` for ``v = M2^-1 G``, which may be as large as E G itself."""
        # Those of a product and of substitutions, some u times the products of magnitudes, with random signs.
        rows = self.scaled.abs() @ v.abs()
        if self.kind == "orthonormal":
            rows = two_norms(rows, -2, keepdim=True).expand_as(rows)
        else:
            rows = rows if self.order is None else torch.take_along_dim(rows, self.order, -2)
            unit = self.kind == "unit"
            left = self.left.tril(-1) if unit else self.left
            rows = (rows + left.abs() @ g.abs()) * g.flip(-1)
            rows = _substituted(self.left, rows, upper=False, unitriangular=unit).abs()
        return FP64.u * (rows + self.right.abs() @ v.abs() + g.abs())

    def refactorized(self, bound: float) -> FactoredMatrix:
        """LAPACK's factors in double precision where these are too inaccurate to refine with; ``bound``:
        what their residual was when they were made. Raises ValueError if they are not those of A.
        """
        if bool((self.errors.rate <= MAX_RATE).all()):
            return self
        norm, g = torch.linalg.vector_norm, directions(self.a.shape[-1], self.a.device, self.a.dtype)
        image = self.scaled @ g
        lost = norm(image - self.left @ (self.right @ g), dim=(-2, -1))
        bound *= DIRECTIONS**0.5 * margin(len(g), DIRECTIONS)  # which was that of an estimate
        if bound < torch.inf and not bool((lost <= bound * norm(image, dim=(-2, -1))).all()):
            raise ValueError(
                "A was changed since it was factorized: factorize it again, or a copy that nobody changes"
            )
        found = self.by_lapack()
        if found is None or not bool((found.errors.rate < self.errors.rate).any()):
            return self
        return found

    def by_lapack(self) -> FactoredMatrix | None:
        """The LU factors of LAPACK in double precision; None if a matrix is singular."""
        lu, pivots, info = torch.linalg.lu_factor_ex(self.scaled)
        if bool(info.any()):
            return None
        rows = torch.arange(lu.shape[-1], device=lu.device, dtype=torch.float64)
        order = (torch.lu_unpack(lu, pivots, unpack_data=False)[0].real.mT @ rows[:, None]).long()
        swaps = (pivots != rows + 1).sum(-1)
        return replace(self, left=lu, right=lu.triu(), kind="unit", order=order, swaps=swaps)

    def refined(self, b: Tensor, u: float) -> RefinedColumns:
        """Solve for columns of b, shape (P, n, K), in double precision, until x has an error of a few u."""
        # With the residual r of x, and ``y = M1^-1 r``, the error of ``x + M2^-1 y`` is ``M2^-1 ((I + E)^-1 -
        # I) y``, and what the rounding errors of r become.
        a, norm = self.scaled, torch.linalg.vector_norm
        b, powers = near_one(b, self.scales[0])
        n, rate = b.shape[-2], self.errors.rate
        size_a, size_b = norm(a, dim=(-2, -1))[..., None], norm(b, dim=-2)
        z, before = self.by_left(b), None
        x, steps = self.by_right(z), 1
        while steps < MAX_ITERATIONS:
            steps += 1
            r = b - applied(a.__matmul__, a, x)
            y = self.by_left(r)
            d = self.by_right(y)
            step, terms = norm(d, dim=-2), size_a * norm(x, dim=-2) + size_b
            x = x + d
            noise = math.sqrt(n) * FP64.u * terms
            if before is None:  # y is E z: larger ones are those of another matrix
                known = norm(y, dim=-2) <= 2 * rate * norm(z, dim=-2) + DIRECTIONS * self.errors.left * noise
                before = torch.full_like(step, torch.inf)
            enough = torch.maximum(u / 2 * norm(x, dim=-2), self.errors.inverse * noise)
            solved = (step <= enough) & (norm(r, dim=-2) <= u * terms + noise / 4)
            if bool((solved | ~(step <= before / 2)).all()):
                break
            before = step
        energy = left_by_update(rate) * norm(y, dim=-2)
        size = norm(x, dim=-2)
        error = self.errors.right * energy + enlarged(self.errors.inverse * noise, rate) + FP64.u * size
        energy = energy + enlarged(self.errors.left * noise, rate)
        error, energy = (where(known, e, torch.inf) for e in (error, energy))
        backward_error = quotient(norm(r, dim=-2), terms)
        return RefinedColumns(x, powers, size, error, energy, backward_error, steps)

    def unscaled(self, z: Tensor, powers: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``x = C z 2^powers`` in a dtype, and norms of its rounding errors relative to z, shape (P, K)."""
        x, lost = rounded_shift(z, powers + binary_exponents(self.scales[1].mT) - 1, dtype)
        return x, torch.linalg.vector_norm(lost, dim=-2)

    def again(self, a: Tensor, b: Tensor) -> Tensor:
        """``A^-1 b``, or of the conjugate transpose of A, differentiable."""
        with plain_arithmetic(a.device):
            straight = torch.equal(a, self.a)
            (rows, columns), matrix = self.scales, self.scaled
            if straight:
                solve, left, right = lambda y: self.by_right(self.by_left(y)), rows, columns.mT
            else:
                solve, left, right, matrix = self.by_transposed, columns.mT, rows, matrix.mH
            x = solve(left * b)
            x = right * (x + solve(left * b - applied(matrix.__matmul__, matrix, x)))
        return attach_system(a, b, x, self.again)

    @property
    def logdet(self) -> tuple[Tensor, Tensor]:
        """``log |det A|``, and a bound on its error, shape (P,)."""
        # A sum of n numbers has an error of ``n u`` times the sum of their magnitudes (Higham 2002, section
        # 4.2), and each logarithm one of u.
        logs = self.right.diagonal(dim1=-2, dim2=-1).abs().log()
        scales = torch.cat([x.flatten(1).log() for x in self.scales], -1)
        twice = 2 if self.kind == "lower" else 1
        value = twice * logs.sum(-1) - scales.sum(-1)
        size = twice * logs.abs().sum(-1) + scales.abs().sum(-1)
        return value, self.errors.logdet + (2 * logs.shape[-1] + 1) * FP64.u * size

    @property
    def sign(self) -> Tensor:
        """Sign of the determinant, of complex matrices ``z / |z|``, shape (P,)."""
        if self.kind == "lower":
            return torch.ones_like(self.right[:, 0].sum(-1))
        diagonal = self.right.diagonal(dim1=-2, dim2=-1)
        sign = torch.where(diagonal == 0, 0.0, phases(diagonal)).prod(-1)
        if self.kind == "orthonormal":
            return sign * torch.linalg.slogdet(self.left).sign
        return sign if self.swaps is None else sign * (1 - 2 * (self.swaps % 2))

    @property
    def phase_error(self) -> float:
        """Bound on the rounding error of a complex sign, in radians."""
        # It is a product of n numbers of magnitude 1, each of which errs by a few u; the determinant of Q has
        # the rounding errors of its elimination as well.
        n = self.a.shape[-1] if self.a.is_complex() and self.kind != "lower" else 0
        return 8 * n * FP64.u * (n if self.kind == "orthonormal" else 1)

    def inverse(self, a: Tensor) -> Tensor:
        with plain_arithmetic(a.device):
            eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
            x = definite_inverse(self.left) if self.kind == "lower" else self.by_right(self.by_left(eye))
            rows, columns = self.scales
            x = columns.mT * x * rows.mT
        return attach_system(a, eye, x, self.again)

    def inverse_quadratic(self, b: Tensor, u: float, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Diagonal of ``b^H A^-1 b``, shape (P, K), in a dtype, bounds on its errors, and ``A^-1 b``."""
        # ``b^H (x - x*)`` is the inner product of ``M2^-H C b`` and ``M2 C^-1 (x - x*)``.
        found, norm = self.refined(b, u), torch.linalg.vector_norm
        sides, powers = near_one(b, self.scales[1].mT)
        side = norm(self.by_right_transposed(sides), dim=-2)
        summed = b.shape[-2] * FP64.u * norm(sides, dim=-2) * found.size
        value = (sides.conj() * found.z).sum(-2)
        powers = (powers + found.powers)[..., 0, :]
        rounded, lost = rounded_shift(value, powers, dtype)
        bound = side * found.energy + summed + lost
        error = shift(bound, powers).clamp_min(math.ulp(0.0)).where(bound > 0, bound)  # not 0 by underflow
        return rounded, error, self.unscaled(found.z, found.powers, b.dtype)[0]


def definite_inverse(lower: Tensor) -> Tensor:
    """Inverses of ``L L^H``, shape (P, n, n): on a GPU by products, in half of the operations of solves."""
    if not lower.is_cuda:
        return torch.cholesky_inverse(lower)
    inverse, n = triangular_inverse(lower, upper=False), lower.shape[-1]
    found, width = torch.empty_like(inverse), max(1, n // 8)
    for i in range(0, n, width):
        known = slice(min(i + width, n))
        torch.bmm(
            inverse[:, i:, i : known.stop].mH, inverse[:, i:, known], out=found[:, i : known.stop, known]
        )
    return found.tril() + found.tril(-1).mH


def triangular_condition(t: Tensor, *, upper: bool) -> Tensor:
    """Bound on the condition number of triangular matrices with columns near norm 1, shape (P, 1)."""
    if not t.numel():
        return t.new_ones(len(t), 1).real
    t = t * power_of_two_scales(t.abs().amax(-2, keepdim=True))
    g, norm = directions(t.shape[-1], t.device, t.dtype).expand(len(t), -1, -1), torch.linalg.vector_norm
    image = torch.linalg.solve_triangular(t, g, upper=upper)
    return shown_norm(image) * norm(t, dim=(1, 2))[:, None]


def _substituted(t: Tensor, y: Tensor, *, upper: bool, unitriangular: bool = False) -> Tensor:
    how = {"upper": upper, "unitriangular": unitriangular}
    return applied(lambda x: torch.linalg.solve_triangular(t, x, **how), t, y)


def _times(x: Tensor, scales: Tensor) -> Tensor:
    """Scale rows or columns; no copy if all scales are 1."""
    return x if bool((scales == 1).all()) else x * scales
