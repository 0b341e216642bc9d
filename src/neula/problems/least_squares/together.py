"""Problems that are small enough to be solved together, each step one launch for all of them.

The links of their chain differ in where R comes from: each is followed by refinement with residuals in twice
the working precision. Unsolved problems go to the SVD, one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from neula.algorithms.krylov.batched_lstsq import (
    Overdetermined,
    Triangles,
    Underdetermined,
    are_solved,
    lengths,
    limits_of,
    rate_of,
)
from neula.algorithms.krylov.doubled_refinement import (
    MAX_STEPS,
    SYNCHRONOUS,
    DoubledSolution,
    FactoredProblems,
    LaunchTuning,
    Pace,
    Refinement,
)
from neula.algorithms.krylov.passes import times
from neula.algorithms.krylov.streamed_lstsq import SummedProblem
from neula.algorithms.orthogonal.r_only import (
    HALVED,
    cholesky32_r,
    cholesky_r,
    householder_r,
    lower_gram,
    shifted_cholesky3_r,
)
from neula.algorithms.scaled_problems import ScaledProblems
from neula.algorithms.scaling import ScaledUnknowns
from neula.certificates.backward_error import Measures
from neula.certificates.bounds import lstsq_bound
from neula.certificates.forward_error import (
    ESTIMATED,
    MAX_RATE,
    least_squares_error,
    residual_ratio,
    rounded_error,
)
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
from neula.pipeline.batches import Border
from neula.pipeline.chain import Answer
from neula.pipeline.gradients import stacked_problem
from neula.pipeline.progress import stage
from neula.problems.least_squares.problem import (
    LeastSquaresAnswer,
    LeastSquaresOptions,
    LeastSquaresProblems,
    LeastSquaresSolutions,
)

Factor = Callable[..., torch.Tensor]
"""R of a batch of tall matrices, ``factor(a, over_rows=...)``."""


@dataclass(frozen=True)
class RSource:
    """A way to compute R."""

    factor: Factor
    # Whether it also takes the Gram matrix of a single A, which is computed once for all such sources.
    from_gram: bool = False
    backward_stable: bool = False  # whether no other source has a better R
    # Whether R comes from products of half-precision operands: the first steps then need no residuals in
    # twice the working precision, and few random vectors measure the rate of convergence.
    half_precision: bool = False
    narrow: bool = False  # whether A may have any dtype
    # Whether no step takes residuals in twice the working precision unless digits are requested.
    plain_residuals: bool = False

    @property
    def checked_first(self) -> bool:
        """Whether the host checks R before any step, and then launches two steps before it reads again."""
        # Problems that come to a backward stable R, the last one, often lack full rank, and then all steps
        # are in vain; so are plain ones with an R that converges slowly.
        return self.backward_stable or self.plain_residuals


SOURCES = {
    "cholesky fp32": RSource(cholesky32_r, narrow=True),
    "cholesky fp64": RSource(cholesky_r, from_gram=True),
    "shifted cholesky fp64": RSource(shifted_cholesky3_r, from_gram=True, backward_stable=True),
    "householder fp64": RSource(householder_r, backward_stable=True),
}


def system_of(
    problems: ScaledProblems,
    r: torch.Tensor,
    options: LeastSquaresOptions,
    source: RSource,
    gram: torch.Tensor | None = None,
    norms: torch.Tensor | None = None,
) -> Overdetermined:
    """A with its R, whose Gram matrix and norms of columns may be known."""
    over_rows = options.over_rows
    shape = over_rows.count(problems.a.shape[1]), problems.a.shape[2]
    doubled = options.refines_doubled(*shape, plain=source.plain_residuals)
    columns, triangles = None, None
    if are_solved(r) or problems.given or gram is not None:
        columns = (lengths(r) if norms is None else norms)[..., None]
    if are_solved(r):
        assert columns is not None
        triangles = Triangles.estimated(r, columns)
    elif columns is not None:
        # Dozens of launches that know nothing of A, which may be too large for a graph.
        inputs = (r, columns) if gram is None or gram.shape[1] < HALVED else (r, columns, gram)
        inverse, norm, bound, of_inverse = options.engine.alone.replay(_triangles, inputs, "triangles")
        triangles = Triangles(inverse, norm, bound, of_inverse)
    return Overdetermined(
        *(problems.a, r, columns, over_rows),
        low=problems.a_low,
        b_low=problems.b_low,
        doubled=doubled,
        triangles=triangles,
        rhs=problems.b if problems.given else None,
        half_precision=source.half_precision,
    )


def _triangles(*known: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return Triangles.from_factor(*known).tensors


def certified(
    problems: ScaledUnknowns,
    found: DoubledSolution,
    options: LeastSquaresOptions,
    *,
    size: Callable[[torch.Tensor], torch.Tensor],
    norms: Callable[[torch.Tensor | None], tuple[torch.Tensor, ...]],
    conditions: tuple[torch.Tensor, torch.Tensor],
    rank: int,
    doubtful: bool = False,
) -> LeastSquaresSolutions:
    """Solutions in the units and the dtype of the result, with their evidence."""
    # ``size`` is ``||D x||``. ``norms`` has those of residuals and right-hand sides in units of the scaled b,
    # where rounding moves x by so much, if at all. ``conditions`` are estimates and bounds.
    z, exact = found.x, problems.given and options.dtype == found.x.dtype
    x = z if exact else in_double(problems.unscale(z).to(options.dtype))
    lost = None if exact else z - problems.scale(x)
    rounding = torch.zeros_like(found.forward_error) if lost is None else over(size(lost), size(z))
    residual_norm, b_norm = norms(lost)
    # An error of x moves the projection of the residual by as much of ||A|| ||x||, and no more.
    of_data = torch.minimum(found.measures.backward_error, found.forward_error)
    backward_error = (of_data + rounding + found.rounding).amax(1)
    members = LeastSquaresSolutions(
        x=x,
        residual_norm=problems.residual_norm(residual_norm),
        forward_error=rounded_error(found.forward_error, rounding),
        backward_error=backward_error,
        refined_error=of_data.amax(1),
        residual=over(residual_norm, b_norm).amax(1),
        optimality=found.measures.optimality.amax(1),
        condition=conditions[0],
        condition_bound=conditions[1],
        rank=torch.full_like(backward_error, rank, dtype=torch.int64),
        doubtful=torch.full_like(backward_error, doubtful, dtype=torch.bool),
    )
    # Results and decisions are equal on all processes.
    return LeastSquaresSolutions(*options.over_rows.agreed(*members.tensors))


def measured_members(
    problems: ScaledProblems,
    system: Overdetermined,
    found: DoubledSolution,
    options: LeastSquaresOptions,
    data_error: float = 0.0,
) -> LeastSquaresSolutions:
    """Solutions of tall problems with their evidence."""
    # Residuals in working precision do not show errors below their own, which Wedin's bound may. Backward
    # errors include that of the data.
    over_rows = options.over_rows
    if data_error:
        error, optimality = found.measures.backward_error, found.measures.optimality
        found = replace(found, measures=Measures(error + data_error, optimality))

    def norms(lost: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        residual = found.residual if lost is None else found.residual + times(problems.a, lost)
        return over_rows.norms(residual, problems.b, dim=1)

    if system.doubled is None:
        ratio = residual_ratio(norms(None)[0], system.norm, system.size(found.x))
        error = least_squares_error(system.condition_bound[:, None], found.measures.backward_error, ratio)
        error = torch.minimum(found.forward_error, error).where(found.forward_error < torch.inf, torch.inf)
        found = replace(found, forward_error=error)
    conditions = system.condition, system.condition_bound
    rank = options.full_rank(over_rows.count(problems.a.shape[1]), found.x.shape[1])
    return certified(
        problems, found, options, size=system.size, norms=norms, conditions=conditions, rank=rank
    )


def summed_members(
    problem: ScaledUnknowns, system: SummedProblem, found: DoubledSolution, options: LeastSquaresOptions
) -> LeastSquaresSolutions:
    """The solution of a problem of any rank whose rows are not in memory, with its evidence."""
    # In place of the residual ``found`` has its norm, and its forward error is that in the range of the
    # coordinates.
    of, size = system.coordinates, system.size(found.x)
    ratio = residual_ratio(found.residual, of.norm, size)
    errors = found.forward_error[0], found.measures.backward_error[0], ratio[0]

    def norms(lost: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        moved = found.rounding * size + (0.0 if lost is None else system.size(lost))
        return torch.hypot(found.residual, of.norm_bound * moved), system.found.b[None]

    return certified(
        problem,
        replace(found, forward_error=of.error(found.x[0], *errors)[None]),
        options,
        size=system.size,
        norms=norms,
        conditions=(size.new_tensor([max(1.0, of.condition)]), size.new_zeros(1)),
        rank=of.rank,
        doubtful=bool(of.doubt),
    )


def solve_together(
    problems: LeastSquaresProblems,
    before: LeastSquaresAnswer | None,
    *,
    label: str,
    source: RSource,
    pace: Pace,
) -> LeastSquaresAnswer:
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
        plain = as_plain(a, b, weighted) if synchronizes else None
        if plain is not None:
            known = source.from_gram and plain[0] is problems.a and len(a) == 1
            given = as_given(*plain, source, pace, problems.gram[None] if known else None)
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


def in_one_launch(problems: LeastSquaresProblems, label: str, pace: Pace) -> LeastSquaresAnswer:
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
        members, steps = _minimum_norm(problems, source.factor, options, pace)
        return members, steps, members.measured()
    over_rows, gram, of = options.over_rows, None, {}
    if source.from_gram and problems.a.shape[2] >= HALVED:
        gram = over_rows.total(lower_gram(problems.a))
        of = {"gram": gram}
    r = source.factor(problems.a, over_rows=over_rows, **of)
    system = system_of(problems, r, options, source, gram)
    found = _refine(system, problems.b, options, pace)
    members = measured_members(problems, system, found, options)
    return members, found.steps, members.measured()


def _minimum_norm(
    problems: ScaledProblems, factor: Factor, options: LeastSquaresOptions, pace: Pace
) -> tuple[LeastSquaresSolutions, int]:
    rows, exponents = problems.with_rows()
    t = rows.a.mH
    b_transposed = (problems.a / problems.norms).mH
    r = factor(b_transposed)
    inverse, norm, norm_bound, inverse_norm = Triangles.from_factor(r, torch.ones_like(r[..., :1])).tensors
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

    def norms(lost: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        residual = found.residual if lost is None else found.residual + rows.a @ lost
        return lengths(shift(residual, exponents)), lengths(problems.b)

    members = certified(
        rows,
        found,
        options,
        size=system.size,
        norms=norms,
        conditions=(condition[:, 0], condition_bound[:, 0]),
        rank=options.full_rank(*problems.a.shape[1:]),
    )
    return members, found.steps


def _refine(
    system: FactoredProblems, b: torch.Tensor, options: LeastSquaresOptions, pace: Pace
) -> DoubledSolution:
    refinement = Refinement(system, b, options.digits, options.over_rows)
    return refinement.solved(min(MAX_STEPS, options.max_iterations), pace)


REFINED_ERROR = LeastSquaresSolutions.names.index("refined_error")

ALIKE = 4.0
"""Columns whose norms differ by less are not scaled before their products are doubled."""


def as_plain(
    a: torch.Tensor, b: torch.Tensor, options: LeastSquaresOptions
) -> tuple[torch.Tensor, torch.Tensor, LeastSquaresOptions, float] | None:
    """Tall problems whose weights and damping are in A, and the backward error of rounding weighted elements.

    None for wide problems, and for weighted and damped ones with residuals in twice the working precision.
    With columns of norm 1, what rounding changes of A has a Frobenius norm of at most ``sqrt(n) u``, and A a
    norm of at least 1.
    """
    m, n = options.over_rows.count(a.shape[1]), a.shape[2]
    weighted = options.weights is not None
    if options.is_wide(m, n):
        return None
    if not (weighted or options.damp):
        return a, b, options, 0.0
    if options.over_rows.spread or options.refines_doubled(m, n):
        return None
    plain = replace(options, weights=None, damp=0.0)
    error = n**0.5 * FP64.u if weighted else 0.0
    return *stacked_problem(a, b, options.weights, options.damp), plain, error


def as_given(
    a: torch.Tensor,
    b: torch.Tensor,
    options: LeastSquaresOptions,
    data_error: float,
    source: RSource,
    pace: Pace,
    gram: torch.Tensor | None,
) -> tuple[LeastSquaresSolutions, int, torch.Tensor] | None:
    """Factorize, refine and measure problems in numbers near 1, which most are; None for others."""
    # The norms of the columns of R tell whether numbers are near 1. A synchronous host reads that before
    # anything else. An asynchronous one has by then launched the steps, which follow a long product, and
    # their evidence, and reads all numbers at once. If R is to be checked first, it also reads before the
    # steps: with an R in half precision the rate of convergence, too.
    # Returns solutions, how many steps they took, and their measured numbers, possibly on the host.
    over_rows = options.over_rows
    doubled = options.refines_doubled(over_rows.count(a.shape[1]), a.shape[2], plain=source.plain_residuals)
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
        members = measured_members(problems, system, refinement.solution(system.settled), options, data_error)
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
    members = measured_members(problems, system, refinement.solution(), options, data_error)
    return members, refinement.steps, members.measured()


def _broken_down(
    problems: ScaledProblems, r: torch.Tensor
) -> tuple[LeastSquaresSolutions, int, torch.Tensor] | None:
    """A single problem of which nothing is known, if R broke down though numbers are near 1; else None."""
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
