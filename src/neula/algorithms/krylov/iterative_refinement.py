"""Iterative refinement of the solution of ``A x = b``, stopped by the measured backward error.

Carson and Higham, "Accelerating the Solution of Linear Systems by Iterative Refinement in Three Precisions",
SIAM J. Sci. Comput. 40, 2018, algorithm 1.1. The precision of the factorization is whatever the factors have;
solutions and residuals are float64. A residual in the working precision of float64 data gives a normwise
backward error of the order of its unit roundoff at any condition number that the factors can stand; only a
small forward error would need residuals in twice the precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import cast

import torch

from neula.algorithms.elimination.butterfly import Butterflied, TwoSided
from neula.algorithms.elimination.equilibrate import UNIFORM, Equilibrated, Equilibration, scaled_rows
from neula.algorithms.elimination.factorization import (
    Factorization,
    MixedLU,
    Multiplied,
    Recorded,
    Transposed,
)
from neula.algorithms.elimination.lu import PackedLU
from neula.algorithms.krylov.driver import BestSolutions, Evaluated, Refined, iterate, part
from neula.algorithms.krylov.gmres import Space, cg
from neula.algorithms.scaling import power_of_two_scales
from neula.algorithms.spectra.inverse_norm import SharedSolves, sampled_inverse_norm
from neula.algorithms.triangular.substitution import Substitution
from neula.certificates.backward_error import Measures, Scaling, backward_error
from neula.certificates.residuals import SLOW, STAGNATION, goes_on, improves
from neula.engines import FP64, Engine
from neula.engines.formats import double_of, matching_dtype
from neula.engines.random_vectors import gaussian
from neula.kernels.few_vectors.thin import thin_product

INNER_TOLERANCE = 1e-12
"""Reduction of the residual by GMRES before it is recomputed: below it, the recursive residual deviates."""

MARGIN = 0.5
"""Part of what is requested that is aimed at: norms of solutions change, and so do those of residuals."""


COLUMNS = 16
"""Right-hand sides that GMRES takes at a time: their common basis stays small compared with A."""

Requests = Generator[torch.Tensor, torch.Tensor, None]
"""Yields vectors to multiply, or to solve for, together with others, and is sent the results."""

UpdateSolver = Callable[[torch.Tensor, float, int], tuple[torch.Tensor, int]]
"""Solves ``A d = r`` for the columns of r until residuals are as much smaller as requested, if it can, in at
most so many iterations; returns d and the iterations."""


def refine(
    a: torch.Tensor,
    b: torch.Tensor,
    solver: UpdateSolver,
    *,
    scalings: Sequence[Scaling],
    tolerance: float,
    max_iterations: int,
    stagnation: float = STAGNATION,
    start: Refined | None = None,
    on_step: Callable[[float], None] | None = None,
    probes: ProbeSystems | None = None,
) -> Refined:
    """Update x until its backward error is small enough, or hardly becomes smaller, or the residual does not.

    Of a matrix that is too ill-conditioned for what solves the backward error falls while x grows, and the
    residual stays; what comes of further steps is no better. Each right-hand side ends for itself, and keeps
    the best x that it had.

    ``max_iterations`` is that of all steps; one that leaves more than the part ``stagnation`` of the error is
    the last. Without a ``start`` it begins with zero, of backward error 1. ``on_step`` is called with the
    largest backward error. ``probes`` is what the solver has solved for as well, and the first residual is to
    read A for.
    """
    norm = torch.linalg.vector_norm

    def evaluated(columns: torch.Tensor, x: torch.Tensor) -> Evaluated:
        given = part(b, columns)
        residual = given - (a @ x if probes is None else probes.multiplied(a, x))
        errors = backward_error(scalings, given, x, residual)
        return Evaluated((x, residual), torch.stack([errors, norm(residual, dim=0)]))

    def update(best: BestSolutions, columns: torch.Tensor, left: int) -> tuple[Evaluated, int]:
        x, residual = (part(v, columns) for v in best.vectors)
        step, taken = solver(residual, tolerance / float(best.errors[0, columns].max()), left)
        return evaluated(columns, x + step), taken

    def worth_it(errors: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        goes = goes_on(errors[0], before[0], tolerance, stagnation=stagnation)
        return goes & improves(errors[1], before[1])

    if start is None:
        error = (b != 0).any(0).double()
        start = Refined(torch.zeros_like(b), Measures(error, error), residual=b)
    assert start.residual is not None
    numbers = torch.stack([start.backward_error, norm(start.residual, dim=0)])
    first, history = Evaluated((start.x, start.residual), numbers), list(start.history)
    found = iterate(first, update, worth_it, max_iterations=max_iterations - start.iterations)
    best = next(found)
    for best in found:
        history.append(float(best.errors[0].max()))
        if on_step is not None:
            on_step(history[-1])
    error, (x, residual) = best.errors[0].to(b.device), best.vectors
    iterations = start.iterations + best.iterations
    return Refined(x, Measures(error, error), residual=residual, iterations=iterations, history=history)


def classical(factors: Factorization) -> UpdateSolver:
    """Refinement as Wilkinson had it: an update is one solve with the factors."""
    return lambda residual, *_: (factors.solve(residual), 1)


@dataclass
class ProbeSystems:
    """Other right-hand sides, solved for together with the first residuals that GMRES reduces.

    A is read for all of them at once, and each finds what the others need as well.
    """

    b: torch.Tensor  # shape (n, m)
    reduction: float  # norm of a residual, relative to that of b, that is requested
    # Shape (n, l): right-hand sides of which nothing is asked: what slows convergence down is found sooner in
    # the spaces of several, and a GPU reads a matrix for a few vectors in the time that it takes for one.
    unrequested: torch.Tensor
    along: torch.Tensor | None = None  # shape (n, j): vectors whose images are wanted as well
    x: torch.Tensor | None = None  # shape (n, m): solutions, as soon as GMRES has been called
    # image, along_image: A times these, and times what is along, as soon as A has been read for a residual
    # after that.
    image: torch.Tensor | None = None
    along_image: torch.Tensor | None = None

    def multiplied(self, a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``A X``, and the images if they are still missing."""
        if self.x is None or self.image is not None:
            return a @ x
        along = x[:, :0] if self.along is None else self.along
        sizes = [y.shape[1] for y in (x, self.x, along)]
        product, self.image, image = (a @ torch.cat([x, self.x, along], 1)).split(sizes, 1)
        self.along_image = image if self.along is not None else self.along_image
        return product


