"""One large system through the chain: factors in low precision, refined; then better ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from neula.algorithms.elimination.butterfly import Butterflied, TwoSided, padded
from neula.algorithms.elimination.cholesky import PANEL, CholeskyFactor, NotPositiveDefiniteError, cholesky
from neula.algorithms.elimination.equilibrate import (
    Equilibrated,
    Equilibration,
    equilibrate,
    equilibrate_symmetric,
)
from neula.algorithms.elimination.factorization import (
    Factorization,
    SingularMatrixError,
    library_lu,
    mixed_lu,
)
from neula.algorithms.krylov.iterative_refinement import (
    Correction,
    Refined,
    classical,
    gmres_refinement,
    refine,
)
from neula.algorithms.krylov.refinement import STAGNATION
from neula.algorithms.scaling import binary_exponents, power_of_two_scales
from neula.certificates.backward_error import Scaling, over
from neula.certificates.bounds import solve_bound
from neula.certificates.forward_error import SURE
from neula.engines import FP64, Engine, Format
from neula.pipeline.memory import MemoryGuard
from neula.pipeline.progress import digits_done, stage
from neula.pipeline.result import Attempt
from neula.problems.systems.evidence import Evidence, column_norms
from neula.problems.systems.problem import Found, Members, Options
from neula.problems.systems.scaled import Scaled

LEADING = 256
"""Order of the leading block in which elimination without pivoting is tried before all of A."""

HARMLESS = 8.0
"""Growth in the leading block up to which A is taken for one that needs no pivoting, such as diagonally
dominant matrices (growth at most 2). Random matrices grow by hundreds there."""

SINGULAR = 0.01
"""A solution so large that the condition number must exceed this multiple of 1/u64 is left to the library's
LU in double precision: A may be singular, which factors of low precision cannot tell."""

SAFE_EXPONENT = 200
"""Elements between ``2^-200`` and ``2^200`` have products, and sums of squares, that float64 holds."""

SLOW = 0.1
"""A step of classical refinement that leaves more than this part of the error is followed by GMRES."""


@dataclass(frozen=True)
class Outcome:
    """What one attempt came to; ``doubt`` says why its answer is not to be trusted."""

    label: str
    refined: Refined | None
    growth: float = math.nan
    doubt: str = ""
    evidence: Evidence | None = None

    @property
    def error(self) -> float:
        """The largest backward error."""
        return math.inf if self.refined is None else float(self.refined.backward_error.max())


@dataclass(frozen=True)
class System:
    """A system in double precision.

    Attributes
    ----------
    a : Tensor, shape (n, n)
    b : Tensor, shape (n, k)
        With largest elements near 1.
    sizes : Tensor, shape (n,)
        Norms of the columns of A: the diagonal of D.
    scales : Equilibration
    scalings : list of Scaling
        What backward errors are measured in.
    bound : float
        Largest backward error of an answer that is accepted.
    scaled : Scaled or None
        Where it comes from if numbers are near the ends of the range.
    """

    a: torch.Tensor
    b: torch.Tensor
    sizes: torch.Tensor
    scales: Equilibration
    scalings: list[Scaling]
    bound: float
    options: Options
    b_scales: torch.Tensor
    scaled: Scaled | None = None

    @property
    def units(self) -> torch.Tensor | float:
        """Rows of the matrix that was given, relative to those of ``a``."""
        return 1.0 if self.scaled is None else self.scaled.units[0]

    def unscale(self, x: torch.Tensor) -> torch.Tensor:
        """Solutions of the system that was given."""
        x = x / self.b_scales
        return x if self.scaled is None else self.scaled.unscale(x[None])[0]

    def rescale(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`unscale`."""
        x = x if self.scaled is None else self.scaled.scale(x[None])[0]
        return x * self.b_scales

    def fill(self, engine: Engine) -> torch.Tensor:
        """The scaled matrix as the engine reads it."""
        return self.scales.fill(engine.empty(*self.a.shape, dtype=engine.operand_dtype), self.a, engine)


