"""Systems that are solved together, each step one launch for all of them.

The links of their chain differ in where factors come from, and in when the host reads: after every step with
the library's factors, of which some may not exist. Others need no pivots, so that a CUDA graph replays all,
and where matrices are too large for graphs a GPU never waits for the host. A definite A has a Cholesky
factor. Any other one is mixed by butterflies, so that LU needs no interchanges: on an H200 one of order 1000
takes 2.2 ms, and 0.4 without. A batch is solved by normal equations, whose Cholesky factors are computed
together: a step with ``A^-1 = R^-1 R^-T A^T`` multiplies the error by ``u cond(A)^2``. By how much errors are
multiplied is measured, and with residuals in twice the working precision x becomes as accurate as it can be:
up to a condition number of some 1e6 by normal equations, of 1e9 by mixed LU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from neula.algorithms.elimination.butterflied_lu import ButterfliedInverses
from neula.algorithms.elimination.cholesky import blocks_pay, double_cholesky, inverted_cholesky
from neula.algorithms.elimination.factorization import inverted_lu
from neula.algorithms.krylov.batched_lstsq import PROBES, limits_of
from neula.algorithms.krylov.doubled_refinement import MAX_STEPS, SYNCHRONOUS, LaunchTuning, Pace, Refinement
from neula.algorithms.krylov.factored_systems import FactoredSystems, Factors, Images
from neula.algorithms.orthogonal.r_only import lower_gram
from neula.algorithms.scaling import binary_exponents
from neula.algorithms.spectra.inverse_norm import inverse_norm, norm_of
from neula.algorithms.triangular.inverted import InvertedBlocks, InvertedTuning
from neula.certificates.forward_error import COMPUTED, ESTIMATED, MAX_RATE, rounded_error
from neula.engines import FP32, FP64, Engine, Format, format_of
from neula.engines.formats import in_double, matching_dtype
from neula.engines.graphs import Inputs, Tensors, called, made, nbytes_of
from neula.kernels.magnitudes import largest_magnitude
from neula.kernels.shift import shift
from neula.kernels.small_problems import seminormal
from neula.kernels.small_problems.refining import over
from neula.kernels.small_problems.systems import EvidenceMargins, measured_systems
from neula.pipeline.batches import Border, SingularMember
from neula.pipeline.chain import Answer, Declined
from neula.pipeline.progress import stage
from neula.problems.systems.problem import Systems, SystemsOptions, SystemsSolutions
from neula.problems.systems.system import ALIKE, NEAR, ScaledSystems, near_one
from neula.problems.systems.ways import MIXED

NORMAL_EQUATIONS = "cholesky of the normal equations fp64"
DEFINITE = "cholesky fp64, inverted"
VECTORS = 3  # random vectors that show how well factors solve; with LAPACK's that is more than is needed

Factorize = Callable[[ScaledSystems, Engine], tuple[Factors, torch.Tensor | None]]
"""Factors of scaled matrices, and how much elements have grown, shape (batch,); None where they do not."""


@dataclass(frozen=True)
class FactorSource:
    """A way to factorize the matrices of a batch."""

    label: str
    factorize: Factorize
    format: Format = FP64  # of the factors
    # Whether the host reads whether there are factors: it may raise SingularMember. Factors of other sources
    # are NaN then, and a CUDA graph can replay them.
    synchronizes: bool = False
    power: int = 1  # of the condition number, by which a solve magnifies rounding errors
    vectors: int = PROBES  # random vectors that show how well factors solve
    unit: bool = False  # whether these may be unit vectors


Solve = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Solvers:
    """Factors of the matrices of a batch, by what solves with them."""

    solve: Solve
    solve_transposed: Solve
    # The factors of the only matrix, where they are of a single one.
    of_one: ButterfliedInverses | None = None


def library_solvers(lu: torch.Tensor, pivots: torch.Tensor) -> Solvers:
    """LU factors in single or double precision, of systems in double."""
    by = partial(_by_library, lu, pivots)
    return Solvers(partial(by, adjoint=False), partial(by, adjoint=True))


def _by_library(lu: torch.Tensor, pivots: torch.Tensor, b: torch.Tensor, *, adjoint: bool) -> torch.Tensor:
    if lu.dtype == b.dtype:
        return torch.linalg.lu_solve(lu, pivots, b, adjoint=adjoint)
    # Updates in single precision would underflow, and seem to be exact.
    exponents = binary_exponents(largest_magnitude(b, 1, keepdim=True))
    found = torch.linalg.lu_solve(lu, pivots, shift(b, -exponents).to(lu.dtype), adjoint=adjoint)
    return shift(in_double(found), exponents)


def _lu(scaled: ScaledSystems, engine: Engine, *, format: Format) -> tuple[Factors, torch.Tensor]:
    """The library's, with partial pivoting."""
    lu, pivots, info = torch.linalg.lu_factor_ex(scaled.a.to(matching_dtype(format.storage, scaled.a.dtype)))
    if bool((info > 0).any()):
        place = int((info > 0).nonzero()[0, 0])
        raise SingularMember(
            place,
            f"A is singular: pivot {int(info[place]) - 1} is exactly zero (counted from 0); use "
            "neula.lstsq for the minimum-norm solution",
        )
    inverted = inverted_lu(lu, pivots, engine.tuning) if format is FP64 else None
    largest = largest_magnitude(lu, (1, 2))
    if not bool((largest > 1).all()):  # that may be one of L, whose elements are at most 1
        largest = largest_magnitude(lu.triu(), (1, 2))
    growth = over(largest.double(), largest_magnitude(scaled.a, (1, 2)))
    return inverted or library_solvers(lu, pivots), growth


