"""Least squares with bounds from arrays to a run: what both public functions do."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from neula.algorithms.bounded.active_set import PATIENCE
from neula.certificates.bounds import lstsq_bound_of
from neula.certificates.forward_error import MAX_RATE, SURE, digits_of, enlarged
from neula.certificates.kkt import KKTNorms
from neula.certificates.verdict import Evidence, within
from neula.engines import FP64
from neula.kernels.core import DTYPES
from neula.kernels.magnitudes import MODERATE
from neula.kernels.shift import shift
from neula.kernels.small_problems.bounded_host import BoundedLimits, BoundedMinimum, Numbers, minimum
from neula.pipeline.call import Call
from neula.pipeline.chain import Run, run_chain
from neula.pipeline.inputs import check_finite, finite_members, surely_finite, take
from neula.pipeline.plans import IN_NUMPY, Given, accepted_solution
from neula.pipeline.result import Attempt, LsqLinearResult, NNLSResult
from neula.pipeline.result.shown import Later
from neula.pipeline.shapes import BatchedProblem, broadcast_system
from neula.problems.bounded.links import EXCHANGES, chain
from neula.problems.bounded.problem import (
    LABEL,
    BoundedJudge,
    BoundedOptions,
    BoundedProblems,
    BoundedValues,
    Whole,
    in_words,
)
from neula.problems.least_squares.general import checked_constraints
from neula.problems.operators.bounded import attached

LARGEST = 10**9
"""Value of ``m n^2`` up to which the core is used, in one thread. It takes a quarter to a half of the time of
the chain in one thread, so that chains with many threads are faster beyond."""

ROUGH = 2.0**-30
"""Components of gradients, relative to what they are sums of, that normal equations say nothing of."""

SETTLED = 2.0**-27
"""An update, relative to x, after which the next one, shorter by as much, is below one unit roundoff."""

STEPS = 4
"""Updates at most: with a factor that is good enough two do."""

R = TypeVar("R", NNLSResult, LsqLinearResult)


class BoundedErrors(NamedTuple):
    """How good a solution is."""

    backward_error: float
    forward_error: float
    condition: float


@dataclass(frozen=True)
class CoreBoundedSolution:
    """The solution of one problem, which is accepted."""

    call: Call
    shapes: BatchedProblem
    options: BoundedOptions
    found: BoundedMinimum
    x: np.ndarray  # shape (n,): as returned, but in double precision
    errors: BoundedErrors

    def result(self, kind: type[R], fields: dict[str, Any]) -> R:
        """The result, with fields of its own, attached to the graphs of A and b."""
        call, shapes, options, errors = self.call, self.shapes, self.options, self.errors
        numbers, at = self.found.numbers, self.found.at
        bound, wrap = options.limits(shapes.a.shape).backward_error, call.first.wrap_array
        given = Given((self.x, self.x), wrap, call.begun)
        fields |= errors._asdict() | {
            "iterations": int(numbers.sets),
            "tolerance": bound,
            "active_mask": Later(lambda: wrap(at.astype(np.int64))),
            "residual_norms": Later(lambda: wrap(np.array(numbers.residual))),
        }
        acceptance = LABEL, lambda: in_words(bound, *errors)
        x, worst = self.x[:, None], [errors.forward_error]
        return attached(call, shapes, accepted_solution(kind, given, options, acceptance, fields, x, worst))

    def linear(self) -> dict[str, Any]:
        """Additional fields of :func:`neula.lsq_linear`."""
        call, numbers = self.call, self.found.numbers
        a, b = (x.double().numpy() for x in (self.shapes.a, self.shapes.b[:, 0]))
        fun = a @ self.x - b
        inside = numbers.sets == 1 and numbers.width == len(self.x)
        return {
            "cost": numbers.residual**2 / 2,
            "fun": call.give_back(torch.from_numpy(fun), call.dtype),
            "optimality": numbers.optimality,
            "unbounded_sol": call.give_back(torch.from_numpy(self.found.unbounded), call.dtype),
            "nit": int(numbers.sets) - 1,
            "status": 3 if inside else 1,
        }

    def report(self, result: Any) -> None:
        """Nothing: it is accepted."""


def solve_by_core(
    call: Call, shapes: BatchedProblem, options: BoundedOptions, bounds: np.ndarray, *, of_all: bool
) -> CoreBoundedSolution | None:
    """The solution, and that without bounds if it is requested, too; None if another way has to find it."""
    # For small problems tensors, batches and records of attempts take many times as long as the arithmetic.
    # Norms of the free columns are bounds here, from their Gram matrix and its factor, and not estimates.
    if not _suits(shapes, options):
        return None
    with np.errstate(all="ignore"), suppress(MemoryError):  # not accepted unless finite
        solve = partial(minimum, _taken(shapes.a), _taken(shapes.b), bounds, limits_of(options))
        if (found := solve(of_all=of_all)) is None:
            return None
        within = np.minimum(np.maximum(found.x, bounds[0]), bounds[1])  # in a third of the time of clip
        x = within.astype(IN_NUMPY[options.dtype]).astype(np.float64, copy=False)
        change = found.sizes * (x - found.x)
        lost = math.sqrt(change.dot(change))

        def norms_of_all() -> tuple[float, float]:
            again = solve(of_all=True) if math.isnan(found.numbers.norm_of_all) else None
            numbers = (again or found).numbers
            return numbers.norm_of_all, numbers.inverse_norm_of_all

        rounding = lost / found.numbers.image if lost else 0.0
        errors = errors_of(found.numbers, shapes.a.shape, rounding, norms_of_all)
        limits = options.limits(shapes.a.shape)
        if errors is None or not limits.accept(Evidence.from_errors(*errors[:2])):
            return None
        # The solution without bounds is not certified, but as good as reflections make it.
        if of_all and not _rate(shapes.a.shape, len(x), found.numbers.inverse_norm_of_all) <= MAX_RATE:
            return None
        return CoreBoundedSolution(call, shapes, options, found, x, errors)
    return None


def limits_of(options: BoundedOptions) -> BoundedLimits:
    """Thresholds of the kernel."""
    return BoundedLimits(MODERATE, ROUGH, SETTLED, STEPS, PATIENCE, options.max_iterations or EXCHANGES)


def _taken(x: torch.Tensor) -> torch.Tensor:
    """Convert x to a dtype that the core accepts."""
    return x if x.dtype in DTYPES else x.double()


def _suits(shapes: BatchedProblem, options: BoundedOptions) -> bool:
    """Whether there is one problem with one right-hand side in the memory of the host, not too large."""
    engine, a = options.engine, shapes.a
    here = engine.device.type == "cpu" and engine.tuning.lapack and a.is_cpu and shapes.b.is_cpu
    if not (here and shapes.is_vector and a.ndim == 2 and options.dtype in IN_NUMPY):
        return False
    m, n = a.shape
    return m >= n > 0 and m * n**2 <= LARGEST


def errors_of(
    of: Numbers, shape: tuple[int, ...], rounding: float, of_all: Callable[[], tuple[float, float]]
) -> BoundedErrors | None:
    """Errors of a solution by its numbers; None where the factor is no good."""
    # ``of_all``: norms of all columns and of their pseudoinverse, as of :class:`Numbers`.
    rate = _rate(shape, of.width, of.inverse_norm)
    if not rate <= MAX_RATE:
        return None
    # Without free variables nothing is projected, and no column can be ill-conditioned.
    norm, inverse_norm = (of.norm, enlarged(of.inverse_norm, rate)) if of.width else (1.0, 1.0)
    least = max(1.0, norm / max(1.0, of.width) ** 0.25)  # columns have norm 1
    kkt = KKTNorms(
        residual=of.residual,
        wrong=of.gradient,
        projected=enlarged(of.projected, rate),
        rest=of.rest,
        image=of.image,
        b=of.b,
    )
    pushed = of.pushed - kkt.noise(shape, of.sum)
    corner = not of.width and pushed > 0
    certain = corner or kkt.moved(norm, inverse_norm) < pushed
    condition = norm * inverse_norm if certain else _condition(shape, *of_all())
    return BoundedErrors(
        kkt.backward_error + rounding,
        kkt.forward_error(condition, least, rounding, corner),
        max(1.0, least * inverse_norm / of.margin),
    )


def _rate(shape: tuple[int, ...], width: float, inverse_norm: float) -> float:
    """``||I - L^-1 B^T B L^-T||`` from above, for the factor L of so many columns of norm 1."""
    # The Gram matrix has sums of m products, divided twice, and the factorization errs by as many u as the
    # matrix has columns.
    return (sum(shape) + 4) * width * FP64.u * inverse_norm**2


def _condition(shape: tuple[int, ...], norm: float, inverse_norm: float) -> float:
    rate = _rate(shape, shape[1], inverse_norm)
    return enlarged(norm * inverse_norm, rate) if rate <= MAX_RATE else math.inf


@dataclass(frozen=True)
class BoundedSolution:
    """Result of a call."""

    call: Call
    shapes: BatchedProblem
    whole: Whole
    run: Run[BoundedValues]
    values: BoundedValues  # in the units that were given

    def of_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Reshape values of each problem to the user's batch, shape (*batch,) or (*batch, k)."""
        return self.shapes.of_columns(x.reshape(len(self.whole.a), self.whole.b.shape[2]))

    def of_unknowns(self, x: torch.Tensor) -> torch.Tensor:
        """Reshape values of each unknown, shape (C, n), to the user's batch."""
        return self.shapes.solutions(self.whole.by_matrix(x).mT)

    def result(self, kind: type[R], fields: dict[str, Any]) -> R:
        """The result, with fields of its own, attached to the graphs of A and b."""
        # Scalars describe the worst problem.
        call, values = self.call, self.values
        run: Run[BoundedValues] = self.run
        accepted = torch.from_numpy(run.accepted).to(values.x.device)
        measured = zip(BoundedValues.names, values.measured().cpu(), strict=True)
        worst = {name: float(of.max()) if len(of) else 0.0 for name, of in measured}
        common = {
            "x": call.give_back(self.of_unknowns(values.x).contiguous(), call.dtype),
            "converged": bool(run.accepted.all()),
            "iterations": run.iterations,
            "backward_error": worst["backward_error"],
            "tolerance": self.whole.limits.backward_error,
            "condition": max(1.0, worst["condition"]),
            "forward_error": worst["forward_error"],
            "digits": digits_of(worst["forward_error"], call.dtype),
            **call.diagnostics((*self.whole.factors.attempts, *run.attempts)),
            "accepted": self._given(accepted),
            "backward_errors": self._given(values.backward_error),
            "conditions": self._given(values.condition),
            "forward_errors": self._given(values.forward_error),
            "active_mask": call.give_back(self.of_unknowns(values.side.double()).long(), torch.int64),
            "residual_norms": self._given(values.residual_norm),
            "_axis": len(self.shapes.batch),
        }
        return attached(call, self.shapes, kind._from_fields(common | fields))

    def linear(self) -> dict[str, Any]:
        """Additional fields of :func:`neula.lsq_linear`."""
        call, whole, values = self.call, self.whole, self.values
        owner = whole.reduced.owner
        # A x - b in the numbers that are worked with, as x is returned.
        x = whole.by_matrix(self.run.found.x).mT
        fun = shift(torch.baddbmm(whole.b, whole.a, x, beta=-1.0), whole.b_exponents[:, :, None])
        # Components of the gradient of columns of norm 1 by the norms of the columns that were given.
        gradient = values.wrong * whole.reduced.of_each(whole.reduced.norms)
        gradient = shift(gradient, 2 * whole.b_exponents[owner] - whole.exponents[owner])
        nit = int(values.iterations.max()) - 1 if len(values.iterations) else 0
        optimal = bool(within((values.backward_error, whole.limits.backward_error)).all())
        inside = optimal and not bool(values.side.any()) and nit <= 0
        cost = self.of_columns(values.residual_norm.square() / 2)
        unbounded = whole.unscale(whole.unbounded, owner)
        return {
            "cost": call.give_back(cost, torch.float64) if cost.ndim else float(cost),
            "fun": call.give_back(self.shapes.solutions(fun).contiguous(), call.dtype),
            "optimality": float(gradient.abs().max()) if gradient.numel() else 0.0,
            "unbounded_sol": call.give_back(self.of_unknowns(unbounded).contiguous(), call.dtype),
            "nit": max(nit, 0),
            "status": 3 if inside else int(optimal),
        }

    def _given(self, x: torch.Tensor) -> Any:
        found = self.of_columns(x).contiguous()
        return self.call.give_back(found, found.dtype)

    def report(self, result: Any) -> None:
        """Say so where the accuracy was missed. Raises AccuracyError if the call is strict."""
        if result.converged:
            return
        missed = ~torch.from_numpy(self.run.accepted)
        of_matrices = missed.reshape(len(self.whole.a), self.whole.b.shape[2]).any(1)
        nonfinite = self.values.backward_error.isnan()
        no_digits = ~(self.values.forward_error <= SURE) & ~nonfinite
        self.call.report_missed(
            f"least squares with bounds is not certified to {result.accuracy} accuracy",
            self.run.attempts[-1].reason,
            result,
            self.shapes.of_members(of_matrices).nonzero().tolist(),
            no_digits=bool(no_digits.any()),
        )