@dataclass
class ConcurrentProbes(ProbeSystems):
    """Products and solves in addition to those of conjugate gradients."""

    # products, solves: Yield vectors to be multiplied by A, and right-hand sides that the preconditioner is
    # to solve for, and are sent what comes of these. Until the second one ends b has no columns; after that
    # it may have some.
    products: Requests = field(kw_only=True)
    solves: Requests = field(kw_only=True)


def gmres_refinement(
    a: torch.Tensor,
    factors: Factorization,
    probes: ProbeSystems | None = None,
    rows: torch.Tensor | None = None,
) -> UpdateSolver:
    """GMRES-based refinement: updates are solved for with the factors as right preconditioner.

    From there GMRES minimizes the residual itself, and ends where the backward error is small enough; from
    the left it has to reduce what the few tiny singular values of A dominate, further than needed and twice.
    It converges for condition numbers up to ``1/u`` times as large as classical refinement can have, u being
    the unit roundoff of the factorization (Carson and Higham, table 2.2), if only the factorization
    was rounded to a low precision: where rounding errors of solves would count next to those of the factors,
    they solve in double.

    A is float64. The first call includes the right-hand sides ``probes``. Residuals are minimized in
    equations with the scales ``rows``, shape (n,), if not as they are.
    """
    precondition = _preconditioner(factors)
    if rows is None:
        space = Space(lambda z: a @ z, precondition)
    else:
        scales = rows[:, None]
        space = Space(lambda z: scales * (a @ z), lambda v: precondition(v / scales))

    def solve(residual: torch.Tensor, reduction: float, max_iterations: int) -> tuple[torch.Tensor, int]:
        aims = torch.full(residual.shape[1:], MARGIN * reduction, dtype=torch.float64, device="cpu")
        first, last = 0, residual.shape[1]
        if probes is not None and probes.x is None:
            first, more = probes.b.shape[1], probes.unrequested.shape[1]
            last += first
            residual = torch.cat([probes.b, residual, probes.unrequested], 1)
            aim, none = aims.new_full((first,), MARGIN * probes.reduction), aims.new_full((more,), math.inf)
            aims = torch.cat([aim, aims, none])
        scaled = residual if rows is None else rows[:, None] * residual
        blocks = zip(scaled.split(COLUMNS, 1), aims.clamp_min(INNER_TOLERANCE).split(COLUMNS), strict=True)
        steps = [space.solve(block, aim, max_iterations) for block, aim in blocks]
        x = torch.cat([found for found, _ in steps], 1)
        if probes is not None and first:
            probes.x = x[:, :first]
        return x[:, first:last], max(iterations for _, iterations in steps)

    return solve


