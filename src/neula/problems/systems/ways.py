"""Methods for one linear system: factors in some format, and refinement with them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch

from neula.algorithms.elimination.butterfly import Butterflied, TwoSided, padded
from neula.algorithms.elimination.cholesky import (
    SHIFT,
    FallingPivotsError,
    cholesky,
    library_cholesky,
    recursion_pays,
    working_matrices,
)
from neula.algorithms.elimination.cholesky_factor import CholeskyFactor, NotPositiveDefiniteError
from neula.algorithms.elimination.compiled import CompiledSolutions, available, solved
from neula.algorithms.elimination.equilibrate import Equilibrated
from neula.algorithms.elimination.factored import solved_by_factors
from neula.algorithms.elimination.factorization import (
    Factorization,
    Recorded,
    SingularMatrixError,
    library_lu,
    mixed_lu,
)
from neula.algorithms.krylov.driver import Refined
from neula.algorithms.krylov.iterative_refinement import (
    UpdateSolver,
    cg_refinement,
    classical,
    gmres_refinement,
    refine,
)
from neula.algorithms.triangular.inverted import InvertedTuning
from neula.certificates.forward_error import ESTIMATED, rounded_error
from neula.certificates.residuals import SLOW, STAGNATION
from neula.engines import FP32, FP64, Arithmetic, Engine, Format, format_of, select_engine
from neula.engines.formats import in_double
from neula.engines.random_vectors import gaussian
from neula.kernels.core import DTYPES
from neula.kernels.magnitudes import two_norms
from neula.kernels.polar.svd import converged_eigvalsh
from neula.kernels.small_problems.refining import over
from neula.pipeline.chain import Answer, Declined
from neula.pipeline.progress import digits_done, stage
from neula.problems.systems.evidence import COSTLY, InverseProbe, SystemEvidence, probe_on_the_way
from neula.problems.systems.problem import Systems, SystemsOptions, SystemsSolutions
from neula.problems.systems.system import HARMLESS, EquilibratedSystem

SINGULAR = 0.01
"""A solution so large that the condition number must exceed this multiple of 1/u64 is left to the library's
LU in double precision: A may be singular, which factors of low precision cannot tell."""

TOO_POOR = 3.0
"""Second smallest singular value of ``E V``, for some orthonormal random V and ``E = A (LU)^-1 - I``, beyond
which factors are too poor for GMRES: a few directions that E enlarges take as many vectors, but here it
enlarges nearly all of them. With fp16 factors of normal matrices it is 0.4 at order 16384 (17 iterations) and
1 at 32768 (27 to 31), of geometric spectra of order 16384 0.2 at condition 1e3, and 7 at 1e4, where 40
iterations do not suffice."""

MIXED = "rbt + lu fp64"
Solution = Answer[SystemsSolutions]


def lu(
    system: EquilibratedSystem, before: Solution | None, *, label: str, format: Format, krylov: bool = True
) -> Solution:
    """LU without interchanges, of A where its leading block allows it, and GMRES only if ``krylov``."""
    if system.options.pivot is None and not system.needs_no_pivoting(format):
        raise Declined
    engine = system.options.engine.using(format)
    factors = _factorize(system, system.fill(engine), engine, pivoting=False)
    return _refined(system, label, factors, format, krylov=krylov)


def mixed_by_butterflies(
    system: EquilibratedSystem, before: Solution | None, *, label: str, compute: str
) -> Solution:
    """LU without interchanges of A mixed by butterflies, where that of A itself is not tried."""
    arithmetic = Arithmetic.named(compute)
    untried = system.options.pivot is not None or arithmetic.corrected
    if not untried and system.needs_no_pivoting(arithmetic.format):
        raise Declined
    return _mixed(system, label, arithmetic)


def lu_if_harmless(systems: Systems, before: Solution | None, *, label: str, format: Format) -> Solution:
    """LU without interchanges of a large system before anything else is tried, where a few steps do."""
    system = EquilibratedSystem.from_arrays(systems.a[0], systems.b[0], systems.options)
    return lu(system, before, label=label, format=format, krylov=False)


def mixed_with_gmres(systems: Systems, before: Solution | None) -> Solution:
    """GMRES with the butterflied factors of one large system, if these are too inaccurate for refinement."""
    # A few small singular values of A add as many directions.
    factors = None if before is None else before.factors
    if factors is None or not math.isfinite(factors.growth):
        raise Declined
    system = EquilibratedSystem.from_arrays(systems.a[0], systems.b[0], systems.options)
    return replace(_refine(system, MIXED, factors, FP64), label=f"{MIXED} + gmres")


def mixed_if_unsolved(system: EquilibratedSystem, before: Solution | None) -> Solution:
    """Butterflied LU in double precision, if the library's LU does not solve the system."""
    # Elements of some matrices grow exponentially with partial pivoting, and hardly when mixed.
    if before is not None and bool(before.values.refined_error <= system.bound):
        raise Declined
    return _mixed(system, MIXED, Arithmetic(FP64))