def solve_bounded(
    A: Any,
    b: Any,
    bounds: tuple[Any, Any],
    *,
    max_iterations: int | None,
    unbounded: bool = False,
    constraints: Any = None,
    **asked: Any,
) -> BoundedSolution | CoreBoundedSolution:
    """Take the arrays, check the bounds, and run the chain for all right-hand sides together."""
    call = Call.begin({"A": A, "b": b}, bound=lstsq_bound_of, gradients=True, or_complex=False, **asked)
    shapes = broadcast_system(*call.tensors)
    options = BoundedOptions(
        engine=call.engine, target=call.target, dtype=call.dtype, max_iterations=max_iterations
    )
    both = checked_bounds(bounds, call.first.tensor.shape[-1])
    equalities = None if constraints is None else checked_equalities(call, shapes, constraints, both)
    alone = None if equalities else solve_by_core(call, shapes, options, both, of_all=unbounded)
    if alone is not None:
        return alone
    lower, upper = (call.here(torch.from_numpy(x))[None] for x in both)
    with call.computing():
        a, columns = call.here(shapes.matrices), call.here(shapes.columns)
        nonfinite = _nonfinite(a, columns, is_batch=bool(shapes.batch))
        if bool(nonfinite.any()):
            of_matrix = ~finite_members(a)
            a = a.masked_fill(of_matrix[:, None, None], 0.0)
            columns = columns.masked_fill(nonfinite.reshape(len(a), 1, columns.shape[2]), 0.0)
        whole = Whole.from_arrays(a, columns, lower, upper, options, equalities)
        run = _run(whole)
        values = run.found.in_units(whole)
        if bool(torch.isinf(values.x).any()):
            raise OverflowError("the solution does not fit float64: scale b down")
        _forget(run, values, nonfinite)
    return BoundedSolution(call, shapes, whole, run, values)


