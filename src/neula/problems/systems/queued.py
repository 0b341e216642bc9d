"""Systems by factors that need no pivots, launched after the host has read at most the sizes of numbers.

So a CUDA graph plays all of it back, and where matrices are too large for graphs a GPU never waits for the
host. A definite A has a Cholesky factor. Any other one is mixed by butterflies, so that LU needs no
interchanges: on an H200 one of order 1000 takes 2.2 ms, and 0.4 without. A batch is solved by normal
equations, whose Cholesky factors are computed together: a step with ``A^-1 = R^-1 R^-T A^T`` multiplies the
error by ``u cond(A)^2``. By how much errors are multiplied is measured, and with residuals in twice the
working precision x becomes as accurate as it can be: up to a condition number of some 1e6 by normal
equations, of 1e9 by mixed LU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from neula.algorithms.elimination.butterflied_lu import ButterfliedInverses
from neula.algorithms.elimination.double_cholesky import inverted_cholesky
from neula.algorithms.krylov.batched_lstsq import PROBES
from neula.algorithms.krylov.doubled_refinement import MAX_STEPS, Refinement
from neula.algorithms.krylov.one_launch import limits_of
from neula.algorithms.krylov.pace import Pace
from neula.algorithms.orthogonal.r_only import lower_gram
from neula.algorithms.triangular.inverted import InvertedBlocks
from neula.engines import Engine
from neula.engines.inputs import Inputs, layouts_of, made, nbytes_of
from neula.kernels import seminormal
from neula.pipeline.border import Border
from neula.pipeline.chain import Answer
from neula.pipeline.progress import stage
from neula.problems.systems.direct import FactoredSystems, Images, Systems, measured_as_given, members_of
from neula.problems.systems.library_factors import LibraryFactors, SymmetricallyScaled, to_factorize
from neula.problems.systems.problem import SystemsOptions, SystemsSolutions
from neula.problems.systems.scaled import ALIKE, NEAR, ScaledSystems, near_one
from neula.problems.systems.ways import MIXED

NORMAL_EQUATIONS = "cholesky of the normal equations fp64"
DEFINITE = "cholesky fp64, inverted"

QUEUED = DEFINITE, MIXED, NORMAL_EQUATIONS

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _NormalEquations:
    """``L L^T = A^T A``, to solve systems with A.

    Attributes
    ----------
    a : Tensor, shape (batch, n, n)
    lower : InvertedBlocks
    """

    a: torch.Tensor
    lower: InvertedBlocks

    @classmethod
    def from_matrix(cls, a: torch.Tensor, engine: Engine) -> _NormalEquations:
        """Of matrices that may turn out to be singular: then solutions are NaN."""
        return cls(a, inverted_cholesky(lower_gram(a), engine))

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        return self.lower.mT.solve(self.lower.solve(self.a.mT @ b))

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        return self.a @ self.lower.mT.solve(self.lower.solved(b))


def _definite(scaled: ScaledSystems, engine: Engine) -> LibraryFactors:
    """Those of matrices that may turn out not to be definite: then solutions are NaN."""
    found = SymmetricallyScaled.factorize(
        scaled, lambda a: inverted_cholesky(to_factorize(a, engine), engine)
    )
    lower = found.factor
    return found.solving(lambda b: lower.mT.solve(lower.solved(b)))


class QueuedSolutions(NamedTuple):
    """What was launched.

    Attributes
    ----------
    x : Tensor, shape (batch, n, k)
    forward_error : Tensor, shape (batch, k)
    numbers : Tensor, shape (numbers, batch)
        What the judge reads, :attr:`SystemsSolutions.names`.
    read : Tensor, optional
        The same in the memory of the host, where that has waited for it.
    factors : ButterfliedInverses, optional
        Of a matrix as it was given, where nothing was played back.
    """

    x: torch.Tensor
    forward_error: torch.Tensor
    numbers: torch.Tensor
    read: torch.Tensor | None = None
    factors: ButterfliedInverses | None = None

    @classmethod
    def from_tensors(cls, tensors: Iterable[torch.Tensor]) -> QueuedSolutions:
        """What launches have left."""
        x, forward_error, numbers = tensors
        return cls(x, forward_error, numbers)

    @property
    def members(self) -> SystemsSolutions:
        """The same as a chain has it."""
        return SystemsSolutions.from_numbers(self.x, self.numbers, forward_error=self.forward_error)


def solve_queued(
    systems: Systems, before: Answer[SystemsSolutions] | None, label: str
) -> Answer[SystemsSolutions]:
    """All systems by the factors of a label, as many at a time as fill the machine.

    Those that this does not solve are not accepted.
    """
    options, count, (n, k) = systems.options, len(systems), systems.b.shape[1:]
    size = max(1, options.engine.tuning.chunk_elements // (n * max(n, k)))
    if count <= size or _in_reach(systems, label):
        return answer_of(queued(systems, label), systems, label)
    report, parts = stage(options.progress, label), []
    for start in range(0, count, size):
        part = slice(start, start + size)
        parts.append(queued(replace(systems, a=systems.a[part], b=systems.b[part]), label))
        report(min(1.0, (start + size) / count))
    x, forward_error, numbers = zip(*(part[:3] for part in parts), strict=True)
    found = QueuedSolutions(torch.cat(x), torch.cat(forward_error), torch.cat(numbers, 1))
    return answer_of(found, systems, label)


def answer_of(found: QueuedSolutions, systems: Systems, label: str) -> Answer[SystemsSolutions]:
    """What a chain goes on from."""
    measured, steps = found.numbers if found.read is None else found.read, steps_of(systems.options)
    label, factors = label_of(systems, label), found.factors
    return Answer(found.members, label, iterations=steps, measured=measured, factors=factors)


def label_of(systems: Systems, label: str) -> str:
    """Which factors they are solved by: small ones of any kind in one launch."""
    return NORMAL_EQUATIONS if _in_reach(systems, label) else label


def queued(systems: Systems, label: str) -> QueuedSolutions:
    """All systems at once."""
    a, b, options = systems.a, systems.b, systems.options
    if _in_reach(systems, label):
        return _in_one_launch(a, b, options)
    n, engine = a.shape[-1], options.engine
    alone = len(a) == 1 and n**3 <= engine.tuning.bordered
    if not alone or engine.often((queued, n, b.shape[-1], label)):
        return _replayed((a, b), options, label)
    # One small system takes the shape of others, so that one graph serves them all.
    border = Border.around(n, n)
    found = _replayed(border.put(a, b), options, label)
    return found._replace(x=border.take(found.x))


def _in_reach(systems: Systems, label: str) -> bool:
    """Whether one launch does all that follows, and sooner than many."""
    n, k = systems.b.shape[1:]
    one_launch = 0 if label == MIXED else systems.options.engine.tuning.one_launch
    return n * n * k <= one_launch and seminormal.takes(systems.a, square=True)


def _in_one_launch(a: torch.Tensor, b: torch.Tensor, options: SystemsOptions) -> QueuedSolutions:
    """By the kernel, which leaves those alone whose rows or columns are not of one size."""
    square = seminormal.SquareSystemLimits(2.0**NEAR, 2.0**ALIKE, options.positive)
    limits = limits_of(options.digits, steps_of(options))

    def solved(a: torch.Tensor, b: torch.Tensor) -> Three:
        found = seminormal.solved(a, b, options.dtype, limits, square)
        return found.x, found.forward_error, found.numbers[: len(SystemsSolutions.names)]

    if len(a) > 1:
        return QueuedSolutions.from_tensors(solved(a, b))
    # To play even one launch back takes a host less time than its arguments do.
    return QueuedSolutions.from_tensors(
        options.engine.replay(solved, (a, b), _key(options, NORMAL_EQUATIONS, "one launch"))
    )


def _replayed(inputs: Inputs, options: SystemsOptions, label: str) -> QueuedSolutions:
    """Some systems, and what was measured of them."""
    tuning, (count, n, _) = options.engine.tuning, layouts_of(inputs)[0][0]
    # What scaling needs is half of everything, and mostly changes nothing. In a batch that would depend on
    # what the other systems are.
    alone = options.may_wait and count == 1
    if alone and n**3 <= tuning.bordered:
        if (supposed := _supposed(inputs, options, label)) is not None:
            return supposed
        alone = False
    given = ScaledSystems.as_given(*made(inputs)) if alone else None
    measured = inputs if given is None else given.tensors

    def scaled(*inputs: torch.Tensor) -> ScaledSystems:
        return (
            ScaledSystems.from_arrays(*inputs, synchronizes=False)
            if given is None
            else ScaledSystems.again(*inputs)
        )

    if options.may_wait and nbytes_of(measured) > tuning.replayed_bytes:
        # A step of what is too large for a graph takes longer than the host takes to read whether another one
        # is needed. It launches what most systems take, and the evidence, before it reads.
        steps = min(_power_of(label), options.max_iterations)
        found = _solved(scaled(*made(measured)), options, label, Pace.asynchronous(steps))
        return found if given is not None else found._replace(factors=None)

    def solved(*inputs: torch.Tensor) -> Three:
        return _solved(scaled(*inputs), options, label, _prelaunched(options))[:3]

    return QueuedSolutions.from_tensors(
        options.engine.replay(solved, measured, _key(options, label, given is None))
    )


def _supposed(inputs: Inputs, options: SystemsOptions, label: str) -> QueuedSolutions | None:
    """A small system as if its numbers were near 1, which is looked at with the answer; None if they are not.

    The host, which takes longer than a GPU here, then waits once.
    """

    def solved(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scaled, ends = ScaledSystems.supposed(*inputs)
        found = _solved(scaled, options, label, _prelaunched(options))
        return found.x, found.forward_error, torch.cat([found.numbers, ends[:, None]])

    found = QueuedSolutions.from_tensors(
        options.engine.replay(solved, inputs, _key(options, label, "supposed"))
    )
    read = found.numbers.cpu()
    known = len(SystemsSolutions.names)
    if not near_one(read[known:, 0].tolist()):
        return None
    return found._replace(numbers=found.numbers[:known], read=read[:known])


def _key(options: SystemsOptions, label: str, kind: bool | str) -> tuple[object, ...]:
    """What the launches depend on beside shapes."""
    asked = options.max_iterations, options.target.name, options.dtype, options.may_wait, options.forward
    return _solved, label, kind, options.positive, *asked


@dataclass(frozen=True)
class _OfOne:
    """Factors of a matrix as those of a batch of one."""

    factors: ButterfliedInverses

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        return self.factors.solve(b[0])[None]

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        return self.factors.solve_transposed(b[0])[None]


def _power_of(label: str) -> int:
    """Rounding errors of ``A^T r`` are magnified by the square of the condition number."""
    return 2 if label == NORMAL_EQUATIONS else 1


def _solved(scaled: ScaledSystems, options: SystemsOptions, label: str, pace: Pace) -> QueuedSolutions:
    """Factorize, refine and measure some systems."""
    engine, definite, a, sizes = options.engine, options.positive, scaled.a, scaled.norms

    def factorized() -> LibraryFactors:
        if label == MIXED:
            return _OfOne(ButterfliedInverses.factorize(a[0], sizes[0, 0, 0], engine.tuning))
        return _definite(scaled, engine) if definite else _NormalEquations.from_matrix(a, engine)

    # The first columns of factors keep few multiprocessors busy.
    images, factors = engine.beside(
        lambda: Images.from_matrix(a, sizes, vectors=PROBES, unit=label == DEFINITE), factorized
    )
    system = FactoredSystems(
        *(a, factors, sizes, scaled.b, scaled.frobenius),
        doubled=options.doubled(*scaled.b.shape[1:]),
        power=_power_of(label),
        measured=images,
    )
    refinement = Refinement(system, scaled.b, options.digits)
    refinement.advance(pace.steps, pace.steps)
    finished = pace.is_prelaunched and _spares_a_step(options)
    found = _measured(scaled, system, refinement, options, finished=finished)
    refinement.advance(pace.limit(min(MAX_STEPS, options.max_iterations)), pace.steps)
    if refinement.steps > pace.steps:
        found = _measured(scaled, system, refinement, options, finished=False)
    return QueuedSolutions(*found, factors=factors.factors if isinstance(factors, _OfOne) else None)


def _measured(
    scaled: ScaledSystems,
    system: FactoredSystems,
    refinement: Refinement,
    options: SystemsOptions,
    *,
    finished: bool,
) -> Three:
    """The same of what has been reached; where that is asked for, only what is finished is accepted."""
    factors = system.factors
    growth = factors.factors.magnified[None] if isinstance(factors, _OfOne) else None
    if scaled.given and options.dtype == torch.float64:
        found = measured_as_given(scaled, system, refinement, finished=finished)
        if growth is not None:
            found.numbers[-1] = growth
        return refinement.high, found.forward_error, found.numbers
    growth = torch.ones_like(scaled.norms[:, 0, 0]) if growth is None else growth
    members = members_of(scaled, system, refinement.solution(), growth, options)
    if finished:
        members = replace(members, doubtful=members.doubtful | refinement.active.any(1))
    return members.x, members.forward_error, members.measured()


def steps_of(options: SystemsOptions) -> int:
    """The largest number of prelaunched steps of refinement."""
    return min(options.engine.tuning.prelaunched_steps, options.max_iterations)


def _spares_a_step(options: SystemsOptions) -> bool:
    """Whether one prelaunched step less is taken, and only what is finished after it is accepted.

    All of them do for condition numbers up to 1e6, of a definite A up to 1e12. There one less does up to
    1e10, and what it leaves unfinished goes on to the library.
    """
    return options.positive and options.may_wait


def _prelaunched(options: SystemsOptions) -> Pace:
    return Pace.prelaunched(max(1, steps_of(options) - _spares_a_step(options)))