def pivoted_lu(
    system: EquilibratedSystem, before: Solution | None, *, label: str, format: Format
) -> Solution:
    engine = system.options.engine.using(format)
    factors = _factorize(system, system.fill(engine), engine, pivoting=True)
    return _refined(system, label, factors, format)


def by_library(system: EquilibratedSystem, before: Solution | None, *, label: str) -> Solution:
    report = stage(system.options.progress, "factorizing in fp64")
    scales = system.scales
    a = system.a if scales.trivial else system.fill(system.options.engine.using(FP64))
    try:
        lu = library_lu(a, system.options.engine)
    except SingularMatrixError as error:
        raise np.linalg.LinAlgError(
            f"A is singular: {error} (counted from 0); use neula.lstsq for the minimum-norm solution"
        ) from None
    report(1.0)
    factors = lu if scales.trivial else Equilibrated(lu, scales)
    return _refine(system, label, factors, FP64)


def by_cholesky(system: EquilibratedSystem, before: Solution | None, *, label: str, compute: str) -> Solution:
    engine = system.options.engine.using(compute)
    if engine.format is not FP64 and system.smallest < SHIFT * engine.format.u:
        raise Declined(f"the smallest eigenvalue seems to be {system.smallest:.1e}")
    report = stage(system.options.progress, f"factorizing in {compute}")
    try:
        factors = _cholesky_factor(system, engine)
    except FallingPivotsError as error:
        system.foreseen.append(error.smallest)
        raise Declined(str(error)) from None
    except NotPositiveDefiniteError as error:
        if engine.format is FP64:
            raise np.linalg.LinAlgError(
                f"A is not positive definite: {error}; solve it with assume_a='gen'"
            ) from None
        raise Declined(str(error)) from None
    report(1.0)
    return _refined(system, label, factors, engine.format)


def _cholesky_factor(system: EquilibratedSystem, engine: Engine) -> CholeskyFactor:
    n, tuning = len(system.a), engine.tuning
    work = working_matrices(1, n, engine)
    system.scales.fill_lower(work[0], system.a, engine)  # no more is read, of any A
    if recursion_pays(n, engine):
        found = cholesky(work, engine, shift=SHIFT if engine.format.u > FP32.u else 0.0, give_up=True)
    else:
        found = library_cholesky(work)
    order = int(found.order)
    if order > 0:
        raise NotPositiveDefiniteError(order)
    lower, leading = found.lower[0], found.leading
    lost = None if leading is None else leading.lost(lower)
    width, rounded = tuning[InvertedTuning].width(n), engine.format.u > format_of(engine.storage).u
    return CholeskyFactor.from_factor(lower, engine.storage, width, lost, rounded=rounded)


def _mixed(system: EquilibratedSystem, label: str, arithmetic: Arithmetic) -> Solution:
    engine, n = system.options.engine.using(arithmetic), len(system.a)
    transform = TwoSided.random(n, system.a.device)
    # Butterflies add and subtract: in the wider precision, before anything is rounded.
    work = engine.empty(padded(n), padded(n))
    system.scales.fill(work[:n, :n], system.a, engine)
    factors = Butterflied(_factorize(system, transform.apply_(work), engine, pivoting=False), transform)
    return _refined(system, label, factors, engine.format)