def _run(whole: Whole) -> Run[BoundedValues]:
    count, n = len(whole.reduced), whole.reduced.n
    problems = BoundedProblems(torch.arange(count, device=whole.a.device), whole)
    if count and whole.a.numel():
        equalities = whole.reduced.equalities
        links = chain(whole.a.shape[1], whole.a.shape[2], equalities.count if equalities else 0)
        return run_chain(links, problems, BoundedJudge(whole.limits))
    # Without equations every point within the bounds is a solution, and zero the natural one.
    reduced, zero = whole.reduced, whole.a.new_zeros(count)
    x = whole.a.new_zeros(count, n).clamp(reduced.low, reduced.high)
    side = (x >= reduced.high).to(torch.int8) - (x <= reduced.low).to(torch.int8)
    norms = torch.linalg.vector_norm(whole.b, dim=1).flatten()
    values = BoundedValues(x, side, torch.zeros_like(x), norms, zero, zero, zero + 1, zero.long())
    why = f"A is {tuple(whole.a.shape[1:])}, {count} times"
    return Run.nothing_to_do(values, values.measured().cpu().numpy(), why)


def _nonfinite(a: torch.Tensor, columns: torch.Tensor, *, is_batch: bool) -> torch.Tensor:
    """Problems with NaN or Inf, shape (C,): of a batch, elsewhere they are errors."""
    if not is_batch:
        b = columns[0].squeeze(-1) if columns.shape[2] == 1 else columns[0]
        for name, x in (("A", a[0]), ("b", b)):
            if not surely_finite(x):
                check_finite(x, x, name)
        return torch.zeros(columns.shape[2], dtype=torch.bool, device=a.device)
    return (~finite_members(a)[:, None] | ~columns.isfinite().all(1)).flatten()


