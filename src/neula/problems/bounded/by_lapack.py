"""One problem with bounds on a CPU, by NumPy and LAPACK: the first link of its chain without the chain.

For small problems tensors, batches and records of what was tried take many times as long as the arithmetic.
What is accepted here is what the judge of the chain accepts; what is not begins with its first link.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from neula.algorithms.krylov.doubled_refinement import MAX_RATE
from neula.algorithms.lapack.bounded import Normal, block_pivoting
from neula.certificates.bounds import lstsq_bound
from neula.certificates.forward_error import SURE
from neula.pipeline.call import Call
from neula.pipeline.in_numpy import IN_NUMPY, array_of, is_large, of_single, x_of_single
from neula.pipeline.memory import MemoryGuard
from neula.pipeline.result import Attempt, LsqLinearResult, NNLSResult
from neula.pipeline.result.deferred import Later
from neula.pipeline.shapes import System
from neula.pipeline.solutions import attached
from neula.problems.bounded.gradient import attach_bounded
from neula.problems.bounded.in_arrays import Evidence, evidence_of
from neula.problems.bounded.links import EXCHANGES
from neula.problems.bounded.problem import LABEL, Options, in_words

R = TypeVar("R", NNLSResult, LsqLinearResult)


@dataclass(frozen=True)
class Alone:
    """What has come of one problem, which is accepted.

    Attributes
    ----------
    call : Call
    shapes : System
    options : Options
    problem : Normal
    evidence : Evidence
    """

    call: Call
    shapes: System
    options: Options
    problem: Normal
    evidence: Evidence

    def common(self) -> dict[str, Any]:
        """What results have in common."""
        call, shapes, options, of = self.call, self.shapes, self.options, self.evidence
        bound, wrap = _bound(self.shapes, options), call.first.wrap_array

        def attempts() -> tuple[Attempt, ...]:
            return (Attempt(LABEL, True, in_words(bound, of.backward_error, of.forward_error, of.condition)),)

        known = {
            "x": x_of_single(call, shapes, options, of.x[:, None]),
            "iterations": of.sets,
            "backward_error": of.backward_error,
            "tolerance": bound,
            "condition": of.condition,
            "attempts": Later(attempts),
            "active_mask": Later(lambda: wrap(of.at.astype(np.int64))),
            "residual_norms": Later(lambda: wrap(np.array(of.residual_norm))),
        }
        errors = of.backward_error, of.condition, [of.forward_error]
        return known | of_single(call, shapes, options, *errors)

    def linear(self) -> dict[str, Any]:
        """What :func:`neula.lsq_linear` gives back beside that."""
        call, shapes, options, of, problem = self.call, self.shapes, self.options, self.evidence, self.problem
        wrong = np.abs(of.wrong * problem.sizes)
        fun, unbounded = problem.residual(of.x), problem.unbounded
        return {
            "cost": of.residual_norm**2 / 2,
            "fun": x_of_single(call, shapes, options, -fun[:, None]),
            "optimality": float(wrong.max()),
            "unbounded_sol": x_of_single(call, shapes, options, unbounded[:, None]),
            "nit": of.sets - 1,
            "status": 1 if of.at.any() or of.sets > 1 else 3,
        }

    def attached(self, result: R) -> R:
        """The result, its x attached to the graph of A and b where somebody wants that."""
        if not self.call.differentiable:
            return result
        free = torch.from_numpy(self.evidence.at == 0)[:, None]
        return attached(self.call, self.shapes, result, partial(attach_bounded, free))

    def report(self, result: Any) -> None:
        """Nothing: it is accepted."""


def solve_by_lapack(
    call: Call, shapes: System, options: Options, lower: np.ndarray, upper: np.ndarray, *, unbounded: bool
) -> Alone | None:
    """The solution where it is accepted, and the problem is one for this way.

    Parameters
    ----------
    call : Call
    shapes : System
    options : Options
    lower, upper : array, shape (n,)
    unbounded : bool
        Whether the solution without bounds is asked for, too.
    """
    if not _suits(shapes, options):
        return None
    solve = partial(_by_lapack, call, shapes, options, lower, upper, unbounded=unbounded)
    with np.errstate(all="ignore"):  # what is not finite is not accepted
        if not is_large(shapes.a.numel(), options):
            with suppress(MemoryError):
                return solve()
        with MemoryGuard(call.engine.device).attempt(LABEL), call.computing():
            return solve()
    return None


def _suits(shapes: System, options: Options) -> bool:
    """Whether there is one problem with one right-hand side in the memory of the host, not too large."""
    engine, a = options.engine, shapes.a
    here = engine.device.type == "cpu" and engine.tuning.lapack and a.is_cpu and shapes.b.is_cpu
    if not (here and shapes.is_vector and a.ndim == 2 and options.dtype in IN_NUMPY):
        return False
    m, n = a.shape
    return m >= n > 0 and m * n**2 <= engine.tuning.by_lapack


def _by_lapack(
    call: Call, shapes: System, options: Options, lower: np.ndarray, upper: np.ndarray, *, unbounded: bool
) -> Alone | None:
    b = array_of(shapes.b)[:, 0].astype(np.float64, copy=False)
    a, large = array_of(shapes.a), is_large(shapes.a.numel(), options)
    problem = Normal.of(a, b, lower, upper, large=large)
    found = None if problem is None else block_pivoting(problem, options.max_iterations or EXCHANGES)
    if problem is None or found is None or (unbounded and not problem.whole.rate <= MAX_RATE):
        return None
    bound = _bound(shapes, options)
    evidence = evidence_of(problem, found, IN_NUMPY[options.dtype], bound)
    if evidence is None or not (evidence.backward_error <= bound and evidence.forward_error <= SURE):
        return None
    return Alone(call, shapes, options, problem, evidence)


def _bound(shapes: System, options: Options) -> float:
    """Largest backward error."""
    return lstsq_bound(options.target, shapes.a.shape[1])