def _definite(
    scaled: ScaledSystems, engine: Engine, *, factorize: Callable[[torch.Tensor, Engine], Solve]
) -> tuple[Factors, None]:
    """Cholesky factors of Hermitian matrices with rows and columns scaled symmetrically."""
    a, exponents = scaled.a, None
    if not scaled.given:  # or the diagonal is near 1: no element of a row is larger than its root
        both = scaled.symmetric()
        exponents = scaled.rows - both, scaled.columns.mT - both
        a = shift(a, exponents[0] + exponents[1].mT)
    # A GPU's library has them by columns, and copies them faster as they lie (order 12000: 19.0 ms, not 19.9)
    a = a.mH.resolve_conj() if a.is_cuda and a.stride(-1) == 1 else a
    solve = factorize(a.clone() if blocks_pay(a, engine) else a, engine)
    if exponents is None:
        return Solvers(solve, solve), None
    rows, columns = exponents

    def between(before: torch.Tensor, after: torch.Tensor) -> Solve:
        return lambda b: shift(solve(shift(b, before)), after)

    return Solvers(between(rows, columns), between(columns, rows)), None


def _cholesky(a: torch.Tensor, engine: Engine) -> Solve:
    lower, info, _ = double_cholesky(a, engine)
    singular = (info > 0).nonzero()[:, 0].tolist()
    if singular:
        place = singular[0]
        raise SingularMember(
            place,
            f"A is not positive definite: the leading minor of order {int(info[place])} is not positive; "
            "solve it with assume_a='gen'",
        )
    width = engine.tuning[InvertedTuning].width(lower.shape[-1])
    if not width:
        return partial(_by_substitution, lower)
    inverted = InvertedBlocks.from_factor(lower, lower.dtype, upper=False, width=width)
    return lambda b: inverted.mH.solve(inverted.solve(b.clone()))