def _forget(run: Run[BoundedValues], values: BoundedValues, nonfinite: torch.Tensor) -> None:
    """Say that nothing is known of problems with NaN or Inf."""
    if not bool(nonfinite.any()):
        return
    for known in (
        values.x,
        values.residual_norm,
        values.backward_error,
        values.forward_error,
        values.condition,
    ):
        known[nonfinite] = torch.nan
    run.accepted[nonfinite.cpu().numpy()] = False
    run.attempts.append(
        Attempt("none", False, f"{int(nonfinite.sum())} of {len(nonfinite)} problems hold NaN or Inf")
    )


def checked_bounds(bounds: tuple[Any, Any], n: int) -> np.ndarray:
    """Lower and upper bounds of each unknown, shape (2, n), float64."""
    # Raises ValueError for a wrong shape, NaN, and where a lower bound is not below the upper one.
    given = [_numbers(x, name) for x, name in zip(bounds, ("lower bound", "upper bound"), strict=True)]
    for name, x in zip(("lower", "upper"), given, strict=True):
        if x.ndim > 1 or x.shape not in ((), (1,), (n,)):
            raise ValueError(
                f"{name} bounds must be one number or have shape ({n},), one for each unknown, got {x.shape}"
            )
    both = np.empty((2, n))
    lower, upper = both
    lower[:], upper[:] = given
    wrong = ~(lower < upper)
    if wrong.any():
        place = int(wrong.argmax())
        raise ValueError(
            f"the lower bound {float(lower[place])} of x[{place}] must be less than "
            f"the upper one, {float(upper[place])}"
        )
    return both