def _preconditioner(factors: Factorization) -> Callable[[torch.Tensor], torch.Tensor]:
    """Solves with factors; rounding errors of narrow factors act like a preconditioner that changes slightly.

    GMRES keeps what it has made of its basis, and does not notice; nor does CG, of changes by less than a
    tenth.
    """
    return (factors if factors.narrow else factors.in_double()).solve


def cg_refinement(
    a: torch.Tensor,
    factors: Factorization,
    probes: ConcurrentProbes | None = None,
    scalings: Sequence[Scaling] = (),
) -> UpdateSolver:
    """Refinement with conjugate gradients, for a symmetric positive definite A and Cholesky factors of it.

    Higham and Pranesh, "Exploiting Lower Precision Arithmetic in Solving Symmetric Positive Definite Linear
    Systems and Least Squares Problems", SIAM J. Sci. Comput. 43, 2021, section 3: in practice as many
    iterations as GMRES, each without a basis to keep.

    Scalings are given where it begins with the zero vector: it ends as soon as backward errors in these are
    as small as requested, in the norms of the x that is there by then. Of a residual relative to b alone too
    much may be asked, or so little that a second call has to follow.
    """
    from_zero = bool(scalings)
    products, solves = (None, None) if probes is None else (probes.products, probes.solves)
    multiply = SharedSolves(a.matmul, products)
    precondition = SharedSolves(_preconditioner(factors), solves)

    def joining() -> tuple[torch.Tensor, float] | None:
        if probes is None or probes.x is not None:
            return None
        if probes.b.shape[1]:
            probes.x = torch.zeros_like(probes.b)
        elif not precondition.waits:
            return None
        return probes.b, MARGIN * probes.reduction

    def solve(residual: torch.Tensor, reduction: float, max_iterations: int) -> tuple[torch.Tensor, int]:
        nonlocal from_zero
        error = partial(backward_error, scalings, residual) if from_zero else None
        aim, k = MARGIN * reduction, residual.shape[1]
        x, iterations = cg(
            *(multiply, precondition, residual),
            tolerance=aim if from_zero else max(aim, INNER_TOLERANCE),
            max_iterations=max_iterations,
            late=joining,
            error=error,
        )
        from_zero = False
        if probes is not None:
            # Iterations may have ended before anything was ready.
            multiply.finish()
            precondition.finish()
            if x.shape[1] > k:
                probes.x = x[:, k:]
            elif probes.x is None and probes.b.shape[1]:
                probes.x = torch.zeros_like(probes.b)
        return x[:, :k], iterations

    return solve


MAX_ITERATIONS = 100
"""Solves with the factors, at most, for one solution."""

PROBES = 8
"""Random right-hand sides from whose solutions the norm of the inverse is estimated: where one singular value
dominates it, to a third at least in 99.8% of all cases, to a tenth practically always."""

CLEAR, BLURRED = 1e-3, 0.1
"""Condition number times backward error of the solutions behind its estimate: what is aimed at, and from
where the estimate cannot be distinguished from that of a singular matrix."""

FIRST = 1e-8
"""Backward error of these solutions that is requested before anything is known of the condition number: GMRES
is hardly slower than with less, since most of its iterations go by before residuals fall."""

FAR = 500
"""Binary exponent of the largest element, up or down, from which A or b is scaled before norms are taken."""


