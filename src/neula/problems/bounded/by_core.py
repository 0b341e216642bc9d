"""One problem with bounds on a CPU by the compiled core, before the chain.

For small problems tensors, batches and records of attempts take many times as long as the arithmetic. Both
accept by the same evidence. Norms of the free columns are bounds here, from their Gram matrix and its factor,
and estimates in the chain (:mod:`neula.problems.bounded.evidence`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from neula.algorithms.bounded.block_pivoting import PATIENCE
from neula.certificates.forward_error import MAX_RATE, enlarged
from neula.certificates.kkt import KKTNorms
from neula.certificates.verdict import Evidence
from neula.engines import FP64
from neula.kernels.core import DTYPES
from neula.kernels.magnitudes import MODERATE
from neula.kernels.small_problems.bounded_host import BoundedLimits, BoundedMinimum, Numbers, minimum
from neula.pipeline.call import Call
from neula.pipeline.plans import IN_NUMPY, Given, accepted_solution
from neula.pipeline.result import LsqLinearResult, NNLSResult
from neula.pipeline.result.deferred import Later
from neula.pipeline.shapes import BatchedProblem
from neula.problems.bounded.gradient import attached
from neula.problems.bounded.links import EXCHANGES
from neula.problems.bounded.problem import LABEL, BoundedOptions, in_words

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
        """The result, with fields of its own."""
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
        told = LABEL, lambda: in_words(bound, *errors)
        return accepted_solution(kind, given, options, told, fields, self.x[:, None], [errors.forward_error])

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

    def attached(self, result: R) -> R:
        """The result, attached to the graphs of A and b where that is required."""
        return attached(self.call, self.shapes, result)

    def report(self, result: Any) -> None:
        """Nothing: it is accepted."""


def solve_by_core(
    call: Call, shapes: BatchedProblem, options: BoundedOptions, bounds: np.ndarray, *, of_all: bool
) -> CoreBoundedSolution | None:
    """The solution where it is accepted, and the problem is one for this way.

    Shapes: bounds (2, n). ``of_all``: whether the solution without bounds is requested, too.
    """
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
    """Errors of a solution by its numbers; None where the factor is no good.

    ``shape``: of A. ``rounding``: relative rounding error of the returned x. ``of_all``: norms of all columns
    and of their pseudoinverse, as of :class:`Numbers`.
    """
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
    """``||I - L^-1 B^T B L^-T||`` from above, for the factor L of so many columns of norm 1.

    The Gram matrix has sums of m products, divided twice, and the factorization errs by as many u as the
    matrix has columns.
    """
    return (sum(shape) + 4) * width * FP64.u * inverse_norm**2


def _condition(shape: tuple[int, ...], norm: float, inverse_norm: float) -> float:
    rate = _rate(shape, shape[1], inverse_norm)
    return enlarged(norm * inverse_norm, rate) if rate <= MAX_RATE else math.inf