def solve_alone(a: torch.Tensor, b: torch.Tensor, options: Options, *, direct: bool) -> Found:
    """One system through the chain.

    Parameters
    ----------
    a : Tensor, shape (n, n)
    b : Tensor, shape (n, k)
    options : Options
    direct : bool
        Whether the library's factors in double precision were tried before.
    """
    system = _prepare(a.double(), b.double(), options)
    attempts: list[Attempt] = []
    iterations = 0
    best: tuple[tuple[bool, float, float], Outcome, Members] | None = None
    guard = MemoryGuard(a.device)
    for outcome in _links(system, guard) if not direct else [_mixed(system, FP64)]:
        if outcome.refined is None:
            attempts.append(Attempt(outcome.label, False, outcome.doubt))
            continue
        iterations += outcome.refined.iterations
        members = _members(system, outcome)
        accepted = bool(members.accepted)
        attempts.append(Attempt(outcome.label, accepted, _reason(outcome, members, system.bound)))
        # Of answers whose residual is small enough, the one with the most digits; of equals the last, whose
        # factors are the best.
        unsure = float(members.forward_error.nan_to_num(math.inf, math.inf).amax())
        merit = (not accepted, max(outcome.error, system.bound), unsure)
        if best is None or merit <= best[0]:
            best = (merit, outcome, members)
        if accepted:
            break
    attempts[:0] = [Attempt("out of memory", False, shortage) for shortage in guard.shortages]
    if best is None:
        guard.raise_if_short()
        raise ArithmeticError(f"no attempt gave a solution: {attempts[-1].reason}")
    _, outcome, members = best
    assert outcome.refined is not None
    return Found(members, attempts, outcome.label, iterations, tuple(outcome.refined.history))


def _prepare(a: torch.Tensor, b: torch.Tensor, options: Options) -> System:
    """Choose the scales, measure the norms; numbers near the ends of the range are scaled in a copy."""
    diagonal = _positive_diagonal(a) if options.positive else None
    row_norms, sizes, b_max = _norms(a, b, options)
    scaled = None
    exponents = binary_exponents(torch.cat([row_norms, sizes, b_max]).nan_to_num(math.inf)).abs().amax()
    if not bool(row_norms.isfinite().all() & sizes.isfinite().all()) or int(exponents) > SAFE_EXPONENT:
        scaled = Scaled.of(a[None], b[None])
        a, b = scaled.a[0], scaled.b[0]
        diagonal = a.diagonal() if options.positive else None
        row_norms, _, b_max = _norms(a, b, options)
        sizes = scaled.norms[0, :, 0]
    sizes = torch.where(sizes > 0, sizes, 1.0)
    # Powers of two, so that norms neither overflow nor underflow.
    b_scales = power_of_two_scales(b_max)
    if diagonal is not None:
        scales = equilibrate_symmetric(diagonal)
    else:
        scales = equilibrate(a, row_norms, options.engine)
    scalings = [Scaling(row_norms.amax())]
    if not scales.trivial:
        scalings.append(Scaling(scales.norm(a), scales.rows, scales.columns))
    bound = solve_bound(options.target, len(a))
    return System(a, b * b_scales, sizes, scales, scalings, bound, options, b_scales, scaled)