def _factorize(
    system: EquilibratedSystem, work: torch.Tensor, engine: Engine, *, pivoting: bool
) -> Factorization:
    """LU of a working matrix, which it overwrites."""
    report = stage(system.options.progress, f"factorizing in {engine.format.name}")
    n = len(work)
    return mixed_lu(work, engine, pivoting=pivoting, on_columns=lambda done: report(done / n))


def _refined(
    system: EquilibratedSystem, label: str, factors: Factorization, format: Format, *, krylov: bool = True
) -> Solution:
    """Refine with factors of the scaled matrix, unless growth says that they are worthless."""
    growth = factors.growth
    if not math.isfinite(growth):
        raise Declined(f"a pivot vanishes, or elements overflow {format.name}")
    # Beyond 1/u, factors hold only errors.
    if growth * format.u > 1 and not system.options.named:
        raise Declined(f"elements grow by {growth:.1e}")
    return _refine(system, label, Equilibrated(factors, system.scales), format, krylov=krylov)


def _refine(
    system: EquilibratedSystem, label: str, factors: Factorization, format: Format, *, krylov: bool = True
) -> Solution:
    """Classical refinement, then CG or GMRES with the factors if it does not converge."""
    options = system.options
    factors = Recorded(factors, options.engine)
    # LAPACK's errors grow like the bound; a quarter of it is below them, and above those of the residual.
    target, report = system.bound / 4, stage(options.progress, "refining")

    def run(update: UpdateSolver, start: Refined | None, stagnation: float) -> Refined:
        return refine(
            system.a,
            system.b,
            update,
            scalings=system.scalings,
            tolerance=target,
            max_iterations=most,
            stagnation=stagnation,
            start=start,
            on_step=lambda error: report(digits_done(error, target)),
            probes=None if probe is None else probe.solved,
        )

    update, probe, refined, most = classical(factors), None, None, options.max_iterations
    large, at_a_time = len(system.a) >= COSTLY, options.engine.tuning.at_a_time
    if not (krylov and _by_krylov(system, factors)):
        refined = run(update, None, SLOW)
    elif not (options.positive or options.named) and _too_poor(system, factors):
        raise Declined("the factors are too poor for GMRES", label)
    by_gmres = refined is None or not bool((refined.backward_error <= system.bound).all())
    if by_gmres and not krylov:
        raise Declined
    if by_gmres:
        by_cg = options.positive and system.scaled is None
        label += " + cg" if by_cg else " + gmres"
        rows, sizes, dtype = system.scales.rows, system.sizes[:, None], system.a.dtype
        if by_cg:
            probe, way = probe_on_the_way(rows[:, None], sizes, dtype) if large else (None, None)
            # For less than double precision residuals that are small compared with ``||A|| ||x||`` leave no
            # digit.
            first = system.scalings if refined is None and options.target is FP64 else ()
            update = cg_refinement(system.a, factors, way, first)
        else:
            if large:
                # Room for the probe, and for a residual that is computed anew.
                unrequested = max(0, at_a_time - system.b.shape[1] - 2)
                most = most // 2 if unrequested else most  # with which half of them do, or none
                probe = InverseProbe.from_factors(factors, 1 / rows[:, None], sizes, dtype, unrequested)
            probes = None if probe is None else probe.solved
            update = gmres_refinement(system.a, factors, probes, None if system.scales.trivial else rows)
        refined = run(update, refined, STAGNATION)
    if refined is None or not bool((refined.backward_error < 1).all()):
        raise Declined("refinement does not converge", label)
    evidence = SystemEvidence.measure(
        system.a,
        factors,
        system.scales,
        update if by_gmres else None,
        options.max_iterations,
        system.sizes,
        system.scaled,
        probe,
        solved=bool((refined.backward_error <= system.bound).all()),
    )
    if options.forward:
        refined, forward_error = evidence.refine_forward(system.b, refined, update, options)
        evidence = replace(evidence, measured=forward_error)
    doubt = "" if format is FP64 else _doubt(system, refined)
    values = _members(system, refined, evidence, factors.growth)
    return Answer(values, label, doubt, refined.iterations, tuple(refined.history))