@dataclass(frozen=True)
class ScaledOperator:
    """``scale A`` as something that multiplies float64 vectors: A stays in its dtype, and is not copied."""

    a: torch.Tensor  # shape (n, n)
    scale: float = 1.0  # a power of four

    def __matmul__(self, x: torch.Tensor) -> torch.Tensor:
        if self.a.is_conj():  # conjugates of vectors cost less than that of A
            return (replace(self, a=self.a.conj()) @ x.conj().resolve_conj()).conj().resolve_conj()
        half = self.scale**0.5  # neither x nor its image leaves the range
        return thin_product(self.a, x) if half == 1.0 else half * thin_product(self.a, half * x)


@dataclass(frozen=True)
class Conditioning:
    """Scalings of A and sensitivity of solutions, found once for all right-hand sides."""

    # Scalings of backward errors: that of A, and of A with equilibrated rows and columns if these differ
    # much.
    scalings: list[Scaling]
    # Estimate of ||A|| ||A^-1|| in the last of the scalings, in the infinity norm and the 2-norm: by as much
    # relative errors of A in the infinity norm change vectors of many elements of one size.
    condition: float
    # Whether the estimate can be trusted. Otherwise this is a lower bound of the condition number, because
    # solutions with these factors have too large backward errors.
    known: bool


@dataclass(eq=False)
class KeptMatrix:
    """A matrix that was factorized, by reference, with a check that it has not changed since."""

    a: torch.Tensor  # shape (n, n): in its own dtype, on its own device: in the memory of the user's array
    engine: Engine  # on whose device everything else is
    scale: float  # power of two by which A is multiplied, so that norms neither overflow nor underflow
    image: torch.Tensor  # shape (n, 1): scale A v for a fixed random v
    adjoint: bool = False  # whether it is the conjugate transpose of what was factorized
    # Measured at the first refinement.
    conditioning: Conditioning | None = field(default=None, init=False, repr=False)

    @classmethod
    def from_matrix(cls, a: torch.Tensor, largest: float, engine: Engine) -> KeptMatrix:
        """Remember A, shape (n, n), with its largest magnitude and the engine of its factorization."""
        exponent = math.frexp(largest)[1]
        scale = 1.0 if abs(exponent) < FAR else 2.0 ** math.copysign(FAR + 100, -exponent)
        here = a.to(engine.device)
        v = direction(len(a), engine.device).to(double_of(a.dtype))
        return cls(a, engine, scale, ScaledOperator(here, scale) @ v)

    @classmethod
    def from_adjoint(cls, of: KeptMatrix) -> KeptMatrix:
        """The conjugate transpose of a matrix that is kept."""
        found = replace(of, a=of.a.mH, adjoint=not of.adjoint)
        found.image = found._products() @ found.direction
        return found

    @property
    def direction(self) -> torch.Tensor:
        """The fixed random v."""
        v = direction(len(self.a), self.engine.device)
        return v.to(torch.complex128) if self.a.is_complex() else v  # microseconds count

    @cached_property
    def row_norms(self) -> torch.Tensor:
        """1-norms of the rows of ``scale A``, shape (n,), float64."""
        here = self.a.to(self.engine.device)
        scaled = here if self.scale == 1.0 else here * self.scale
        return torch.linalg.vector_norm(scaled, 1, dim=1, dtype=double_of(scaled.dtype))

    def check(self) -> None:
        """Raise a ValueError if A is not what it was."""
        self.products()

    def products(self) -> ScaledOperator:
        """``scale A`` on the device of the engine, if A is what it was, else a ValueError."""
        products = self._products()
        self._check(products @ self.direction)
        return products

    def images(self, x: torch.Tensor) -> torch.Tensor:
        """``scale A x``, if A is what it was (else a ValueError): both in one pass."""
        images = self._products() @ torch.cat([self.direction, x], 1)
        self._check(images[:, :1])
        return images[:, 1:]

    def _products(self) -> ScaledOperator:
        return ScaledOperator(self.a.to(self.engine.device), self.scale)

    def _check(self, image: torch.Tensor) -> None:
        if not torch.equal(image, self.image) and not bool(is_same(image, self.image, self.row_norms)):
            raise ValueError(CHANGED)

    def conditioned(self, factors: Factorization) -> Conditioning:
        """Scalings of A and sensitivity of solutions, measured with its factors the first time."""
        self.conditioning = self.conditioning or _conditioning(self, self.products(), factors)
        return self.conditioning

    def scalings(self, a: ScaledOperator) -> list[Scaling]:
        """The scalings in which backward errors of ``scale A`` are measured, as in :func:`neula.solve`."""
        rows = power_of_two_scales(self.row_norms)
        blocks = scaled_rows(a.a, rows * self.scale)
        column_max = torch.stack([self.engine.column_max(block) for block in blocks]).amax(0)
        columns = power_of_two_scales(column_max)
        plain = Scaling(self.row_norms.amax())
        if all(bool(scales.amin() >= UNIFORM * scales.amax()) for scales in (rows, columns)):
            return [plain]
        of_columns = power_of_two_scales(self.scale * self.engine.column_max(a.a).double())
        # Errors of x are relative to columns of A of norm 1, whatever its rows are.
        scaled = (torch.ones_like(rows), of_columns), (rows, columns)
        norms = (Equilibration(r * self.scale, c, trivial=False).norm(a.a) for r, c in scaled)
        return [plain, *(Scaling(norm, *scales) for norm, scales in zip(norms, scaled, strict=True))]


