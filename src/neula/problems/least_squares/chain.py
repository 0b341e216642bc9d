"""One large problem through the chain: a fast R in low precision, refined; then better ones."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from neula.algorithms.krylov.cgls import cgls
from neula.algorithms.krylov.lsqr import lsqr
from neula.algorithms.krylov.refinement import InnerSolver, over
from neula.algorithms.scaling import binary_exponents, shift
from neula.certificates.accuracy import lstsq_bound
from neula.certificates.forward_error import SURE
from neula.engines import FP16_COR
from neula.pipeline.memory import MemoryGuard
from neula.pipeline.result import Attempt
from neula.problems.least_squares.comparators import unrefined
from neula.problems.least_squares.minimum_norm import LABEL, solve_by_svd
from neula.problems.least_squares.preconditioned import (
    INEXACT,
    LIMITS,
    GivenUp,
    Outcome,
    Problem,
    Units,
    preconditioned,
)
from neula.problems.least_squares.problem import Found, Members, Options, no_longer
from neula.problems.least_squares.scaled import ScaledProblems

SAFE_EXPONENT = 400
"""Elements between ``2^-400`` and ``2^400`` have products, and sums of squares, that float64 holds."""


def solve_alone(a: torch.Tensor, b: torch.Tensor, before: Members, options: Options) -> Found:
    """One problem through the chain.

    Parameters
    ----------
    a : Tensor, shape (1, m, n)
    b : Tensor, shape (1, m, k)
    before : Members
        Of one problem: nothing yet.
    options : Options
    """
    best, guard = Found(before), MemoryGuard(a.device)
    if options.algorithm != "svd":
        _try_links(a[0], b[0], best, options, guard)
    if options.algorithm in (None, "svd") and not bool(best.members.accepted):
        with guard.attempt(LABEL):
            last = solve_by_svd(a, b, best.members, options)
            best.members, best.method, best.history = last.members, last.method, ()
            best.attempts += last.attempts
    best.attempts[:0] = [Attempt("out of memory", False, shortage) for shortage in guard.shortages]
    if math.isnan(float(best.members.backward_error)):
        guard.raise_if_short()
        raise ArithmeticError(f"no attempt gave a solution: {best.attempts[-1].reason}")
    return best


def _try_links(a: torch.Tensor, b: torch.Tensor, best: Found, options: Options, guard: MemoryGuard) -> None:
    """Links until one is accepted; keeps the best solution."""
    problem = _prepare(a.double(), b.double(), options)
    bound = lstsq_bound(options.target, min(problem.operator.shape))
    merit: tuple[bool, bool, float] | None = None
    for outcome in _links(problem, bound, guard):
        if outcome.refined is None:
            best.attempts.append(Attempt(outcome.label, False, outcome.doubt))
            continue
        members = _members(problem, outcome, bound)
        error, accepted = float(outcome.refined.measures.backward_error.max()), bool(members.accepted)
        best.attempts.append(Attempt(outcome.label, accepted, _reason(outcome, members, error, bound)))
        best.iterations += outcome.refined.iterations
        # Of rejected answers, those without doubt about their rank come first, then the smaller error.
        found = (not accepted, bool(outcome.doubt), error if math.isfinite(error) else math.inf)
        if merit is None or found < merit:
            merit = found
            best.members, best.method = members, outcome.label
            best.history = tuple(outcome.refined.history)
        if accepted:
            break


def _prepare(a: torch.Tensor, b: torch.Tensor, options: Options) -> Problem:
    """Problems with numbers near the ends of the range are scaled first, in a copy."""
    sizes = [options.engine.column_max(a)]
    if options.weights is not None:
        sizes.append(options.weights.abs())
    exponents = [int(binary_exponents(size).abs().amax()) for size in sizes]
    # Weights multiply, and so exponents add up.
    if sum(exponents) + abs(math.frexp(options.damp)[1]) <= SAFE_EXPONENT:
        return Problem.of(a, b, options)
    scaled = ScaledProblems.of(a[None], b[None], options.weights, options.damp)
    units = scaled.units if scaled.wide else scaled.columns
    shifts = scaled.columns - units
    low = None if scaled.a_low is None else shift(scaled.a_low, shifts)[0]
    b_low = None if scaled.b_low is None else scaled.b_low[0]
    found = Units(-units.mT[0], scaled.b_columns[0], low, b_low)
    return Problem.of(shift(scaled.a, shifts)[0], scaled.b[0], options, found)


def _links(problem: Problem, bound: float, guard: MemoryGuard) -> Iterator[Outcome]:
    """Attempts, cheapest first, each computed when it is asked for."""
    options = problem.options
    algorithm = options.algorithm
    if algorithm in ("direct", "normal"):
        with guard.attempt(algorithm):
            yield unrefined(problem, algorithm)
        return
    inner: InnerSolver = lsqr if algorithm == "lsqr" else cgls
    name = "craig" if problem.wide else "lsqr" if inner is lsqr else "cgls"
    if algorithm != "householder":
        ways = preconditioners(problem.scales.numel(), options)
        for way in ways:
            method, compute = way
            last = algorithm is not None or way == ways[-1]
            limit = None if last else LIMITS.get(way)
            label = f"{method} {compute} + {name}"
            with guard.attempt(label):
                try:
                    preconditioner = problem.preconditioner(method, compute, limit)
                except GivenUp as given_up:
                    yield Outcome(label, None, problem.rank, str(given_up))
                    continue
                yield preconditioned(problem, label, preconditioner, bound, inner, limit=limit)
                del preconditioner
            if algorithm is not None:
                return
    label = f"householder fp64 + {name}"
    with guard.attempt(label):
        yield preconditioned(problem, label, problem.householder(), bound, inner)


def preconditioners(n: int, options: Options) -> list[tuple[str, str]]:
    """Where R of n columns comes from before Householder reflections, cheapest first: method and arithmetic.

    An R in half precision with error correction is as good as one in single precision. It takes the place of
    that, and stands before one in double precision, which takes three times as long (on an H200). A QR in
    fp16 is no better than the Gram matrix with error correction, where that is cheaper.
    """
    if options.compute is not None:
        return [("rgsqrf", options.compute)]
    tuning = options.engine.tuning
    formats = tuning.preconditioners
    if options.algorithm is not None or not tuning.corrected:
        return [("rgsqrf", format) for format in formats]
    links = [("cholesky", "fp16")] if tuning.fp16_gram_columns < n <= tuning.gram_columns else []
    links.append(("cholesky", FP16_COR) if n <= tuning.gram_columns else ("rgsqrf", "fp16"))
    better = [("rgsqrf", format) for format in formats[1:] if format != "fp32"]
    return [*links, ("rgsqrf", FP16_COR), *better]


def _members(problem: Problem, outcome: Outcome, bound: float) -> Members:
    """The solution of one problem in the user's units, with its evidence."""
    refined, options = outcome.refined, problem.options
    assert refined is not None
    x = problem.unscale(refined.x).to(options.dtype).double()
    rounding = over(outcome.size(problem.rescale(x) - refined.x), outcome.size(refined.x))
    forward_error = INEXACT * (outcome.forward_error(problem) + rounding)
    measures = refined.measures
    good = (measures.backward_error.amax() <= bound) & (forward_error <= SURE).all()
    residual_norm = refined.residual_norm
    if options.dtype != torch.float64:  # x is not what was refined
        residual_norm = problem.residual_norm(problem.rescale(x))
    shorter = no_longer(residual_norm, torch.linalg.vector_norm(problem.b, dim=0), problem.operator.shape)
    accepted = good & shorter.all() & (outcome.doubt == "")
    return Members(
        x=x[None],
        residual_norm=problem.unscale_residual(residual_norm)[None],
        forward_error=forward_error[None],
        backward_error=(measures.backward_error + rounding).amax()[None],
        optimality=measures.optimality.amax()[None],
        condition=forward_error.new_tensor([outcome.condition]),
        rank=torch.tensor([outcome.rank], device=x.device),
        accepted=accepted[None],
    )


def _reason(outcome: Outcome, members: Members, error: float, bound: float) -> str:
    assert outcome.refined is not None
    parts = [
        f"backward error {error:.1e} (bound {bound:.1e})",
        f"forward error {float(members.forward_error.max()):.1e}",
        f"{outcome.refined.iterations} iterations",
    ]
    return "; ".join(filter(None, (", ".join(parts), outcome.doubt)))