def _by_krylov(system: EquilibratedSystem, factors: Factorization) -> bool:
    """Whether CG or GMRES come first: an iteration costs as much as a step, and what is solved with it for
    the evidence costs nothing. Not where LU does without pivoting, and a few steps do (order 20000 on an
    H200: 47 ms, and 54 by GMRES; definite, 24000: 60 ms by CG, and 70).
    """
    few = system.b.shape[1] + 1 <= system.options.engine.tuning.at_a_time
    slow = system.options.positive or factors.growth > HARMLESS
    return few and slow and factors.narrow and len(system.a) >= COSTLY


def _too_poor(system: EquilibratedSystem, factors: Factorization) -> bool:
    """Whether so many directions are enlarged that GMRES would not be done with them: by one iteration."""
    n, count = len(system.a), system.options.engine.tuning.at_a_time
    v, rows = gaussian(n, count, system.a.dtype, system.a.device, seed=20021117), system.scales.rows[:, None]
    enlarged = rows * (system.a @ factors.solve(v / rows)) - v
    # Gaussian vectors are nearly orthogonal, and of norm sqrt(n).
    gram = (enlarged.mH @ enlarged / n).cpu()
    return not bool(gram.isfinite().all()) or bool(converged_eigvalsh(gram)[1] > TOO_POOR**2)


def _doubt(system: EquilibratedSystem, refined: Refined) -> str:
    """Factors in a low format cannot tell that A is singular, but the size of x may: ``||A|| ||x|| / ||b||``
    is a lower bound on the condition number, in the best of the scalings.
    """
    bounds = [scaling.condition_at_least(system.b, refined.x).max() for scaling in system.scalings]
    condition = float(torch.stack(bounds).min())
    if condition <= SINGULAR / FP64.u:
        return ""
    return f"condition number at least {condition:.1e}: A may be singular"


def _members(
    system: EquilibratedSystem, refined: Refined, evidence: SystemEvidence, growth: float
) -> SystemsSolutions:
    options = system.options
    x = in_double(system.unscale(refined.x).to(options.dtype))
    rounding = over(evidence.size(system.rescale(x) - refined.x), evidence.size(refined.x))
    forward_error = rounded_error(evidence.forward_error(system.b, refined), rounding)
    assert refined.residual is not None
    residual, norm = refined.residual, torch.linalg.vector_norm
    if format_of(options.dtype) is not FP64 or system.scaled is not None:  # x is not what was refined
        residual = residual + system.a @ (refined.x - system.rescale(x))
    return SystemsSolutions(
        x=x[None],
        forward_error=forward_error[None],
        doubtful=torch.zeros(1, dtype=torch.bool, device=x.device),
        residual=_relative_residual(system, refined.x, norm(system.units * residual, dim=0)).amax()[None],
        refined_error=refined.backward_error.amax()[None],
        backward_error=(refined.backward_error + rounding).amax()[None],
        condition_bound=ESTIMATED * evidence.condition[None],
        condition=evidence.condition[None],
        growth=torch.tensor([growth], dtype=torch.float64, device=x.device),
    )


