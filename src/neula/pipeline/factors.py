"""Methods of factorizations: arrays in and out, gradients, warnings where no digit is guaranteed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any

import torch

from neula.algorithms.elimination.lu import PackedLU
from neula.algorithms.krylov.iterative_refinement import KeptMatrix
from neula.algorithms.krylov.kept_batch import KeptBatch
from neula.certificates.bounds import solve_bound
from neula.certificates.forward_error import SURE, digits_of, measured_error
from neula.certificates.residuals import quotient
from neula.certificates.verdict import within
from neula.engines import FP64, format_of
from neula.engines.formats import double_of, in_double
from neula.kernels.magnitudes import two_norms
from neula.kernels.precision import plain_arithmetic
from neula.pipeline.factored import FactoredMatrix, near_one, rounded_shift, triangular_condition
from neula.pipeline.gradients import attach_logdet, attach_lu, attach_symmetric, attach_system
from neula.pipeline.inputs import Taken, check_finite, flattened, gradient_wanted, is_variable, take
from neula.pipeline.operators import eager
from neula.pipeline.result import Attempt, FactorSolution, FactorValue, SlogdetResult, report_missed
from neula.pipeline.shapes import broadcast_system
from neula.pipeline.solutions import applied

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class KnownFactors(ABC):
    """Factors of a matrix, or a batch, that is kept by reference."""

    matrix: Any  # A as given: a tensor attached to its graph, or an array of NumPy

    def __reduce__(self) -> Any:
        """Matrices do not travel with a result: a copy has None."""
        return type(None), ()

    @property
    @abstractmethod
    def like(self) -> Taken:
        """An array whose library, device and dtype results have."""

    @property
    @abstractmethod
    def triangle(self) -> tuple[Any, bool, bool]:
        """A factor, whether it is upper triangular, and whether :meth:`solve_triangular` transposes it."""

    @abstractmethod
    def factorized(self, a: Tensor) -> FactoredMatrix:
        """The factors of A, shape (P, n, n)."""

    @property
    def residual(self) -> float:
        """Bound on the relative residual of the factors; infinite if nothing is known."""
        return math.inf

    @property
    def graph(self) -> Tensor:
        """A, shape (P, n, n), as derivatives are taken with respect to it, in double precision."""
        return flattened(self.given.graph).to(self.factored.a)

    @eager
    def solve(self, b: Any) -> FactorSolution[Any]:
        sides = self.sides(b)
        with self.computing():
            found = self.factored.refined(sides.columns, sides.u)
            x, lost = self.factored.unscaled(found.z, found.powers, sides.dtype)
            lost = torch.maximum(lost, sides.rounding * found.size)  # in any norm
            error = measured_error(found.error + lost, found.size)
            backward = found.backward_error + quotient(lost, found.size)
        x = self.attached(sides.graph, x)
        bound = solve_bound(format_of(sides.dtype), x.shape[-2])
        kappa = self.factored.errors.condition
        return sides.solution(x, backward, error, kappa, bound, found.steps)

    @eager
    def solve_triangular(self, b: Any, transposed: bool) -> FactorSolution[Any]:
        factor, upper, turned = self.triangle
        triangle = take(factor, "the factor", differentiable=True, or_complex=True)
        sides = RightSides(triangle, b)
        t = in_double(flattened(triangle.graph))
        t, upper = (t.mH, not upper) if transposed != turned else (t, upper)
        x = applied(lambda b: torch.linalg.solve_triangular(t, b, upper=upper), t, sides.graph)
        bound = math.sqrt(t.shape[-1]) * FP64.u
        with self.computing():
            kappa = triangular_condition(t, upper=upper)
            lost = sides.rounding_errors(x)
            backward = bound + lost
            error = measured_error(kappa * bound, torch.ones_like(lost), lost)
        return sides.solution(x, backward, error, kappa, bound, 1)

    @eager
    def logdet(self) -> FactorValue[Any]:
        value, error = self._logdet()
        return FactorValue(value=value, error=error)

    @eager
    def slogdet(self) -> SlogdetResult[Any]:
        with self.computing():
            sign = self.factored.sign
        if sign.is_complex() and self.is_variable:
            argument = torch.complex(torch.zeros_like(sign.real), sign.angle())
            sign = torch.exp(1j * attach_logdet(self.graph, argument, self.factored.inverse).imag)
        value, error = self._logdet()
        if phase := self.factored.phase_error:
            error = error + (phase + _unit(self.like.tensor.dtype))
        return SlogdetResult(sign=self.numbers(sign), logabsdet=value, error=error)

    @eager
    def inv_quad(self, b: Any) -> FactorValue[Any]:
        return self._quadratic(self.sides(b))

    @eager
    def diag_inverse(self) -> FactorValue[Any]:
        a = self.given.tensor
        return self._quadratic(self.sides(torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)))

    @property
    def is_variable(self) -> bool:
        return is_variable(self.matrix)

    @property
    def given(self) -> Taken:
        return replace(take(self.matrix, "A", differentiable=True, or_complex=True), wrap=self.like.wrap)

    @cached_property
    def factored(self) -> FactoredMatrix:
        """The factors with what is measured of them, once for all methods."""
        a = flattened(self.given.tensor)
        with self.computing():
            return self.factorized(a).refactorized(self.residual)

    def computing(self) -> plain_arithmetic:
        return plain_arithmetic(self.like.tensor.device)

    def sides(self, b: Any) -> RightSides:
        return RightSides(self.given, b, self.factored.a.device)

    def attached(self, b: Tensor, x: Tensor) -> Tensor:
        if not (self.is_variable or is_variable(b)):
            return x
        return attach_system(self.graph, b, x, self.factored.again)

    def numbers(self, x: Tensor) -> Any:
        batch, like = self.given.tensor.shape[:-2], self.like
        dtype = at_least_single(like.tensor.dtype)
        return like.give_back(x.reshape(batch), dtype if x.is_complex() else dtype.to_real())

    def _logdet(self) -> tuple[Any, Any]:
        """The logarithm of the determinant, and bounds on its error."""
        with self.computing():
            logs, error = self.factored.logdet
        like = self.like
        value = attach_logdet(self.graph, logs, self.factored.inverse) if self.is_variable else logs
        error = (error + _unit(like.tensor.dtype) * logs.abs()).reshape(self.given.tensor.shape[:-2])
        _report_numbers("the logarithm of the determinant", logs.reshape(error.shape), error, 1.0)
        return self.numbers(value), like.wrap(error.to(like.tensor.device))

    def _quadratic(self, sides: RightSides) -> FactorValue[Any]:
        """``b^H A^-1 b`` of right-hand sides, real for a Hermitian A."""
        with self.computing():
            value, error, x = self.factored.inverse_quadratic(sides.columns, sides.u, sides.dtype)
        of = sides.shapes.of_columns
        _report_numbers("b^H A^-1 b", of(value), of(error), 0.0)
        x = self.attached(sides.graph, x)
        value = (sides.graph.conj() * x).sum(-2) if is_variable(x) else value
        value = value.real if self.factored.kind == "lower" else value
        return FactorValue(value=sides.give(of(value)), error=sides.hand(of(error)))


@dataclass(frozen=True, eq=False)
class CholeskyMethods(KnownFactors):
    factor: Any
    upper: bool
    bound: float  # on the residual

    @property
    def like(self) -> Taken:
        return take(self.factor, "the factor", differentiable=True, or_complex=True)

    @property
    def triangle(self) -> tuple[Any, bool, bool]:
        return self.factor, self.upper, self.upper

    @property
    def residual(self) -> float:
        return self.bound

    def factorized(self, a: Tensor) -> FactoredMatrix:
        lower = flattened(self.like.tensor)
        a, lower = (a.mH, lower.mH) if self.upper else (a, lower)
        return FactoredMatrix.definite(a, lower)

    @property
    def graph(self) -> Tensor:
        return attach_symmetric(flattened(self.given.graph), self.factored.a)


@dataclass(frozen=True, eq=False)
class LUMethods(KnownFactors):
    packed: PackedLU
    mixed: bool  # whether they are those of A mixed by butterflies
    nothing: Taken  # an empty array like A
    kept: KeptMatrix | KeptBatch  # which tells whether A was changed

    def member(self, index: tuple[int, ...]) -> LUMethods:
        assert isinstance(self.kept, KeptBatch)
        packed, kept = self.packed.member(index), self.kept.member(index)
        return replace(self, matrix=self.matrix[index], packed=packed, kept=kept)

    @property
    def like(self) -> Taken:
        return self.nothing

    @property
    def triangle(self) -> tuple[Any, bool, bool]:
        return self.like.wrap(self.triangles()[1].to(self.like.tensor.device)), True, False

    def triangles(self) -> tuple[Tensor, Tensor]:
        """L and U with the gradient of A, at least in single precision."""
        if self.mixed and self.is_variable:
            raise ValueError(
                "L and U of a matrix mixed by butterflies have no gradient: pass pivot='partial'"
            )
        dtype = at_least_single(self.packed.lu.dtype)
        lower, upper = self.packed.lower().to(dtype), self.packed.lu.triu().to(dtype)
        if not self.is_variable:
            return lower, upper
        order = self.packed.permutation[..., None]
        return attach_lu(torch.take_along_dim(self.given.graph.to(lower), order, -2), lower, upper)

    def factorized(self, a: Tensor) -> FactoredMatrix:
        self.kept.check()
        lu, n = flattened(self.packed.lu), a.shape[-1]
        if self.mixed or lu.dtype.to_real() not in (torch.float32, torch.float64):
            start = FactoredMatrix.general(a.to(lu.device), a, a, "unit")
            return start.by_lapack() or start
        pivots = self.packed.pivots.reshape(len(lu), n)
        swaps = (pivots != torch.arange(n, device=pivots.device)).sum(-1).to(lu.device)
        order = self.packed.permutation.reshape(len(lu), n)
        return FactoredMatrix.general(a, lu, lu.triu(), "unit", order, swaps)


@dataclass(frozen=True, eq=False)
class QRMethods(KnownFactors):
    q: Any
    r: Any

    @property
    def like(self) -> Taken:
        return take(self.r, "R", differentiable=True, or_complex=True)

    @property
    def given(self) -> Taken:
        if self.matrix is None:
            m, n = take(self.q, "Q", differentiable=True, or_complex=True).tensor.shape[-2:]
            raise ValueError(
                f"A is {m} x {n}, and only square matrices have inverses and "
                "determinants: for least squares use neula.lstsq"
            )
        return super().given

    def of_member(self, place: int) -> QRMethods:
        matrix = None if self.matrix is None else self.matrix[place]
        return QRMethods(matrix, self.q[place], self.r[place])

    @property
    def triangle(self) -> tuple[Any, bool, bool]:
        return self.r, True, False

    def factorized(self, a: Tensor) -> FactoredMatrix:
        q = take(self.q, "Q", differentiable=True, or_complex=True).tensor
        return FactoredMatrix.general(a, flattened(q), flattened(self.like.tensor), "orthonormal")


class RightSides:
    """Columns that go with each matrix, in double precision."""

    def __init__(self, like: Taken, b: Any, device: torch.device | None = None) -> None:
        self._begun, taken = perf_counter(), take(b, "b", differentiable=True, or_complex=True)
        gradient_wanted(like, taken)
        self.like, self.shapes = like, broadcast_system(like.tensor, taken.tensor)
        if taken.tensor.numel():
            check_finite(taken.tensor, taken.tensor.abs().amax(), "b")
        self.dtype = at_least_single(torch.promote_types(like.tensor.dtype, taken.tensor.dtype))
        where = like.tensor.device if device is None else device
        self.columns = self.shapes.columns.to(where, double_of(self.dtype))
        graph = broadcast_system(like.tensor, taken.graph).columns if taken.is_variable else self.columns
        self.graph = graph.to(self.columns)

    @property
    def u(self) -> float:
        return format_of(self.dtype).u

    @property
    def rounding(self) -> float:
        return _unit(self.dtype)

    def rounding_errors(self, x: Tensor) -> Tensor:
        """Norms of the errors of rounding x, shape (P, n, K), to the dtype of results, relative to x."""
        z, powers = near_one(x)
        errors = two_norms(rounded_shift(z, powers, self.dtype)[1], -2)
        errors = quotient(errors, two_norms(z, -2)).nan_to_num(math.inf)  # Inf has overflowed
        return errors.clamp_min(self.rounding)

    def give(self, x: Tensor) -> Any:
        return self.like.give_back(x, self.dtype if x.is_complex() else self.dtype.to_real())

    def hand(self, x: Tensor) -> Any:
        return self.like.wrap(x.to(self.like.tensor.device))

    def solution(
        self, x: Tensor, backward: Tensor, error: Tensor, kappa: Tensor, bound: float, steps: int
    ) -> FactorSolution[Any]:
        """The result, with a warning where it is not what was requested."""
        method = "substitution, refined" if steps > 1 else "substitution"
        bound += self.rounding
        good = within((backward, bound), (error, SURE))
        each = [self.shapes.of_columns(y) for y in (backward, error, kappa.expand_as(error), good)]
        of_problems = [y if self.shapes.is_vector else _largest(y) for y in (each[0], each[2])]
        accepted = each[3] if self.shapes.is_vector else each[3].all(-1)
        worst = [float(y.amax()) if y.numel() else 0.0 for y in each[:3]]
        target, converged = format_of(self.dtype), bool(accepted.all())
        reason = f"backward error {worst[0]:.1e} (bound {bound:.1e}), forward error {worst[1]:.1e}"
        result: FactorSolution[Any] = FactorSolution(
            x=self.give(self.shapes.solutions(x)),
            converged=converged,
            iterations=steps,
            backward_error=worst[0],
            tolerance=bound,
            condition=worst[2],
            forward_error=worst[1],
            digits=digits_of(worst[1], self.dtype),
            accepted=self.hand(accepted),
            backward_errors=self.hand(of_problems[0]),
            conditions=self.hand(of_problems[1]),
            forward_errors=self.hand(each[1]),
            attempts=(Attempt(method, converged, reason),),
            engine=str(x.device.type),
            accuracy=target.name,
            method=method,
            seconds=perf_counter() - self._begun,
        )
        if not converged:
            no_digits = not worst[1] <= SURE
            what = (
                "no digit of the solution is guaranteed"
                if no_digits
                else f"x is not solved to {target.name} accuracy"
            )
            report_missed(
                what, reason, result, (~accepted).nonzero().tolist(), strict=False, no_digits=no_digits
            )
        return result


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    """The dtype of numbers of factors in some dtype."""
    return torch.promote_types(dtype, torch.float32)


def _unit(dtype: torch.dtype) -> float:
    """Relative error of rounding double precision to a dtype."""
    format = format_of(at_least_single(dtype))
    return 0.0 if format is FP64 else format.u


def _largest(y: Tensor) -> Tensor:
    """Of each row; 0 of none."""
    return y.amax(-1) if y.shape[-1] else y.new_zeros(y.shape[:-1])


def _report_numbers(what: str, value: Tensor, error: Tensor, least: float) -> None:
    """Warn if no digit of a number is guaranteed, relative to that or to another number."""
    sure = error <= SURE * value.abs().clamp_min(least)
    if not bool(sure.all()):
        why = f"the bound on its error is {float(error.amax()):.1e}"
        lost = (~sure).nonzero().tolist()
        report_missed(f"no digit of {what} is guaranteed", why, None, lost, strict=False, no_digits=True)
