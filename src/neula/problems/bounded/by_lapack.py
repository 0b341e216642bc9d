"""One problem with bounds on a CPU, by a kernel or NumPy and LAPACK: the first link of its chain without the
chain.

For small problems tensors, batches and records of what was tried take many times as long as the arithmetic.
What is accepted here is what the judge of the chain accepts; what is not begins with its first link.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from neula.algorithms.lapack.bounded import Normal, block_pivoting, limits_of
from neula.algorithms.lapack.products import products
from neula.algorithms.lapack.refinement import length
from neula.certificates.forward_error import MAX_RATE
from neula.certificates.verdict import Evidence
from neula.kernels import bounded_host
from neula.kernels.bounded_host import BoundedMinimum
from neula.kernels.core import DTYPES
from neula.pipeline.call import Call
from neula.pipeline.in_numpy import IN_NUMPY, array_of, arrays_of, is_large, of_single, x_of_single
from neula.pipeline.memory import MemoryGuard
from neula.pipeline.result import Attempt, LsqLinearResult, NNLSResult
from neula.pipeline.result.deferred import Later
from neula.pipeline.shapes import BatchedProblem
from neula.problems.bounded.gradient import attached
from neula.problems.bounded.in_arrays import BoundedEvidence, evidence_of, rate_of
from neula.problems.bounded.links import EXCHANGES
from neula.problems.bounded.problem import LABEL, BoundedOptions, in_words

LARGEST, WIDEST = 1 << 18, 512
"""Elements and columns up to which a kernel of one thread takes less time than calls of a library, where that
has two (AMD EPYC): a third of it for a few columns, half for 512."""

R = TypeVar("R", NNLSResult, LsqLinearResult)


@dataclass(frozen=True)
class LapackBoundedSolution:
    """What has come of one problem, which is accepted.

    Attributes
    ----------
    call : Call
    shapes : BatchedProblem
    options : BoundedOptions
    found : BoundedMinimum
    x : array, shape (n,)
        As it is given back, but in double precision.
    evidence : BoundedEvidence
    """

    call: Call
    shapes: BatchedProblem
    options: BoundedOptions
    found: BoundedMinimum
    x: np.ndarray
    evidence: BoundedEvidence

    def common(self) -> dict[str, Any]:
        """What results have in common."""
        call, shapes, options, evidence = self.call, self.shapes, self.options, self.evidence
        numbers, at = self.found.numbers, self.found.at
        bound, wrap = options.limits(shapes.a.shape).backward_error, call.first.wrap_array
        known = {
            "x": x_of_single(call, shapes, options, self.x[:, None]),
            "iterations": int(numbers.sets),
            "backward_error": evidence.backward_error,
            "tolerance": bound,
            "condition": evidence.condition,
            "attempts": Later(lambda: (Attempt(LABEL, True, in_words(bound, *evidence)),)),
            "active_mask": Later(lambda: wrap(at.astype(np.int64))),
            "residual_norms": Later(lambda: wrap(np.array(numbers.residual))),
        }
        errors = evidence.backward_error, evidence.condition, [evidence.forward_error]
        return known | of_single(call, shapes, options, *errors)

    def linear(self) -> dict[str, Any]:
        """What :func:`neula.lsq_linear` gives back beside that."""
        call, numbers, (a, (b,)) = self.call, self.found.numbers, arrays_of(self.shapes)
        fun = products(a, large=is_large(a.size, self.options)).times(self.x) - b
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
        """The result, attached to the graphs of A and b where somebody wants that."""
        return attached(self.call, self.shapes, result)

    def report(self, result: Any) -> None:
        """Nothing: it is accepted."""


def solve_by_lapack(
    call: Call, shapes: BatchedProblem, options: BoundedOptions, bounds: np.ndarray, *, of_all: bool
) -> LapackBoundedSolution | None:
    """The solution where it is accepted, and the problem is one for this way.

    Parameters
    ----------
    call : Call
    shapes : BatchedProblem
    options : BoundedOptions
    bounds : array, shape (2, n)
    of_all : bool
        Whether the solution without bounds is asked for, too.
    """
    if not _suits(shapes, options):
        return None
    solve = partial(_by_lapack, call, shapes, options, bounds, of_all=of_all)
    with np.errstate(all="ignore"):  # what is not finite is not accepted
        if not is_large(shapes.a.numel(), options):
            with suppress(MemoryError):
                return solve()
        with MemoryGuard(call.engine.device).attempt(LABEL), call.computing():
            return solve()
    return None


def _suits(shapes: BatchedProblem, options: BoundedOptions) -> bool:
    """Whether there is one problem with one right-hand side in the memory of the host, not too large."""
    engine, a = options.engine, shapes.a
    here = engine.device.type == "cpu" and engine.tuning.lapack and a.is_cpu and shapes.b.is_cpu
    if not (here and shapes.is_vector and a.ndim == 2 and options.dtype in IN_NUMPY):
        return False
    m, n = a.shape
    return m >= n > 0 and m * n**2 <= engine.tuning.by_lapack


def _by_lapack(
    call: Call, shapes: BatchedProblem, options: BoundedOptions, bounds: np.ndarray, *, of_all: bool
) -> LapackBoundedSolution | None:
    solve = _way(shapes, options, bounds)
    found = None if solve is None else solve(of_all=of_all)
    if solve is None or found is None:
        return None
    shape = array_of(shapes.a).shape
    within = np.minimum(np.maximum(found.x, bounds[0]), bounds[1])
    x = within.astype(IN_NUMPY[options.dtype]).astype(np.float64, copy=False)
    lost = length(found.sizes * (x - found.x))
    rounding = lost / found.numbers.image if lost else 0.0

    def norms_of_all() -> tuple[float, float]:
        again = solve(of_all=True) if math.isnan(found.numbers.norm_of_all) else None
        numbers = (again or found).numbers
        return numbers.norm_of_all, numbers.inverse_norm_of_all

    known = evidence_of(found.numbers, shape, rounding, norms_of_all)
    if known is None or not options.limits(shape).accept(Evidence.from_errors(*known[:2])):
        return None
    # The solution without bounds is not certified, but as good as reflections make it.
    if of_all and not rate_of(shape, shape[1], found.numbers.inverse_norm_of_all) <= MAX_RATE:
        return None
    return LapackBoundedSolution(call, shapes, options, found, x, known)


class _BoundedSolver(Protocol):
    def __call__(self, *, of_all: bool) -> BoundedMinimum | None: ...


def _way(shapes: BatchedProblem, options: BoundedOptions, bounds: np.ndarray) -> _BoundedSolver | None:
    """What solves the problem: the kernel, or NumPy; None where numbers are not moderate."""
    a, limits = shapes.a, limits_of(options.max_iterations or EXCHANGES)
    small = a.shape[1] <= WIDEST and a.numel() <= LARGEST
    if small and a.dtype in DTYPES and shapes.b.dtype in DTYPES and bounded_host.available():
        return partial(bounded_host.minimum, a, shapes.b, bounds, limits)
    given, (b,) = arrays_of(shapes)
    problem = Normal.factorize(given, b, bounds, large=is_large(given.size, options))
    return None if problem is None else partial(block_pivoting, problem, limits)
