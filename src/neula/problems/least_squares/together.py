"""Problems that are small enough to be solved together, each step one launch for all of them.

The links of their chain differ in where R comes from: each is followed by refinement with residuals in twice
the working precision. Unsolved problems go to the SVD, one by one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Self

import torch

from neula.algorithms.krylov.batched_lstsq import lengths, limits_of, rate_of
from neula.algorithms.krylov.doubled_refinement import (
    MAX_STEPS,
    SYNCHRONOUS,
    DoubledSolution,
    FactoredProblems,
    LaunchTuning,
    Pace,
    Refinement,
    refine_doubled,
)
from neula.algorithms.krylov.underdetermined import Underdetermined
from neula.algorithms.orthogonal.r_only import HALVED, cholesky_r, lower_gram
from neula.algorithms.scaled_problems import ScaledProblems
from neula.algorithms.spectra.inverse_norm import schatten_bounds
from neula.certificates.bounds import lstsq_bound
from neula.certificates.forward_error import ESTIMATED, MAX_RATE
from neula.engines import FP64
from neula.engines.formats import in_double
from neula.engines.graphs import Tensors, made
from neula.kernels.doubled.doubled import cuts
from neula.kernels.few_vectors.one_pass_host import pays
from neula.kernels.magnitudes import MODERATE, largest_magnitude
from neula.kernels.shift import shift
from neula.kernels.small_problems import seminormal
from neula.kernels.small_problems.embedding import embedded, of_stacked_parts, stacked_parts
from neula.kernels.small_problems.refining import over
from neula.kernels.triangular_inverse import triangular_inverse
from neula.pipeline.border import Border
from neula.pipeline.chain import Answer
from neula.pipeline.gradients import stacked_problem
from neula.pipeline.progress import stage
from neula.problems.least_squares.prepared import LeastSquaresProblems
from neula.problems.least_squares.problem import LeastSquaresOptions, LeastSquaresSolutions
from neula.problems.least_squares.with_r import (
    Factor,
    RSource,
    UnscaledSolutions,
    measured_members,
    members_of,
    refines_doubled_of,
    system_of,
)


def solve_together(
    problems: LeastSquaresProblems,
    before: Answer[LeastSquaresSolutions] | None,
    *,
    label: str,
    source: RSource,
    pace: Pace,
) -> Answer[LeastSquaresSolutions]:
    """Some problems with R from one source, as many at a time as fill the machine."""
    options, k = problems.options, problems.b.shape[2]
    report = stage(options.progress, label)
    if source.factor is cholesky_r and in_reach(problems.a, k, options):
        return in_one_launch(problems, label, pace)
    m, n = problems.a.shape[1:]
    size = max(1, options.engine.tuning.chunk_elements // (options.rows(m, n) * max(n, k)))
    weights = () if options.weights is None else (options.weights,)
    key = (label, options.damp, options.max_iterations, options.target.name, options.dtype)

    def refined(a: torch.Tensor, b: torch.Tensor, *weights: torch.Tensor) -> tuple[Tensors, int]:
        weighted = replace(options, weights=weights[0] if weights else None)
        given = None
        # Over processes small problems are scaled as others are: most of their time is for messages.
        few_messages = source.half_precision or not options.over_rows.spread
        synchronizes = not pace.is_prelaunched and few_messages
        plain = PlainProblems.from_arrays(a, b, weighted) if synchronizes else None
        if plain is not None:
            known = source.from_gram and plain.a is problems.a and len(a) == 1
            given = as_given(plain, source, pace, problems.gram[None] if known else None)
        if given is None:
            # Of a scaled copy the host reads after every step, and none is plain.
            exact = replace(source, half_precision=False)
            given = _refined(a, b, exact, weighted, pace if pace.is_prelaunched else SYNCHRONOUS)
        members, steps, numbers = given
        return (*members.tensors, numbers), steps

    parts, measured, most = [], [], pace.limit(options.max_iterations) if pace.is_prelaunched else 0
    for a, b in problems.chunks(size):
        border = _border(a, options)
        inputs = border.put(a, b) if border.rows else (a, b, *weights)
        if pace.is_prelaunched:
            *values, numbers = options.engine.replay(lambda *inputs: refined(*inputs)[0], inputs, key)
        else:
            (*values, numbers), steps = refined(*made(inputs))
            most = max(most, steps)
        parts.append(_without(border, LeastSquaresSolutions(*values), numbers))
        measured.append(numbers)
        report(min(1.0, len(parts) * size / len(problems)))
    if len({x.device for x in measured}) > 1:  # the host has read some
        measured = [x.cpu() for x in measured]
    numbers = measured[0] if len(measured) == 1 else torch.cat(measured, 1)
    return Answer(LeastSquaresSolutions.joined(parts), label, iterations=most, measured=numbers)


def in_reach(a: torch.Tensor, k: int, options: LeastSquaresOptions) -> bool:
    """Whether one launch does all for matrices of shape (batch, m, n), and sooner than many."""
    special = options.named or options.damp or options.weights is not None or options.over_rows.spread
    if special:
        return False
    if a.is_complex():  # in the shape of real ones
        a = a.real.new_empty(1, 2 * a.shape[1], 2 * a.shape[2]).expand(len(a), -1, -1)
    small = a.shape[1] * a.shape[2] * k <= options.engine.tuning[LaunchTuning].one_launch
    return small and seminormal.takes(a)


def in_one_launch(problems: LeastSquaresProblems, label: str, pace: Pace) -> Answer[LeastSquaresSolutions]:
    """Solve all problems by the kernel, except those with numbers near the ends of the range."""
    options = problems.options
    steps = pace.limit(min(MAX_STEPS, options.max_iterations))
    ((a, b),) = problems.chunks(len(problems))
    real, limits = options.dtype.to_real(), limits_of(options.digits, steps)
    if options.dtype.is_complex:
        found = seminormal.solved(embedded(a), stacked_parts(b), real, limits)
        x = of_stacked_parts(found.x)
        found.numbers[LeastSquaresSolutions.names.index("rank")] /= 2
    else:
        found = seminormal.solved(a, b, real, limits)
        x = found.x
    members = LeastSquaresSolutions.from_numbers(
        x, found.numbers, forward_error=found.forward_error, residual_norm=found.residual_norm
    )
    return Answer(members, label, iterations=steps, measured=found.numbers)


def _border(a: torch.Tensor, options: LeastSquaresOptions) -> Border:
    """None for batches, large, wide, weighted and damped problems."""
    count, m, n = a.shape
    special = m < n or options.damp or options.weights is not None
    few = count == 1 and m * n**2 <= options.engine.tuning[LaunchTuning].bordered
    if not few or special or options.engine.often((_border, m, n)):
        return Border()
    return Border.around(m, n)


def _without(border: Border, members: LeastSquaresSolutions, numbers: torch.Tensor) -> LeastSquaresSolutions:
    """Solutions without their border, also in the numbers that were measured."""
    if not border.columns:
        return members
    numbers[LeastSquaresSolutions.names.index("rank")] -= border.columns
    return replace(members, x=border.take(members.x), rank=members.rank - border.columns)


def _refined(
    a: torch.Tensor, b: torch.Tensor, source: RSource, options: LeastSquaresOptions, pace: Pace
) -> tuple[LeastSquaresSolutions, int, torch.Tensor]:
    """Scale, factorize, refine and measure some problems; how many updates that took."""
    problems = ScaledProblems.from_arrays(a, b, options.weights, options.damp, options.over_rows)
    if problems.wide:
        solved = _minimum_norm(problems, source.factor, options, pace)
        members = members_of(problems, solved, options, a.shape[1])
        return members, solved.found.steps, members.measured()
    over_rows, gram, of = options.over_rows, None, {}
    if source.from_gram and problems.a.shape[2] >= HALVED:
        gram = over_rows.total(lower_gram(problems.a))
        of = {"gram": gram}
    r = source.factor(problems.a, over_rows=over_rows, **of)
    system = system_of(problems, r, options, source, gram)
    found = _refine(system, problems.b, options, pace)
    members = measured_members(problems, system, found, options, a.shape[1])
    return members, found.steps, members.measured()


def _minimum_norm(
    problems: ScaledProblems, factor: Factor, options: LeastSquaresOptions, pace: Pace
) -> UnscaledSolutions:
    rows, exponents = problems.with_rows()
    t = rows.a.mH
    b_transposed = (problems.a / problems.norms).mH
    r = factor(b_transposed)
    inverse, (norm, norm_bound) = triangular_inverse(r, upper=True), schatten_bounds(r, upper=True)
    inverse_norm = schatten_bounds(inverse, upper=True)[1]
    # An R of the normal equations may look regular where B is not.
    inverse_norm = inverse_norm.where(rate_of(b_transposed, r, inverse)[:, None] <= MAX_RATE, torch.inf)
    condition = norm * inverse_norm
    condition_bound = torch.minimum(norm_bound * inverse_norm, ESTIMATED * condition)
    system = Underdetermined(
        t,
        factor(t),
        problems.sizes,
        None if rows.a_low is None else rows.a_low.mH,
        rows.b_low,
        norm=norm,
        exponents=exponents.mT,
    )
    found = _refine(system, rows.b, options, pace)
    x = in_double(rows.unscale(found.x).to(options.dtype))
    lost = found.x - rows.scale(x)
    residual = found.residual + rows.a @ lost
    return UnscaledSolutions(
        found=found,
        x=x,
        rounding=over(system.size(lost), system.size(found.x)),
        low=found.rounding,
        residual_norm=lengths(shift(residual, exponents)),
        b_norm=lengths(problems.b),
        condition=condition[:, 0],
        condition_bound=condition_bound[:, 0],
    )


def _refine(
    system: FactoredProblems, b: torch.Tensor, options: LeastSquaresOptions, pace: Pace
) -> DoubledSolution:
    return refine_doubled(
        system,
        b,
        tolerance=options.digits,
        max_steps=min(MAX_STEPS, options.max_iterations),
        pace=pace,
        over_rows=options.over_rows,
    )


REFINED_ERROR = LeastSquaresSolutions.names.index("refined_error")

ALIKE = 4.0
"""Columns whose norms differ by less are not scaled before their products are doubled."""


class PlainProblems(NamedTuple):
    """Tall problems, neither weighted nor damped."""

    a: torch.Tensor  # shape (batch, m, n)
    b: torch.Tensor  # shape (batch, m, k)
    options: LeastSquaresOptions  # without weights and damping
    # Backward error of rounding weighted elements: with columns of norm 1, what it changes of A has a
    # Frobenius norm of at most sqrt(n) u, and A a norm of at least 1.
    data_error: float = 0.0

    @classmethod
    def from_arrays(cls, a: torch.Tensor, b: torch.Tensor, options: LeastSquaresOptions) -> Self | None:
        """Weights and damping go into A, unless residuals are in twice the working precision; None for wide
        problems, and those.
        """
        m, n = options.over_rows.count(a.shape[1]), a.shape[2]
        weighted = options.weights is not None
        if options.is_wide(m, n):
            return None
        if not (weighted or options.damp):
            return cls(a, b, options)
        if options.over_rows.spread or options.refines_doubled(m, n):
            return None
        a, b = stacked_problem(a, b, options.weights, options.damp)
        plain = replace(options, weights=None, damp=0.0)
        return cls(a, b, plain, n**0.5 * FP64.u if weighted else 0.0)


def as_given(
    plain: PlainProblems, source: RSource, pace: Pace, gram: torch.Tensor | None
) -> tuple[LeastSquaresSolutions, int, torch.Tensor] | None:
    """Factorize, refine and measure problems in numbers near 1, which most are; None for others.

    The norms of the columns of R tell whether numbers are near 1. A synchronous host reads that before
    anything else. An asynchronous one has by then launched the steps, which follow a long product, and their
    evidence, and reads all numbers at once. If R is to be checked first, it also reads before the steps: with
    an R in half precision the rate of convergence, too.

    Returns solutions, how many steps they took, and their measured numbers, possibly on the host.
    """
    a, b, options, data_error = plain
    over_rows = options.over_rows
    doubled = refines_doubled_of(options, a, source)
    narrow = not doubled and len(a) == 1 and pays(a[0])
    problems = ScaledProblems.as_given(a, b, over_rows, narrow=narrow)
    known = {} if gram is None else {"gram": gram}
    r = source.factor(a if source.narrow else in_double(problems.a), over_rows=over_rows, **known)
    norms = lengths(r)
    usable = _moderate(norms, over_rows.largest(largest_magnitude(problems.b, 1)))
    if doubled and cuts(a.device):
        usable &= _alike(norms)
    read_first = source.checked_first or not pace.is_asynchronous
    if read_first and not source.half_precision and not bool(over_rows.agree(usable)):
        return _broken_down(problems, r)
    system = system_of(problems, r, options, source, gram, norms)
    if source.checked_first and source.half_precision:
        good = (system.rate <= MAX_RATE).any()
        near_one, fast_enough = over_rows.agree(torch.stack([usable, good])).tolist()
        if not near_one:
            return _broken_down(problems, r)
        if not fast_enough:
            return _missing(problems)
    refinement = Refinement(system, problems.b, options.digits, over_rows)
    most = min(MAX_STEPS, options.max_iterations)
    if pace.is_asynchronous:
        refinement.advance(min(pace.steps, most), pace.steps)
        settled = partial(system.settled, left=refinement.left + system.size(refinement.low))
        members = measured_members(
            problems, system, refinement.solution(settled), options, a.shape[1], data_error
        )
        promising = refinement.active.any() & (system.rate <= MAX_RATE).any()
        numbers = members.measured()
        read = over_rows.agree(torch.cat([numbers.flatten(), torch.stack([usable, promising])])).cpu()
        near_one, goes_on = read[-2:].tolist()
        if not near_one:
            return _broken_down(problems, r)
        numbers = read[:-2].reshape(numbers.shape)
        if not goes_on and bool((numbers[REFINED_ERROR] <= lstsq_bound(options.target, a.shape[2])).all()):
            return members, refinement.steps, numbers
        most = most if goes_on else refinement.steps
    refinement.advance(most, refinement.steps + 1)
    members = measured_members(problems, system, refinement.solution(), options, a.shape[1], data_error)
    return members, refinement.steps, members.measured()


def _broken_down(
    problems: ScaledProblems, r: torch.Tensor
) -> tuple[LeastSquaresSolutions, int, torch.Tensor] | None:
    """A single problem of which nothing is known where R broke down, and not because its numbers are far from
    1; None for others.
    """
    over_rows = problems.over_rows
    if len(r) > 1 or not bool(over_rows.agree(r.isnan().any())):
        return None
    (sizes,) = over_rows.norms(problems.a, dim=1)
    if not bool(over_rows.agree(_moderate(sizes, over_rows.largest(largest_magnitude(problems.b, 1))))):
        return None
    return _missing(problems)


def _missing(problems: ScaledProblems) -> tuple[LeastSquaresSolutions, int, torch.Tensor]:
    a, shape = problems.a, (len(problems.a), problems.a.shape[2], problems.b.shape[2])
    missing = LeastSquaresSolutions.full(math.nan, *shape, a.device, a.dtype)
    return missing, 0, missing.measured()


def _moderate(norms: torch.Tensor, size_of_b: torch.Tensor) -> torch.Tensor:
    """Whether squares neither overflow nor underflow; a right-hand side may be zero."""
    smallest, largest = norms.aminmax()
    of_b = torch.where(size_of_b == 0, 1.0, size_of_b).aminmax()
    enough = torch.minimum(smallest, of_b.min) >= 1 / MODERATE
    return enough & (torch.maximum(largest, of_b.max) <= MODERATE)


def _alike(norms: torch.Tensor) -> torch.Tensor:
    """Whether the columns of each matrix are of a size: where they are cut, it is at the same places."""
    return (norms.amax(1) <= ALIKE * norms.amin(1)).all()