def _relative_residual(system: EquilibratedSystem, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """``||r|| / ||b||`` with whatever rounding errors may hide of r, shape (k,)."""
    of_b = two_norms(system.units * system.b, 0)
    # No row of |A| |x| exceeds a product of norms, which is mostly little enough.
    most = over(residual + FP64.u * len(x) ** 0.5 * system.scalings[0].norm * x.abs().amax(0), of_b)
    return most if bool((most <= 1).all()) else over(residual + _hidden(system, x), of_b)


def _hidden(system: EquilibratedSystem, x: torch.Tensor) -> torch.Tensor:
    """Largest residual that rounding errors can hide: ``u || |A| |x| ||``, shape (k,)."""
    coarse = FP64.u * system.scalings[0].norm * x.abs().amax(0)
    if bool((coarse <= len(system.a) * FP64.u * system.b.abs().amax(0)).all()):
        return coarse
    rows = max(1, (1 << 22) // system.a.shape[1])
    image = torch.cat([block.abs() @ x.abs() for block in system.a.split(rows)])
    return FP64.u * two_norms(system.units * image, 0)


FORWARD = SystemsSolutions.names.index("forward_error")


@dataclass(frozen=True)
class CoreTuning:
    """Up to where the compiled core takes less time than a library."""

    core_order: int  # of systems that it factorizes itself; beyond, it uses LAPACK's factors
    core_numbers: int  # of x, of more than 32 right-hand sides; of more numbers it measures plain residuals

    def fits(self, n: int, k: int) -> bool:
        """Whether k right-hand sides of order n are few enough."""
        return n * k > 0 and (k <= 32 or n * k <= self.core_numbers)


def suits(n: int, k: int, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether there is a kernel for systems of order n with k right-hand sides, of arrays of some dtypes."""
    most = select_engine("cpu", torch.device("cpu")).tuning[CoreTuning]
    small = 0 < n <= most.core_order and most.fits(n, k)
    return small and all(dtype.to_real() in DTYPES for dtype in dtypes) and available()


def is_for_core(n: int, options: SystemsOptions) -> bool:
    """Whether systems of order n are for the core: larger ones by their factors in one step, where updates
    are not asked for until nothing is left.
    """
    named = options.pivot is not None or options.compute is not None or options.progress is not None
    here = options.engine.device.type == "cpu" and options.engine.tuning.lapack
    usual = here and not (named or options.over_rows.spread) and options.dtype.to_real() in DTYPES and n > 0
    return usual and available() and (is_small(n, options) or not options.forward)


def is_small(n: int, options: SystemsOptions) -> bool:
    """Whether the core factorizes systems of order n itself."""
    return n <= options.engine.tuning[CoreTuning].core_order


def _are_few(b: torch.Tensor, options: SystemsOptions) -> bool:
    """Whether right-hand sides are refined one by one; of more than that plain residuals are measured."""
    return options.engine.tuning[CoreTuning].fits(*b.shape[-2:])


def takes_small(a: torch.Tensor, b: torch.Tensor, options: SystemsOptions) -> bool:
    """Whether the core factorizes these systems itself, and refines their solutions."""
    return takes(a, b, options) and is_small(a.shape[-1], options) and _are_few(b, options)


def takes(a: torch.Tensor, b: torch.Tensor, options: SystemsOptions) -> bool:
    """Whether the core takes these systems; if all digits are asked for, few right-hand sides."""
    enough = _are_few(b, options) or not options.forward
    alike = a.is_complex() or not options.dtype.is_complex
    here = a.is_cpu and b.is_cpu and {a.dtype.to_real(), b.dtype.to_real()} <= {*DTYPES}
    return enough and alike and here


def by_core(
    systems: Systems, before: Answer[SystemsSolutions] | None, *, label: str, format: Format
) -> Answer[SystemsSolutions]:
    """Solutions of all systems; those that are not accepted are solved by the next link."""
    a, b, options = systems.a, systems.b, systems.options
    found = None
    if takes(a, b, options):
        found = (
            solved(a, b, options.dtype, options.digits, definite=options.positive)
            if takes_small(a, b, options)
            else _each_large(systems, format)
        )
    if found is None:
        raise Declined
    numbers, limits = found.numbers[: len(SystemsSolutions.names)], options.limits(a.shape[-1])
    accepted = limits.accept(found.evidence)
    if not accepted.any():
        raise Declined
    solved_ones: np.ndarray | slice = slice(None)
    if not accepted.all():  # of what it does not accept the core may not have measured all
        solved_ones = accepted
        numbers[FORWARD, ~accepted], found.forward_errors[~accepted] = math.inf, math.inf
    values = SystemsSolutions.from_numbers(found.x, numbers, forward_error=found.forward_errors)
    # The most updates of an accepted system, and the largest errors before, between and after.
    updates, *errors = found.numbers[found.places["updates"] :, solved_ones].max(1).tolist()
    history = (*errors[: int(updates)], errors[-1])
    return Answer(values, label, "", int(updates), history, measured=numbers, again=True)


def _each_large(systems: Systems, format: Format) -> CompiledSolutions | None:
    """Larger systems, one after the other; None where one of them has no factors."""
    found, options = [], systems.options
    for a, b in zip(systems.a, systems.b, strict=True):
        one = solved_by_factors(
            a.contiguous(),
            b,
            options.dtype,
            single=format is FP32,
            definite=options.positive,
            doubled=_are_few(b, options),
        )
        if one is None:
            return None
        found.append(one)
    return CompiledSolutions.joined(found)