def _by_substitution(lower: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``(L L^H)^-1 b``; the library's solver for both copies L each time."""
    half = torch.linalg.solve_triangular(lower, b, upper=False)
    return torch.linalg.solve_triangular(lower.mH, half, upper=True)


def check_diagonal(a: torch.Tensor) -> None:
    """Refuse matrices as given that are not positive definite at first sight."""
    diagonal = a.diagonal(dim1=1, dim2=2).real
    bad = (diagonal <= 0).nonzero()
    if len(bad):
        place, i = bad[0].tolist()
        raise SingularMember(
            place,
            f"A is not positive definite: A[{i}, {i}] is {float(diagonal[place, i])}; "
            "solve it with assume_a='gen'",
        )


def _inverted(a: torch.Tensor, engine: Engine) -> Solve:
    lower = inverted_cholesky(a, engine)
    return lambda b: lower.mH.solve(lower.solved(b))


def _normal_equations(scaled: ScaledSystems, engine: Engine) -> tuple[Factors, None]:
    """``L L^H = A^H A``, to solve systems with A."""
    a, lower = scaled.a, inverted_cholesky(lower_gram(scaled.a), engine)
    return Solvers(
        lambda b: lower.mH.solve(lower.solve(a.mH @ b)), lambda b: a @ lower.mH.solve(lower.solved(b))
    ), None


def _mixed(scaled: ScaledSystems, engine: Engine) -> tuple[Factors, torch.Tensor]:
    """LU without interchanges of one matrix mixed by butterflies."""
    found = ButterfliedInverses.factorize(scaled.a[0], scaled.norms[0, 0, 0], engine.tuning)
    solve, transposed = found.solve, found.solve_transposed
    return Solvers(lambda b: solve(b[0])[None], lambda b: transposed(b[0])[None], found), found.magnified[
        None
    ]


_library = partial(FactorSource, synchronizes=True, vectors=VECTORS, unit=True)

SOURCES = {
    source.label: source
    for source in (
        _library("lu fp64 with pivoting", partial(_lu, format=FP64)),
        _library("lu fp32 with pivoting", partial(_lu, format=FP32), FP32),
        _library("cholesky fp64", partial(_definite, factorize=_cholesky)),
        FactorSource(DEFINITE, partial(_definite, factorize=_inverted), unit=True),
        FactorSource(MIXED, _mixed),
        FactorSource(NORMAL_EQUATIONS, _normal_equations, power=2),
    )
}


REFINED = SystemsSolutions.names.index("refined_error")


class SolvedSystems(NamedTuple):
    x: torch.Tensor  # shape (batch, n, k)
    forward_error: torch.Tensor  # shape (batch, k)
    numbers: torch.Tensor  # shape (numbers, batch): what the judge reads, SystemsSolutions.names
    read: torch.Tensor | None = None  # the same in the memory of the host, where that has waited for it
    factors: ButterfliedInverses | None = None  # of a matrix as given, where nothing was replayed
    # Shape (steps + 1,): the largest backward error before each step and at the end, where the host has read
    # after each.
    history: torch.Tensor | None = None


def solve_together(
    systems: Systems, before: Answer[SystemsSolutions] | None = None, *, label: str
) -> Answer[SystemsSolutions]:
    """Solve as many systems at a time as fill the machine, with factors from one source: a launch a step."""
    # Raises SingularMember if there are no factors in double precision. Raises Declined if there are none in
    # single precision.
    source = SOURCES[label]
    options, count, (n, k) = systems.options, len(systems), systems.b.shape[1:]
    in_reach = _in_reach(systems, source)
    size = count if in_reach else max(1, options.engine.tuning.chunk_elements // (n * max(n, k)))
    report, parts = stage(options.progress, source.label), []
    for start in range(0, count, size):
        part = slice(start, start + size)
        mine = systems if size >= count else replace(systems, a=systems.a[part], b=systems.b[part])
        try:
            parts.append(_in_one_launch(mine) if in_reach else _part(mine, source))
        except SingularMember as error:
            if source.format is not FP64:
                raise Declined("a pivot vanishes") from None
            raise SingularMember(systems.place(error.place + start), error.why) from None
        report(min(1.0, (start + size) / count))
    found, steps = parts[0], steps_of(options)
    history = _worst([part.history for part in parts if part.history is not None])
    if source.synchronizes:
        steps = len(history) - 1
    if len(parts) > 1:
        x, forward_error, numbers = zip(*(part[:3] for part in parts), strict=True)
        found = SolvedSystems(torch.cat(x), torch.cat(forward_error), torch.cat(numbers, 1))
    values = SystemsSolutions.from_numbers(found.x, found.numbers, forward_error=found.forward_error)
    label, measured = NORMAL_EQUATIONS if in_reach else source.label, found.numbers
    measured = measured if found.read is None else found.read
    return Answer(values, label, "", steps, history, measured, factors=found.factors)


def _worst(histories: list[torch.Tensor]) -> tuple[float, ...]:
    """The largest backward error of all parts of a batch after each step; some parts take fewer."""
    steps = max(map(len, histories), default=0)
    padded = [torch.cat([h, h[-1:].expand(steps - len(h))]) for h in histories]
    return tuple(torch.stack(padded).amax(0).tolist()) if padded else ()


def _part(systems: Systems, source: FactorSource) -> SolvedSystems:
    a, b, options, engine = systems.a, systems.b, systems.options, systems.options.engine
    if source.synchronizes:
        if options.positive:
            check_diagonal(a)
        return _solved(ScaledSystems.from_arrays(a, b), options, source, SYNCHRONOUS)
    n, alone = a.shape[-1], len(a) == 1
    small = alone and n**3 <= engine.tuning[LaunchTuning].bordered
    # One small system takes the shape of others, so that one graph serves them all.
    shared = small and not engine.often((_part, n, b.shape[-1], source.label))
    border = Border.around(n, n) if shared else Border()
    inputs, found = border.put(a, b), None
    if options.may_wait and small:
        found = _supposed(inputs, options, source)
    if found is None:
        found = _launched(inputs, options, source, looks=options.may_wait and alone and not small)
    return found._replace(x=border.take(found.x))


def _in_reach(systems: Systems, source: FactorSource) -> bool:
    """Whether one launch does all that follows, and sooner than many."""
    n, k = systems.b.shape[1:]
    several = source.synchronizes or source.label == MIXED
    one_launch = 0 if several else systems.options.engine.tuning[LaunchTuning].one_launch
    return n * n * k <= one_launch and seminormal.takes(systems.a, square=True)


def _in_one_launch(systems: Systems) -> SolvedSystems:
    """Solve by the kernel, except systems whose rows or columns differ in size."""
    options = systems.options
    square = seminormal.SquareSystemLimits(2.0**NEAR, 2.0**ALIKE, options.positive)
    limits = limits_of(options.digits, steps_of(options))

    def solved(a: torch.Tensor, b: torch.Tensor) -> Tensors:
        found = seminormal.solved(a, b, options.dtype, limits, square)
        return found.x, found.forward_error, found.numbers[: len(SystemsSolutions.names)]

    # To replay even one launch takes a host less time than its arguments do.
    call = options.engine.replay if len(systems) == 1 else called
    x, forward_error, numbers = call(
        solved, (systems.a, systems.b), _key(options, NORMAL_EQUATIONS, "one launch")
    )
    return SolvedSystems(x, forward_error, numbers)


def _launched(inputs: Inputs, options: SystemsOptions, source: FactorSource, *, looks: bool) -> SolvedSystems:
    """Systems by launches alone, after the host has read at most the sizes of numbers."""
    # ``looks``: whether it does: what scaling needs is half of everything, and mostly changes nothing. In a
    # batch that would depend on what the other systems are.
    given = ScaledSystems.as_given(*made(inputs)) if looks else None
    scaled = partial(ScaledSystems.from_arrays, synchronizes=False) if given is None else ScaledSystems.again
    inputs = inputs if given is None else given.tensors
    if options.may_wait and nbytes_of(inputs) > options.engine.tuning.replayed_bytes:
        # A step of what is too large for a graph takes longer than the host takes to read whether another one
        # is needed. It launches what most systems take, and the evidence, before it reads.
        pace = Pace.asynchronous(min(source.power, options.max_iterations))
        return _solved(scaled(*made(inputs)), options, source, pace)

    def solved(*inputs: torch.Tensor) -> Tensors:
        return _solved(scaled(*inputs), options, source, _prelaunched(options))[:3]

    key = _key(options, source.label, given is None)
    x, forward_error, numbers = options.engine.replay(solved, inputs, key)
    return SolvedSystems(x, forward_error, numbers)


def _supposed(inputs: Inputs, options: SystemsOptions, source: FactorSource) -> SolvedSystems | None:
    """A small system as if its numbers were near 1, which is verified with the answer; None if they are not.

    The host, which takes longer than a GPU here, then waits once.
    """

    def solved(*inputs: torch.Tensor) -> Tensors:
        scaled, ends = ScaledSystems.supposed(*inputs)
        x, forward_error, numbers, *_ = _solved(scaled, options, source, _prelaunched(options))
        return x, forward_error, torch.cat([numbers, ends[:, None]])

    key, known = _key(options, source.label, "supposed"), len(SystemsSolutions.names)
    x, forward_error, numbers = options.engine.replay(solved, inputs, key)
    read = numbers.cpu()
    if not near_one(read[known:, 0].tolist()):
        return None
    return SolvedSystems(x, forward_error, numbers[:known], read[:known])


def _key(options: SystemsOptions, label: str, kind: bool | str) -> tuple[object, ...]:
    asked = options.max_iterations, options.target.name, options.dtype, options.may_wait, options.forward
    return _solved, label, kind, options.positive, *asked


def steps_of(options: SystemsOptions) -> int:
    """The largest number of prelaunched steps of refinement."""
    return min(options.engine.tuning[LaunchTuning].prelaunched_steps, options.max_iterations)


def _spares_a_step(options: SystemsOptions) -> bool:
    """Whether one prelaunched step less is taken, and only what is finished after it is accepted."""
    # All of them do for condition numbers up to 1e6, of a definite A up to 1e12. There one less does up to
    # 1e10, and what it leaves unfinished goes to the library.
    return options.positive and options.may_wait


def _prelaunched(options: SystemsOptions) -> Pace:
    return Pace.prelaunched(max(1, steps_of(options) - _spares_a_step(options)))


def _solved(
    scaled: ScaledSystems, options: SystemsOptions, source: FactorSource, pace: Pace
) -> SolvedSystems:
    engine, a, sizes, history = options.engine, scaled.a, scaled.norms, []
    # The first columns of factors keep few multiprocessors busy.
    images, (factors, growth) = engine.concurrently(
        lambda: Images.from_matrix(a, sizes, vectors=source.vectors, unit=source.unit),
        lambda: source.factorize(scaled, engine),
    )
    system = FactoredSystems(
        *(a, factors, sizes, scaled.b, scaled.frobenius, images),
        doubled=options.doubled(*scaled.b.shape[1:]),
        u=source.format.u,
        power=source.power,
    )

    def record(x: torch.Tensor, residual: torch.Tensor) -> None:
        history.append(scaled.backward_error(x, residual).amax())  # stays on the device until the end

    refinement, most = Refinement(system, scaled.b, options.digits), min(MAX_STEPS, options.max_iterations)
    first = pace.steps if pace.is_asynchronous else pace.limit(most)
    refinement.advance(first, pace.steps, record if source.synchronizes else None)
    finished = pace.is_prelaunched and _spares_a_step(options)
    found = _measured(scaled, system, refinement, growth, options, finished=finished)
    if pace.is_asynchronous:
        refinement.advance(most, pace.steps)
        if refinement.steps > pace.steps:
            found = _measured(scaled, system, refinement, growth, options, finished=False)
    alone = factors.of_one if scaled.given and isinstance(factors, Solvers) else None
    errors = torch.stack([*history, found[2][REFINED].amax()]) if history else None
    return SolvedSystems(*found, factors=alone, history=errors)


def _measured(
    scaled: ScaledSystems,
    system: FactoredSystems,
    refinement: Refinement,
    growth: torch.Tensor | None,
    options: SystemsOptions,
    *,
    finished: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Solutions as they are returned, their forward errors, and :attr:`SystemsSolutions.names` of them."""
    # ``finished``: whether those are doubtful that another step would improve.
    if scaled.given and format_of(options.dtype) is FP64:
        # Of x alone, as it is returned.
        residual = refinement.residual - scaled.a @ (refinement.update - refinement.low)
        unfinished = refinement.active if finished else torch.zeros_like(refinement.active)
        x, forward_error, numbers = (
            refinement.high,
            *measured_systems(
                *(
                    refinement.high,
                    refinement.low,
                    scaled.norms,
                    residual,
                    scaled.b,
                    refinement.left,
                    unfinished,
                ),
                *(
                    *scaled.sizes,
                    system.rate,
                    system.condition,
                    EvidenceMargins(MAX_RATE, COMPUTED, ESTIMATED),
                ),
            ),
        )
        if growth is not None:
            numbers[-1] = growth
        return x, forward_error, numbers
    found = refinement.solution()
    x = in_double(scaled.unscale(found.x).to(options.dtype))
    lost = found.x - scaled.scale(x)
    residual, rounding = found.residual + scaled.a @ lost, over(system.size(lost), system.size(found.x))
    error, condition = scaled.backward_error(found.x, found.residual), _condition(scaled, system)
    members = SystemsSolutions(
        x=x,
        forward_error=rounded_error(found.forward_error, rounding),
        doubtful=refinement.active.any(1) if finished else torch.zeros_like(condition, dtype=torch.bool),
        residual=scaled.relative_residual(residual).amax(1),
        refined_error=error.amax(1),
        backward_error=(error + rounding + found.rounding).amax(1),
        condition_bound=ESTIMATED * condition,
        condition=condition,
        growth=torch.ones_like(condition) if growth is None else growth,
    )
    return x, members.forward_error, members.measured()


def _condition(scaled: ScaledSystems, system: FactoredSystems) -> torch.Tensor:
    """Condition number of ``B = A D^-1`` with the rows of A in their own units, shape (batch,)."""
    if not scaled.has_rows:
        condition = system.condition
    else:
        # Units below the smallest normal number: singular for all that matters.
        units, factors = scaled.units, system.factors
        inverse = inverse_norm(
            factors.solve, factors.solve_transposed, scaled.norms, 1 / units, dtype=scaled.a.dtype
        )[0]
        condition = inverse * norm_of(units * scaled.a, scaled.norms)[0]
    return condition.nan_to_num(torch.inf, torch.inf).clamp_min(1.0)
