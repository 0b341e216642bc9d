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
    shifted_cholesky3_r,
)
from neula.algorithms.krylov.doubled_refinement import (
    MAX_RATE,
    MAX_STEPS,
    DoubledSolution,
    System,
    refine_doubled,
)
from neula.certificates.backward_error import over
from neula.certificates.forward_error import SURE
from neula.kernels.shift import shift
from neula.kernels.triangular_inverse import triangular_inverse
from neula.pipeline.border import Border
from neula.pipeline.chain import Answer
from neula.pipeline.progress import stage
from neula.problems.least_squares.prepared import Problems
from neula.problems.least_squares.problem import Members, Options, no_longer
from neula.problems.least_squares.scaled import ScaledProblems

Factor = Callable[[torch.Tensor], torch.Tensor]


FACTORS: dict[str, Factor] = {
    "cholesky fp64": cholesky_r,
    "shifted cholesky fp64": shifted_cholesky3_r,
    "householder fp64": householder_r,
    "gram-schmidt fp32": partial(gram_schmidt_r, dtype=torch.float32),
    "gram-schmidt fp64": partial(gram_schmidt_r, dtype=torch.float64),
}


def solve_together(
    problems: Problems, before: Answer[Members] | None, *, label: str, factor: Factor, blind_steps: int
) -> Answer[Members]:
    """Some problems with R from one source, as many at a time as fill the machine.

    After each of their steps all are looked at, or after ``blind_steps`` where that is not 0.
    """
    options, k = problems.options, problems.b.shape[2]
    report = stage(options.progress, label)
    m, n = problems.a.shape[1:]
    size = max(1, options.engine.tuning.chunk_elements // (options.rows(m, n) * max(n, k)))
    weights = () if options.weights is None else (options.weights,)
    key = (label, options.damp, options.max_iterations, options.target.name, options.dtype)
    steps: list[int] = []

    def refined(a: torch.Tensor, b: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weighted = replace(options, weights=weights[0] if weights else None)
        members, taken = _refined(a, b, factor, weighted, blind_steps)
        steps.append(taken)
        return *members.tensors, members.measured()

    parts, measured = [], []
    for a, b in problems.chunks(size):
        border = _border(a, options)
        *found, numbers = options.engine.replay(refined, (*border.put(a, b), *weights), key)
        parts.append(_without(border, Members(*found), numbers))
        measured.append(numbers)
        report(min(1.0, len(parts) * size / len(problems)))
    # Where nobody looks at errors in between there are as many as may be; what is played back counts none.
    taken = min(blind_steps, options.max_iterations) or max(steps)
    numbers = measured[0] if len(measured) == 1 else torch.cat(measured, 1)
    return Answer(Members.joined(parts), label, iterations=taken, measured=numbers)


def _border(a: torch.Tensor, options: Options) -> Border:
    """None for batches, large, wide, weighted and damped problems."""
    count, m, n = a.shape
    special = m < n or options.damp or options.weights is not None
    few = count == 1 and m * n**2 <= options.engine.tuning.bordered
    return Border.around(m, n) if few and not special else Border()


def _without(border: Border, members: Members, numbers: torch.Tensor) -> Members:
    """Solutions without their border, also in the numbers that were measured."""
    if not border.columns:
        return members
    numbers[Members.names.index("rank")] -= border.columns
    return replace(members, x=border.take(members.x), rank=members.rank - border.columns)


def _refined(
    a: torch.Tensor, b: torch.Tensor, factor: Factor, options: Options, blind_steps: int
) -> tuple[Members, int]:
    """Scale, factorize, refine and measure some problems; how many updates that took."""
    problems = ScaledProblems.of(a, b, options.weights, options.damp)
    solved = (_minimum_norm if problems.wide else _overdetermined)(problems, factor, options, blind_steps)
    found = solved.found
    refined_error = found.measures.backward_error.amax(1)
    backward_error = (found.measures.backward_error + solved.rounding).amax(1)
    forward_error = found.forward_error + solved.rounding
    shorter = no_longer(solved.residual_norm, solved.b_norm, a.shape)
    members = Members(
        x=solved.x,
        residual_norm=problems.residual_norm(solved.residual_norm),
        forward_error=forward_error,
        backward_error=backward_error,
        refined_error=refined_error,
        optimality=found.measures.optimality.amax(1),
        condition=solved.condition,
        rank=torch.full_like(backward_error, min(problems.a.shape[1:]), dtype=torch.int64),
        accepted=((forward_error <= SURE) & shorter).all(1),
    )
    return members, found.steps


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


def _overdetermined(problems: ScaledProblems, factor: Factor, options: Options, blind_steps: int) -> _Solved:
    system = Overdetermined(problems.a, factor(problems.a), problems.a_low, problems.b_low)
    found = _refine(system, problems.b, options, blind_steps)
    x = problems.unscale(found.x).to(options.dtype).double()
    return _Solved(
        found=found,
        x=x,
        rounding=over(system.size(problems.scale(x) - found.x), system.size(found.x)),
        residual_norm=lengths(found.residual + problems.a @ (found.x - problems.scale(x) + found.x_low)),
        b_norm=lengths(problems.b),
        condition=(system.norm * system.inverse_norm)[:, 0],
    )


def _minimum_norm(problems: ScaledProblems, factor: Factor, options: Options, blind_steps: int) -> _Solved:
    rows = problems.rows
    system = Underdetermined(rows.t, factor(rows.t), problems.sizes, rows.t_low, rows.b_low)
    found = _refine(system, rows.b, options, blind_steps)
    x = rows.unscale(found.x, problems).to(options.dtype).double()
    residual = found.residual + rows.t.mT @ (found.x - rows.scale(x, problems) + found.x_low)
    b_transposed = (problems.a / problems.norms).mT
    r = factor(b_transposed)
    inverse = triangular_inverse(r, upper=True)
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


def _refine(system: System, b: torch.Tensor, options: Options, blind_steps: int) -> DoubledSolution:
    return refine_doubled(
        system,
        b,
        tolerance=options.digits,
        max_steps=min(blind_steps or MAX_STEPS, options.max_iterations),
        look=not blind_steps,
    )
