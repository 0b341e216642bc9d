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
    Triangles,
    Underdetermined,
    lengths,
    rate_of,
)
from neula.algorithms.krylov.doubled_refinement import (
    MAX_RATE,
    MAX_STEPS,
    DoubledSolution,
    Refinement,
    System,
    refine_doubled,
)
from neula.algorithms.krylov.one_launch import limits_of
from neula.algorithms.orthogonal.r_only import (
    HALVED,
    cholesky32_r,
    cholesky_r,
    gram_schmidt_r,
    householder_r,
    lower_gram,
    shifted_cholesky3_r,
)
from neula.algorithms.spectra.schatten import schatten_bounds
from neula.certificates.backward_error import over
from neula.certificates.forward_error import SURE
from neula.kernels import seminormal
from neula.kernels.doubled import cuts
from neula.kernels.magnitudes import largest_magnitude
from neula.kernels.seminormal import MODERATE
from neula.kernels.shift import shift
from neula.kernels.triangular_inverse import triangular_inverse
from neula.pipeline.border import Border
from neula.pipeline.chain import Answer
from neula.pipeline.progress import stage
from neula.problems.least_squares.prepared import Problems
from neula.problems.least_squares.problem import Members, Options, no_longer
from neula.problems.least_squares.scaled import ScaledProblems

Factor = Callable[..., torch.Tensor]
"""R of a batch of tall matrices, ``factor(a, over_rows=...)``."""


ALIKE = 4.0
"""Columns whose norms differ by less are not scaled before their products are doubled."""

FACTORS: dict[str, Factor] = {
    "cholesky fp32": cholesky32_r,
    "cholesky fp64": cholesky_r,
    "shifted cholesky fp64": shifted_cholesky3_r,
    "householder fp64": householder_r,
    "gram-schmidt fp32": partial(gram_schmidt_r, dtype=torch.float32),
    "gram-schmidt fp64": partial(gram_schmidt_r, dtype=torch.float64),
}

FROM_GRAM = ("cholesky fp64", "shifted cholesky fp64")
"""Those that take the Gram matrix of a single A, which is made once for all of them."""