CHANGED = (
    "A was changed since it was factorized, so that its factors cannot refine: factorize "
    "it again, or a copy (lu_factor(A.copy())), or pass refine=False"
)


def is_same(image: torch.Tensor, before: torch.Tensor, row_norms: torch.Tensor) -> torch.Tensor:
    """Whether products with v, shape (..., n, 1), are those of what was factorized, shape (...).

    They may differ from the first ones by the rounding errors of both: twice ``n u |A| |v|`` (Higham,
    "Accuracy and Stability of Numerical Algorithms", section 3.1), and by as much for the sums in the bound.
    A smaller change passes; refinement goes for A as it is now.
    """
    n, change = image.shape[-2], (image - before).abs()[..., 0]
    # Products that underflow have an absolute error. Written so that NaN and Inf are changes.
    return (change < 4 * n * FP64.u * row_norms + n * torch.finfo(torch.float64).tiny).all(-1)


@dataclass(frozen=True)
class KeptLU(MixedLU):
    """LU factors that keep what solving in double precision takes from one refinement to the next."""

    double: Callable[[], Substitution] = field(kw_only=True)

    def in_double(self) -> MixedLU:
        return MixedLU(self.double(), self.growth)


@dataclass(frozen=True)
class RefinedSolution:
    """A solution with its evidence."""

    x: torch.Tensor  # shape (n, k): float64
    backward_error: float  # the largest of all right-hand sides
    condition: float  # condition number of A: estimated, or what a solution says that it is at least
    known: bool  # whether it is not much larger than that


def refined_solution(
    kept: KeptMatrix,
    packed: PackedLU,
    solver: Callable[[torch.dtype], Substitution],
    transform: TwoSided | None,
    b: torch.Tensor,
    bound: float,
) -> RefinedSolution:
    """Solve ``A x = b`` with factors of A, refined to a quarter of the ``bound`` on backward errors.

    ``solver`` has the factors to solve with in single or double precision: those of A, or of A mixed by
    butterflies, the ``transform``. Raises a ValueError if A was changed since it was factorized. The result
    is not to be believed without a look at its numbers.
    """
    factors = _factors_of(kept, packed, solver, transform)
    known = kept.conditioned(factors)
    refined = None
    if packed.storage.u <= bound:  # then one solve is mostly all
        x = factors.solve(b)
        residual = b - kept.images(x)
        error = backward_error(known.scalings, b, x, residual)
        refined = Refined(x, Measures(error, error), residual=residual, iterations=1)
    if refined is None or not bool((refined.backward_error <= bound).all()):
        refined = refine_with(
            kept.products(),
            b,
            factors,
            scalings=known.scalings,
            bound=bound,
            engine=kept.engine,
            start=refined,
        )
    at_least = [scaling.condition_at_least(b, refined.x).amax() for scaling in known.scalings]
    return RefinedSolution(
        x=refined.x,
        backward_error=float(refined.backward_error.amax()),
        condition=max(known.condition, float(torch.stack(at_least).amin())),
        known=known.known,
    )


