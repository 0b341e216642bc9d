"""Problems that are small enough to be solved together, each step one launch for all of them.

The links of their chain differ in where R comes from: each is followed by refinement with residuals in twice
the working precision. What no link solves goes on to the SVD, one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from neula.algorithms.krylov.batched_lstsq import (
    Overdetermined,
    Underdetermined,
    cholesky_r,
    gram_schmidt_r,
    householder_r,
    lengths,
    rate_of,
    schatten_bounds,
)
from neula.algorithms.krylov.doubled_refinement import (
    MAX_RATE,
    MAX_STEPS,
    DoubledSolution,
    System,
    refine_doubled,
)
from neula.algorithms.krylov.refinement import over
from neula.algorithms.scaling import shift
from neula.certificates.accuracy import lstsq_bound
from neula.certificates.forward_error import SURE
from neula.pipeline.progress import stage
from neula.pipeline.result import Attempt
from neula.problems.least_squares.problem import Found, Members, Options, no_longer
from neula.problems.least_squares.scaled import ScaledProblems

ROUNDED_RANK = 4.0
"""By how much the condition number must stay below ``1 / rcond`` for the rank to be certain: rounding errors
move singular values by less."""

Factor = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Link:
    """Where R comes from."""

    label: str
    factor: Factor


FACTORS: dict[str, Factor] = {
    "cholesky fp64": cholesky_r,
    "householder fp64": householder_r,
    "gram-schmidt fp32": partial(gram_schmidt_r, dtype=torch.float32),
    "gram-schmidt fp64": partial(gram_schmidt_r, dtype=torch.float64),
}


def links(options: Options) -> list[_Link]:
    """What is tried for a batch, cheapest first."""
    return [_Link(f"{name} + seminormal", FACTORS[name]) for name in options.engine.tuning.small_r]


def solve_together(
    a: torch.Tensor, b: torch.Tensor, left: torch.Tensor, link: _Link, found: Found, options: Options
) -> torch.Tensor:
    """One link of the chain for the problems ``left``; returns those that were not accepted."""
    report = stage(options.progress, link.label)
    m, n = rows(a, options), a.shape[2]
    size = min(len(left), max(1, options.engine.tuning.chunk_elements // (m * max(n, b.shape[2]))))
    weights = () if options.weights is None else (options.weights,)
    key = (
        *(link.label, options.damp, options.rcond, options.max_iterations),
        *(options.target.name, options.dtype),
    )

    def refined(a: torch.Tensor, b: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _refined(a, b, link.factor, replace(options, weights=weights[0] if weights else None))

    steps = torch.zeros((), dtype=torch.int64, device=a.device)
    for start in range(0, len(left), size):
        where = left[start : start + size]
        # Slices of what is whole: indices copy.
        chunk = slice(start, start + size) if len(left) == len(a) else where
        *parts, taken = options.engine.replay(refined, (a[chunk], b[chunk], *weights), key)
        found.members.put(where, Members(*parts))
        steps = torch.maximum(steps, taken)
        report(min(1.0, (start + size) / len(left)))
    found.attempts.append(_attempt(link.label, left, a, found, options))
    found.method = link.label
    found.iterations += int(steps)
    return left[~found.members.accepted[left]]


def rows(a: torch.Tensor, options: Options) -> int:
    """Rows of each matrix, damping stacked below it."""
    return a.shape[1] + (a.shape[2] if options.damp else 0)


def _attempt(label: str, left: torch.Tensor, a: torch.Tensor, found: Found, options: Options) -> Attempt:
    bound, errors = lstsq_bound(options.target, min(a.shape[-2:])), found.members.backward_error
    missed = left[~found.members.accepted[left]]
    doubtful = int((errors[missed] <= bound).sum())
    reason = (
        f"{len(missed)} of {len(left)} problems rejected, {doubtful} for doubts about their rank or digits"
    )
    worst = f"the worst: backward error {float(errors[left].max()):.1e} (bound {bound:.1e})"
    forward = f"forward error {float(found.members.forward_error[left].max()):.1e}"
    return Attempt(label, len(missed) == 0, f"{reason}; {worst}, {forward}")


def _refined(a: torch.Tensor, b: torch.Tensor, factor: Factor, options: Options) -> tuple[torch.Tensor, ...]:
    """Scale, factorize, refine and measure some problems: the tensors of :class:`Members`, and the steps."""
    problems = ScaledProblems.of(a, b, options.weights, options.damp)
    solved = (_minimum_norm if problems.wide else _overdetermined)(problems, factor, options)
    found = solved.found
    bound = lstsq_bound(options.target, min(a.shape[-2:]))
    backward_error = (found.measures.backward_error + solved.rounding).amax(1)
    forward_error = found.forward_error + solved.rounding
    shorter = no_longer(solved.residual_norm, solved.b_norm, a.shape)
    full_rank = solved.condition * options.certain_rcond(a.shape) * ROUNDED_RANK < 1
    accepted = (found.measures.backward_error.amax(1) <= bound) & full_rank
    members = Members(
        x=solved.x,
        residual_norm=problems.residual_norm(solved.residual_norm),
        forward_error=forward_error,
        backward_error=backward_error,
        optimality=found.measures.optimality.amax(1),
        condition=solved.condition,
        rank=torch.full_like(backward_error, min(problems.a.shape[1:]), dtype=torch.int64),
        accepted=accepted & ((forward_error <= SURE) & shorter).all(1),
    )
    steps = torch.full((), found.steps, dtype=torch.int64, device=a.device)
    return *members.tensors, steps


@dataclass(frozen=True)
class _Solved:
    """Solutions of some problems in their own units.

    Attributes
    ----------
    found : DoubledSolution
    x : Tensor, shape (batch, n, k)
        Rounded to the dtype of the result.
    rounding : Tensor, shape (batch, k)
        What that lost, relative to x.
    residual_norm, b_norm : Tensor, shape (batch, k)
        In units of the scaled b, of x as it is returned.
    condition : Tensor, shape (batch,)
    """

    found: DoubledSolution
    x: torch.Tensor
    rounding: torch.Tensor
    residual_norm: torch.Tensor
    b_norm: torch.Tensor
    condition: torch.Tensor


def _overdetermined(problems: ScaledProblems, factor: Factor, options: Options) -> _Solved:
    system = Overdetermined(problems.a, factor(problems.a), problems.a_low, problems.b_low)
    found = _refine(system, problems.b, options)
    x = problems.unscale(found.x).to(options.dtype).double()
    return _Solved(
        found=found,
        x=x,
        rounding=over(system.size(problems.scale(x) - found.x), system.size(found.x)),
        residual_norm=lengths(found.residual + problems.a @ (found.x - problems.scale(x) + found.x_low)),
        b_norm=lengths(problems.b),
        condition=(system.norm * system.inverse_norm)[:, 0],
    )


def _minimum_norm(problems: ScaledProblems, factor: Factor, options: Options) -> _Solved:
    rows = problems.rows
    system = Underdetermined(rows.t, factor(rows.t), problems.sizes, rows.t_low, rows.b_low)
    found = _refine(system, rows.b, options)
    x = rows.unscale(found.x, problems).to(options.dtype).double()
    residual = found.residual + rows.t.mT @ (found.x - rows.scale(x, problems) + found.x_low)
    b_transposed = (problems.a / problems.norms).mT
    r = factor(b_transposed)
    identity = torch.eye(r.shape[-1], dtype=r.dtype, device=r.device)
    inverse = torch.linalg.solve_triangular(r, identity, upper=True)
    condition = schatten_bounds(r)[0] * schatten_bounds(inverse)[1]
    # An R of the normal equations may look regular where B is not.
    condition = condition.where(rate_of(b_transposed, r, inverse)[:, None] <= MAX_RATE, torch.inf)
    return _Solved(
        found=found,
        x=x,
        rounding=over(system.size(rows.scale(x, problems) - found.x), system.size(found.x)),
        residual_norm=lengths(shift(residual, rows.exponents.mT)),
        b_norm=lengths(problems.b),
        condition=condition[:, 0],
    )


def _refine(system: System, b: torch.Tensor, options: Options) -> DoubledSolution:
    return refine_doubled(
        system,
        b,
        tolerance=options.digits,
        max_steps=min(options.engine.tuning.blind_steps or MAX_STEPS, options.max_iterations),
        look=options.looks,
    )