def checked_equalities(
    call: Call, shapes: BatchedProblem, constraints: Any, bounds: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """C and d on the device of the engine, d with a column for each right-hand side of a matrix, or one."""
    n = bounds.shape[1]
    c, d = checked_constraints(call, constraints(n) if callable(constraints) else constraints, n)
    if call.differentiable:
        raise ValueError("solutions with bounds and constraints have no gradient: detach A and b")
    k = shapes.columns.shape[2]
    if d.shape[1] not in (1, k):
        raise ValueError(f"d must have shape ({len(c)},) or ({len(c)}, {k}), got {tuple(d.shape)}")
    if not len(c):
        return None
    if not shapes.matrices.numel():
        raise ValueError(
            f"A of shape {tuple(call.first.tensor.shape)} is empty: constraints need rows and unknowns"
        )
    lower, upper = (torch.from_numpy(x).to(c) for x in bounds)
    ends = torch.stack([torch.where(c == 0, 0.0, c * x) for x in (lower, upper)])
    least, most = ends.amin(0).sum(1), ends.amax(0).sum(1)
    slack = 8 * c.shape[1] * 2.0**-53 * (d.abs() + ends.abs().nan_to_num(0, 0).amax(0).sum(1)[:, None])
    wrong = ((d < least[:, None] - slack) | (d > most[:, None] + slack)).nonzero()
    if len(wrong):
        i, j = wrong[0].tolist()
        raise ValueError(
            f"row {i} of C x is between {float(least[i]):.3g} and {float(most[i]):.3g} within the bounds, "
            f"and d is {float(d[i, j]):.3g}: change the bounds or d"
        )
    return c, d


def _numbers(x: Any, name: str) -> np.ndarray:
    """Bounds in the memory of the host."""
    if type(x) is float:  # microseconds count
        return np.array(x)
    return take(x, name).tensor.double().cpu().numpy()