def refine_with(
    a: ScaledOperator,
    b: torch.Tensor,
    factors: Factorization,
    *,
    scalings: Sequence[Scaling],
    bound: float,
    engine: Engine,
    start: Refined | None = None,
) -> Refined:
    """Classical refinement, followed by GMRES with these factors where it does not converge.

    Right-hand sides, float64, shape (n, k), have largest elements near 1. A quarter of the ``bound`` is aimed
    at, from the solutions ``start``, or zero.
    """
    # Refinement does nothing with A but multiply by it.
    matrix = cast(torch.Tensor, a)
    run = partial(refine, matrix, b, scalings=scalings, tolerance=bound / 4, max_iterations=MAX_ITERATIONS)
    refined = run(classical(factors), start=start, stagnation=SLOW)
    if bool((refined.backward_error <= bound).all()):
        return refined
    return run(gmres_refinement(matrix, Recorded(factors, engine)), start=refined)


def _factors_of(
    kept: KeptMatrix,
    packed: PackedLU,
    solver: Callable[[torch.dtype], Substitution],
    transform: TwoSided | None,
) -> Factorization:
    """Factors of ``scale A``; right-hand sides are brought to the range in which they solve, if need be.

    In double precision they stay in that of ``scale A``: pivots of A may have no reciprocals.
    """
    double = double_of(packed.lu.dtype)
    substitution = solver(double if packed.lu.dtype == double else matching_dtype(torch.float32, double))
    # The growth, which takes a pass over the factors, is not needed.
    factors: Factorization = KeptLU(substitution, math.nan, double=lambda: solver(double))
    if transform is not None:
        factors = Butterflied(factors, transform)
    if substitution.dtype == double:
        factors = factors if kept.scale == 1.0 else Multiplied(factors, kept.scale)
    else:
        ones = torch.ones(len(kept.a), dtype=torch.float64, device=kept.engine.device)
        factors = Equilibrated(factors, Equilibration(ones, ones / kept.scale, trivial=True))
    return Transposed(factors) if kept.adjoint else factors


def _conditioning(kept: KeptMatrix, a: ScaledOperator, factors: Factorization) -> Conditioning:
    """Solve for random right-hand sides, only as accurately as the condition number that they show demands.

    Solutions are those of matrices that differ from A by their backward error. If A is singular, such a
    matrix has a condition number of about the reciprocal of that error; one that is far smaller is that of A.
    """
    scalings = kept.scalings(a)
    plain, scaling = scalings[0], scalings[-1]
    n = len(kept.a)
    b = gaussian(n, PROBES, double_of(kept.a.dtype), kept.engine.device, seed=n)
    if scaling.rows is not None:
        b = b / scaling.rows[:, None]
    sizes = power_of_two_scales(b.abs().amax(0))
    # A few times the rounding errors of residuals: nothing finer can be told from a singular matrix.
    finest = 4 * math.sqrt(len(b)) * FP64.u
    bound, solved = FIRST, None
    while True:
        solved = refine_with(
            a, b * sizes, factors, scalings=[plain, scaling], bound=bound, engine=kept.engine, start=solved
        )
        z = solved.x / sizes
        z = z if scaling.columns is None else z / scaling.columns[:, None]
        condition = float(scaling.norm * sampled_inverse_norm(z))
        # It is not a number where refinement failed from the start, and all of Z is zero.
        condition = condition if condition > 1 else 1.0
        error = float(solved.backward_error.amax())
        needed = CLEAR / condition
        if error <= needed or error > bound or bound <= finest:
            return Conditioning(scalings, condition, condition * error < BLURRED)
        bound, solved = max(needed, finest), replace(solved, iterations=0)


@lru_cache(maxsize=16)
def direction(n: int, device: torch.device) -> torch.Tensor:
    """A fixed random vector, shape (n, 1), of magnitudes in [1/2, 1]: no change of one element is hidden."""
    generator = torch.Generator("cpu").manual_seed(n)
    r = 2 * torch.rand(n, 1, generator=generator, dtype=torch.float64, device="cpu") - 1
    return ((r + torch.copysign(torch.ones_like(r), r)) / 2).to(device)