def solve_together(
    problems: Problems,
    before: Answer[Members] | None,
    *,
    label: str,
    factor: Factor,
    blind_steps: int,
    ahead: int = 0,
    wary: bool = False,
    coarse: bool = False,
    shared: bool = False,
) -> Answer[Members]:
    """Some problems with R from one source, as many at a time as fill the machine.

    After each of their steps all are looked at, or after ``blind_steps`` where that is not 0; before the
    first look ``ahead`` steps are queued, but if ``wary`` R is looked at before. An R of low precision is
    ``coarse``; if ``shared``, it is made of the Gram matrix that links share.
    """
    options, k = problems.options, problems.b.shape[2]
    report = stage(options.progress, label)
    if factor is cholesky_r and _in_reach(problems):
        return _in_one_launch(problems, label, blind_steps)
    m, n = problems.a.shape[1:]
    size = max(1, options.engine.tuning.chunk_elements // (options.rows(m, n) * max(n, k)))
    weights = () if options.weights is None else (options.weights,)
    key = (label, options.damp, options.max_iterations, options.target.name, options.dtype)
    steps: list[int] = []

    def refined(a: torch.Tensor, b: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weighted = replace(options, weights=weights[0] if weights else None)
        given = None
        if not blind_steps and _is_plain(a, weighted):
            known = shared and a is problems.a and len(a) == 1
            gram = problems.gram[None] if known else None
            given = _as_given(a, b, factor, weighted, ahead, gram, wary=wary, coarse=coarse)
        if given is None:
            given = _refined(a, b, factor, weighted, blind_steps, shared=shared)
        members, taken = given
        steps.append(taken)
        return *members.tensors, members.measured()

    parts, measured = [], []
    for a, b in problems.chunks(size):
        border = _border(a, options)
        inputs = (*border.put(a, b), *weights)
        *found, numbers = options.engine.replay(refined, inputs, key) if blind_steps else refined(*inputs)
        parts.append(_without(border, Members(*found), numbers))
        measured.append(numbers)
        report(min(1.0, len(parts) * size / len(problems)))
    # Where nobody looks at errors in between there are as many as may be; what is played back counts none.
    taken = min(blind_steps, options.max_iterations) or max(steps)
    numbers = measured[0] if len(measured) == 1 else torch.cat(measured, 1)
    return Answer(Members.joined(parts), label, iterations=taken, measured=numbers)


def _in_reach(problems: Problems) -> bool:
    """Whether one launch does all that follows, and sooner than many."""
    options, (m, n), k = problems.options, problems.a.shape[1:], problems.b.shape[2]
    special = options.damp or options.weights is not None or options.over_rows.spread
    small = m * n * k <= options.engine.tuning.one_launch
    return small and not special and seminormal.takes(problems.a)


def _in_one_launch(problems: Problems, label: str, blind_steps: int) -> Answer[Members]:
    """All problems by the kernel, which leaves those alone whose numbers are near the ends of the range."""
    options = problems.options
    steps = min(blind_steps or MAX_STEPS, options.max_iterations)
    ((a, b),) = problems.chunks(len(problems))
    found = seminormal.solved(a, b, options.dtype, limits_of(options.digits, steps))
    of = dict(zip(seminormal.NAMES, found.numbers, strict=True))
    members = Members(
        x=found.x,
        residual_norm=found.residual_norm,
        forward_error=found.forward_error,
        backward_error=of["backward_error"],
        refined_error=of["refined_error"],
        optimality=of["optimality"],
        condition=of["condition"],
        rank=found.rank,
        accepted=found.accepted,
    )
    return Answer(members, label, iterations=steps, measured=found.numbers)


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


def _is_plain(a: torch.Tensor, options: Options) -> bool:
    """Whether problems may be solved as they are given: tall, neither weighted nor damped."""
    special = options.weights is not None or options.damp or options.over_rows.spread
    return not special and a.shape[1] >= a.shape[2]


def _as_given(
    a: torch.Tensor,
    b: torch.Tensor,
    factor: Factor,
    options: Options,
    ahead: int,
    gram: torch.Tensor | None,
    *,
    wary: bool,
    coarse: bool,
) -> tuple[Members, int] | None:
    """Factorize, refine and measure problems in numbers near 1, which most are; None for others.

    What R says of their columns is looked at before anything else, or after as many steps as are queued ahead
    of the host: it then has launched what follows a long product before that is done.
    """
    problems = ScaledProblems.as_given(a, b)
    r = factor(problems.a) if gram is None else factor(problems.a, gram=gram)
    norms = lengths(r)
    usable = _moderate(norms, largest_magnitude(problems.b, 1))
    if _doubled(options, a) and cuts(a.device):
        usable &= _alike(norms)
    if (wary or not ahead) and not bool(usable):
        return _broken_down(problems, r)
    system = _system(problems, r, options, gram, coarse=coarse)
    refinement = Refinement(system, problems.b, options.digits)
    most = min(MAX_STEPS, options.max_iterations)
    for _ in range(min(max(1, ahead), most)):
        refinement.step()
    if ahead:
        members = _measured(problems, system, refinement.solution(), options, a.shape[1])
        promising = refinement.active.any() & (system.rate <= MAX_RATE).any()
        near_one, goes_on = torch.stack([usable, promising]).tolist()
        if not near_one:
            return _broken_down(problems, r)
        if not goes_on:
            return members, refinement.steps
    while refinement.steps < most and refinement.goes_on():
        refinement.step()
    return _measured(problems, system, refinement.solution(), options, a.shape[1]), refinement.steps


def _broken_down(problems: ScaledProblems, r: torch.Tensor) -> tuple[Members, int] | None:
    """A single problem of which nothing is known where R broke down, and not because its numbers are far from
    1; None for others.
    """
    if len(r) > 1 or not bool(r.isnan().any()):
        return None
    sizes = torch.linalg.vector_norm(problems.a, dim=1)
    if not bool(_moderate(sizes, largest_magnitude(problems.b, 1))):
        return None
    return Members.missing(1, problems.a.shape[2], problems.b.shape[2], problems.a.device), 0


def _refined(
    a: torch.Tensor, b: torch.Tensor, factor: Factor, options: Options, blind_steps: int, *, shared: bool
) -> tuple[Members, int]:
    """Scale, factorize, refine and measure some problems; how many updates that took."""
    problems = ScaledProblems.of(a, b, options.weights, options.damp, options.over_rows)
    if problems.wide:
        solved = _minimum_norm(problems, factor, options, blind_steps)
        return _members(problems, solved, options, a.shape[1]), solved.found.steps
    over_rows, gram, of = options.over_rows, None, {}
    if shared and problems.a.shape[2] >= HALVED:
        gram = over_rows.total(lower_gram(problems.a))
        of = {"gram": gram}
    system = _system(problems, factor(problems.a, over_rows=over_rows, **of), options, gram)
    found = _refine(system, problems.b, options, blind_steps)
    return _measured(problems, system, found, options, a.shape[1]), found.steps


def _members(problems: ScaledProblems, solved: _Solved, options: Options, rows: int) -> Members:
    """Solutions in the units that were given, with what was measured."""
    found, over_rows = solved.found, options.over_rows
    shape = (over_rows.count(rows), solved.x.shape[1])
    refined_error = found.measures.backward_error.amax(1)
    backward_error = (found.measures.backward_error + solved.rounding + solved.low).amax(1)
    forward_error = found.forward_error + solved.rounding
    shorter = no_longer(solved.residual_norm, solved.b_norm, shape)
    members = Members(
        x=solved.x,
        residual_norm=problems.residual_norm(solved.residual_norm),
        forward_error=forward_error,
        backward_error=backward_error,
        refined_error=refined_error,
        optimality=found.measures.optimality.amax(1),
        condition=solved.condition,
        rank=torch.full_like(backward_error, min(options.rows(*shape), shape[1]), dtype=torch.int64),
        accepted=((forward_error <= SURE) & shorter).all(1),
    )
    return Members(*over_rows.agreed(*members.tensors))


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
    low : Tensor, shape (batch, k)
        What x lacks of the sum that was refined, relative to it.
    residual_norm, b_norm : Tensor, shape (batch, k)
        In units of the scaled b, of x as it is returned.
    condition : Tensor, shape (batch,)
    """

    found: DoubledSolution
    x: torch.Tensor
    rounding: torch.Tensor
    low: torch.Tensor
    residual_norm: torch.Tensor
    b_norm: torch.Tensor
    condition: torch.Tensor


def _moderate(norms: torch.Tensor, size_of_b: torch.Tensor) -> torch.Tensor:
    """Whether squares neither overflow nor underflow; a right-hand side may be zero."""
    smallest, largest = norms.aminmax()
    of_b = torch.where(size_of_b == 0, 1.0, size_of_b).aminmax()
    enough = torch.minimum(smallest, of_b.min) >= 1 / MODERATE
    return enough & (torch.maximum(largest, of_b.max) <= MODERATE)


def _alike(norms: torch.Tensor) -> torch.Tensor:
    """Whether the columns of each matrix are of a size: where they are cut, it is at the same places."""
    return (norms.amax(1) <= ALIKE * norms.amin(1)).all()


def _doubled(options: Options, a: torch.Tensor) -> bool:
    """Whether residuals are in twice the working precision."""
    m, n = options.over_rows.count(a.shape[1]), a.shape[2]
    return options.refines_doubled(m, n)


def _system(
    problems: ScaledProblems,
    r: torch.Tensor,
    options: Options,
    gram: torch.Tensor | None = None,
    *,
    coarse: bool = False,
) -> Overdetermined:
    doubled, over_rows = _doubled(options, problems.a), options.over_rows
    columns, triangles = None, None
    if problems.given or gram is not None:
        columns = lengths(r)[..., None]
        # Dozens of launches that know nothing of A, which may be too large to be played back.
        inputs = (r, columns) if gram is None or gram.shape[1] < HALVED else (r, columns, gram)
        known = options.engine.replay(_triangles, inputs, "triangles")
        triangles = Triangles(*known)
    return Overdetermined(
        *(problems.a, r, problems.a_low, problems.b_low, columns, over_rows),
        doubled=doubled,
        triangles=triangles,
        rhs=problems.b if problems.given else None,
        coarse=coarse,
    )


def _measured(
    problems: ScaledProblems, system: Overdetermined, found: DoubledSolution, options: Options, rows: int
) -> Members:
    """Solutions of tall problems with their evidence."""
    over_rows = options.over_rows
    if problems.given and options.dtype == torch.float64:
        x, residual, rounding = found.x, found.residual, torch.zeros_like(found.forward_error)
    else:
        x = problems.unscale(found.x).to(options.dtype).double()
        lost = found.x - problems.scale(x)
        residual = found.residual + problems.a @ lost
        rounding = over(system.size(lost), system.size(found.x))
    residual_norm, b_norm = over_rows.norms(residual, problems.b, dim=1)
    solved = _Solved(
        found=found,
        x=x,
        rounding=rounding,
        low=found.rounding(system),
        residual_norm=residual_norm,
        b_norm=b_norm,
        condition=(system.norm * system.inverse_norm)[:, 0],
    )
    return _members(problems, solved, options, rows)


def _triangles(*known: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return Triangles.of(*known).tensors


def _minimum_norm(problems: ScaledProblems, factor: Factor, options: Options, blind_steps: int) -> _Solved:
    rows = problems.rows
    system = Underdetermined(rows.t, factor(rows.t), problems.sizes, rows.t_low, rows.b_low)
    found = _refine(system, rows.b, options, blind_steps)
    x = rows.unscale(found.x, problems).to(options.dtype).double()
    residual = found.residual + rows.t.mT @ (found.x - rows.scale(x, problems))
    b_transposed = (problems.a / problems.norms).mT
    r = factor(b_transposed)
    inverse = triangular_inverse(r, upper=True)
    condition = schatten_bounds(r, upper=True)[0] * schatten_bounds(inverse, upper=True)[1]
    # An R of the normal equations may look regular where B is not.
    condition = condition.where(rate_of(b_transposed, r, inverse)[:, None] <= MAX_RATE, torch.inf)
    return _Solved(
        found=found,
        x=x,
        rounding=over(system.size(rows.scale(x, problems) - found.x), system.size(found.x)),
        low=found.rounding(system),
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