def _norms(
    a: torch.Tensor, b: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """1-norms of the rows of A, norms of its columns, largest elements of the columns of b."""
    return torch.linalg.vector_norm(a, 1, dim=1), column_norms(a), options.engine.column_max(b)


def _links(system: System, guard: MemoryGuard) -> Iterator[Outcome]:
    """Attempts, cheapest first, each computed when it is asked for."""
    options = system.options
    engine = options.engine
    formats = options.formats
    if options.positive:
        for format in dict.fromkeys([*formats, FP64]):
            with guard.attempt(f"cholesky {format.name}"):
                yield _by_cholesky(system, format)
    else:
        for format in formats:
            if options.pivot in ("none", "rbt") or not (options.is_named or engine.tuning.swaps):
                with guard.attempt(f"lu {format.name}"):
                    yield from _without_pivoting(system, format)
            if options.pivot == "partial" or _pivots(system, format):
                with guard.attempt(f"lu {format.name} with pivoting"):
                    yield _with_partial_pivoting(system, format)
    if not options.is_named:
        with guard.attempt("lu fp64 with pivoting"):
            last = _by_library(system)
            yield last
            if last.error > system.bound:
                # Elements of some matrices grow exponentially with partial pivoting, and hardly when mixed.
                yield _mixed(system, FP64)


def _pivots(system: System, format: Format) -> bool:
    """Whether LU with partial pivoting in this format belongs to the chain."""
    options = system.options
    large = len(system.a) >= options.engine.tuning.direct_pivoted or options.compute is not None
    # In double precision it is the library's.
    tuning = options.engine.tuning
    worth = tuning.pivoted_lu or tuning.has_tournaments(format)
    return worth and large and format is not FP64 and not options.is_named


def _without_pivoting(system: System, format: Format) -> Iterator[Outcome]:
    """LU without interchanges: of A where its leading block allows it, else of A mixed by butterflies.

    Butterflies make any matrix like a random one, whose elements grow by about ``n^1.5`` without pivoting:
    in half precision that leaves nothing of a matrix of more than a hundred or two columns.
    """
    options = system.options
    engine = options.engine.using(format)
    if options.pivot == "none" or (options.pivot is None and _is_harmless(system, engine)):
        factors = _factorize(system, system.fill(engine), engine, pivoting=False)
        yield _refined(system, f"lu {format.name}", factors, format)
    elif options.pivot == "rbt" or len(system.a) ** 1.5 * format.u <= 1:
        yield _mixed(system, format)


def _mixed(system: System, format: Format) -> Outcome:
    """LU without interchanges of A mixed by butterflies."""
    engine, n = system.options.engine.using(format), len(system.a)
    transform = TwoSided.random(n, system.a.device)
    # Butterflies add and subtract: in the wider precision, before anything is rounded.
    work = engine.empty(padded(n), padded(n))
    system.scales.fill(work[:n, :n], system.a, engine)
    factors = Butterflied(_factorize(system, transform.apply_(work), engine, pivoting=False), transform)
    return _refined(system, f"rbt + lu {format.name}", factors, format)


def _with_partial_pivoting(system: System, format: Format) -> Outcome:
    engine = system.options.engine.using(format)
    factors = _factorize(system, system.fill(engine), engine, pivoting=True)
    return _refined(system, f"lu {format.name} with pivoting", factors, format)


def _by_library(system: System) -> Outcome:
    """LU with partial pivoting in double precision: the last resort."""
    report = stage(system.options.progress, "factorizing in fp64")
    scales = system.scales
    a = system.a if scales.trivial else system.fill(system.options.engine.using(FP64))
    try:
        lu = library_lu(a, system.options.engine)
    except SingularMatrixError as error:
        raise np.linalg.LinAlgError(
            f"A is singular: {error} (counted from 0); neula.lstsq gives the solution of minimum norm"
        ) from None
    report(1.0)
    factors = lu if scales.trivial else Equilibrated(lu, scales)
    return _refine(system, "lu fp64 with pivoting", factors)


def _by_cholesky(system: System, format: Format) -> Outcome:
    engine, label = system.options.engine.using(format), f"cholesky {format.name}"
    report = stage(system.options.progress, f"factorizing in {format.name}")
    try:
        # In double precision there are no products to gain from: one panel is what the library does.
        panel = len(system.a) if format is FP64 else PANEL
        factors: CholeskyFactor = cholesky(system.fill(engine), engine, panel=panel)
    except NotPositiveDefiniteError as error:
        if format is FP64:
            raise np.linalg.LinAlgError(
                f"A is not positive definite: {error}; solve it with assume_a='gen'"
            ) from None
        return Outcome(label, None, doubt=str(error))
    report(1.0)
    return _refined(system, label, factors, format)


def _factorize(system: System, work: torch.Tensor, engine: Engine, *, pivoting: bool) -> Factorization:
    """LU of a working matrix, which it overwrites."""
    report = stage(system.options.progress, f"factorizing in {engine.format.name}")
    n = len(work)
    return mixed_lu(work, engine, pivoting=pivoting, on_columns=lambda done: report(done / n))


def _is_harmless(system: System, engine: Engine) -> bool:
    """Whether A seems to be one that needs no pivoting, by its leading block."""
    m = min(len(system.a), LEADING)
    scales = replace(system.scales, rows=system.scales.rows[:m], columns=system.scales.columns[:m])
    leading = scales.fill(engine.empty(m, m), system.a[:m, :m], engine)
    return mixed_lu(leading, engine, pivoting=False).growth <= HARMLESS


def _refined(system: System, label: str, factors: Factorization, format: Format) -> Outcome:
    """Refine with factors of the scaled matrix, unless growth says that they are worthless."""
    growth = factors.growth
    if not math.isfinite(growth):
        return Outcome(label, None, growth, f"a pivot vanishes, or elements overflow {format.name}")
    # Beyond 1/u, factors hold nothing but errors.
    if growth * format.u > 1 and not system.options.is_named:
        return Outcome(label, None, growth, f"elements grow by {growth:.1e}")
    outcome = _refine(system, label, Equilibrated(factors, system.scales))
    if outcome.refined is None or format is FP64:
        return outcome
    condition = _condition_at_least(system, outcome.refined)
    if condition <= SINGULAR / FP64.u:
        return outcome
    return replace(outcome, doubt=f"condition number at least {condition:.1e}: A may be singular")


def _refine(system: System, label: str, factors: Factorization) -> Outcome:
    """Classical refinement, and GMRES with the same factors where that does not do."""
    options = system.options
    # LAPACK's errors grow like the bound; a quarter of it is below them, and above those of the residual.
    target = system.bound / 4
    report = stage(options.progress, "refining")

    def run(correct: Correction, start: Refined | None, stagnation: float) -> Refined:
        return refine(
            system.a,
            system.b,
            correct,
            scalings=system.scalings,
            tolerance=target,
            max_iterations=options.max_iterations,
            stagnation=stagnation,
            start=start,
            on_step=lambda error: report(digits_done(error, target)),
        )

    correct = classical(factors)
    refined = run(correct, None, SLOW)
    by_gmres = not bool((refined.backward_error <= system.bound).all())
    if by_gmres:
        label += " + gmres"
        correct = gmres_refinement(system.a, factors, options.engine)
        refined = run(correct, refined, STAGNATION)
    if not bool((refined.backward_error < 1).all()):
        return Outcome(label, None, factors.growth, "refinement does not converge")
    evidence = Evidence.of(
        system.a,
        factors,
        system.scales,
        correct if by_gmres else None,
        options.max_iterations,
        system.sizes,
        system.scaled,
    )
    if options.forward:
        refined, forward_error = evidence.refine_forward(system.b, refined, correct, options)
        evidence = replace(evidence, measured=forward_error)
    return Outcome(label, refined, factors.growth, evidence=evidence)


def _condition_at_least(system: System, refined: Refined) -> float:
    """``||A|| ||x|| / ||b||``, a lower bound on the condition number, in the best of the scalings."""
    bounds = [scaling.condition_at_least(system.b, refined.x).max() for scaling in system.scalings]
    return float(torch.stack(bounds).min())


def _members(system: System, outcome: Outcome) -> Members:
    """The solution of one system in the user's units, with its evidence."""
    refined, evidence, options = outcome.refined, outcome.evidence, system.options
    assert refined is not None
    assert evidence is not None
    x = system.unscale(refined.x).to(options.dtype).double()
    rounding = over(evidence.size(system.rescale(x) - refined.x), evidence.size(refined.x))
    forward_error = evidence.forward_error(system.b, refined) + rounding
    good = bool((refined.backward_error <= system.bound).all()) and not outcome.doubt
    norm = torch.linalg.vector_norm
    longest = norm(system.units * system.b, dim=0) * (1 + len(system.a) * FP64.u)
    residual = refined.residual
    if options.dtype != torch.float64 or system.scaled is not None:  # x is not what was refined
        residual = residual + system.a @ (refined.x - system.rescale(x))
    good = good and bool((norm(system.units * residual, dim=0) + _hidden(system, refined.x) <= longest).all())
    return Members(
        x=x[None],
        forward_error=forward_error[None],
        backward_error=(refined.backward_error + rounding).amax()[None],
        condition=evidence.condition[None],
        growth=x.new_tensor([outcome.growth]),
        accepted=((forward_error <= SURE).all() & good)[None],
    )


def _hidden(system: System, x: torch.Tensor) -> torch.Tensor:
    """What rounding errors may hide of a residual, in the norm: ``u || |A| |x| ||``, shape (k,)."""
    coarse = FP64.u * system.scalings[0].norm * x.abs().amax(0)
    if bool((coarse <= len(system.a) * FP64.u * system.b.abs().amax(0)).all()):
        return coarse
    rows = max(1, (1 << 22) // system.a.shape[1])
    image = torch.cat([block.abs() @ x.abs() for block in system.a.split(rows)])
    return FP64.u * torch.linalg.vector_norm(system.units * image, dim=0)


def _reason(outcome: Outcome, members: Members, bound: float) -> str:
    assert outcome.refined is not None
    parts = [
        f"backward error {outcome.error:.1e} (bound {bound:.1e})",
        f"forward error {float(members.forward_error.amax()):.1e}",
        f"{outcome.refined.iterations} iterations",
        f"growth {outcome.growth:.1e}",
        outcome.doubt,
    ]
    return ", ".join(filter(None, parts))


def _positive_diagonal(a: torch.Tensor) -> torch.Tensor:
    diagonal = a.diagonal()
    bad = (diagonal <= 0).nonzero()[:, 0]
    if len(bad):
        i = int(bad[0])
        raise np.linalg.LinAlgError(
            f"A is not positive definite: A[{i}, {i}] is {float(diagonal[i])}; solve it with assume_a='gen'"
        )
    return diagonal
