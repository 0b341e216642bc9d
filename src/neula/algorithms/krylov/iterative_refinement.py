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
from dataclasses import dataclass, field
from functools import partial

import torch

from neula.algorithms.elimination.factorization import Factorization
from neula.algorithms.krylov.cg import cg
from neula.algorithms.krylov.driver import BestSolutions, Evaluated, Refined, iterate, part
from neula.algorithms.krylov.gmres import Space
from neula.algorithms.spectra.inverse_norm import SharedSolves
from neula.certificates.backward_error import Measures, Scaling, backward_error
from neula.certificates.stagnation import STAGNATION, goes_on, improves
from neula.kernels.few_vectors.symmetric_product import symmetric_product

INNER_TOLERANCE = 1e-12
"""Reduction of the residual by GMRES before it is recomputed: below it, the recursive residual deviates."""

MARGIN = 0.5
"""Part of what is requested that is aimed at: norms of solutions change, and so do those of residuals."""


COLUMNS = 16
"""Right-hand sides that GMRES takes at a time: their common basis stays small compared with A."""

Companions = Generator[torch.Tensor, torch.Tensor, None]
"""Yields what is to be multiplied, or solved for, beside other vectors, and is sent what comes of it."""

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
    beside: Beside | None = None,
) -> Refined:
    """Update x until its backward error is small enough, or hardly becomes smaller, or the residual does not.

    Of a matrix that is too ill-conditioned for what solves the backward error falls while x grows, and the
    residual stays; what comes of further steps is no better. Each right-hand side ends for itself, and keeps
    the best x that it had.

    ``max_iterations`` is that of all steps; one that leaves more than the part ``stagnation`` of the error is
    the last. Without a ``start`` it begins with zero, of backward error 1. ``on_step`` is called with the
    largest backward error. ``beside`` is what the solver has solved for as well, and the first residual is to
    read A for.
    """
    norm = torch.linalg.vector_norm

    def evaluated(columns: torch.Tensor, x: torch.Tensor) -> Evaluated:
        given = part(b, columns)
        residual = given - (a @ x if beside is None else beside.multiplied(a, x))
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
class Beside:
    """Other right-hand sides, solved for together with the first residuals that GMRES reduces.

    A is read for all of them at once, and each finds what the others need as well.
    """

    b: torch.Tensor  # shape (n, m)
    reduction: float  # norm of a residual, relative to that of b, that is requested
    # Shape (n, l): right-hand sides of which nothing is asked: what slows convergence down is found sooner in
    # the spaces of several, and a GPU reads a matrix for a few vectors in the time that it takes for one.
    companions: torch.Tensor
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
class OnTheWay(Beside):
    """Products and solves that conjugate gradients make beside their own."""

    # products, solves: Yield vectors to be multiplied by A, and right-hand sides that the preconditioner is
    # to solve for, and are sent what comes of these. Until the second one ends b has no columns; after that
    # it may have some.
    products: Companions = field(kw_only=True)
    solves: Companions = field(kw_only=True)


def gmres_refinement(
    a: torch.Tensor, factors: Factorization, beside: Beside | None = None, rows: torch.Tensor | None = None
) -> UpdateSolver:
    """GMRES-based refinement: updates are solved for with the factors as right preconditioner.

    From there GMRES minimizes the residual itself, and ends where the backward error is small enough; from
    the left it has to reduce what the few tiny singular values of A dominate, further than needed and twice.
    It converges for condition numbers up to ``1/u`` times as large as classical refinement can have, u being
    the unit roundoff of the factorization (Carson and Higham, table 2.2), if nothing but the factorization
    was rounded to a low precision: where rounding errors of solves would count beside those of the factors,
    they solve in double.

    A is float64. The first call includes the right-hand sides ``beside``. Residuals are minimized in
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
        if beside is not None and beside.x is None:
            first, more = beside.b.shape[1], beside.companions.shape[1]
            last += first
            residual = torch.cat([beside.b, residual, beside.companions], 1)
            aim, none = aims.new_full((first,), MARGIN * beside.reduction), aims.new_full((more,), math.inf)
            aims = torch.cat([aim, aims, none])
        scaled = residual if rows is None else rows[:, None] * residual
        blocks = zip(scaled.split(COLUMNS, 1), aims.clamp_min(INNER_TOLERANCE).split(COLUMNS), strict=True)
        steps = [space.solve(block, aim, max_iterations) for block, aim in blocks]
        x = torch.cat([found for found, _ in steps], 1)
        if beside is not None and first:
            beside.x = x[:, :first]
        return x[:, first:last], max(iterations for _, iterations in steps)

    return solve


def _preconditioner(factors: Factorization) -> Callable[[torch.Tensor], torch.Tensor]:
    """Solves with factors; rounding errors of narrow factors act like a preconditioner that changes slightly.

    GMRES keeps what it has made of its basis, and does not notice; nor does CG, of changes by less than a
    tenth.
    """
    return (factors if factors.narrow else factors.in_double()).solve


def cg_refinement(
    a: torch.Tensor, factors: Factorization, beside: OnTheWay | None = None, scalings: Sequence[Scaling] = ()
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
    products, solves = (None, None) if beside is None else (beside.products, beside.solves)
    multiply = SharedSolves(partial(symmetric_product, a), products)
    precondition = SharedSolves(_preconditioner(factors), solves)

    def joining() -> tuple[torch.Tensor, float] | None:
        if beside is None or beside.x is not None:
            return None
        if beside.b.shape[1]:
            beside.x = torch.zeros_like(beside.b)
        elif not precondition.waits:
            return None
        return beside.b, MARGIN * beside.reduction

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
        if beside is not None:
            # Iterations may have ended before anything was ready.
            multiply.finish()
            precondition.finish()
            if x.shape[1] > k:
                beside.x = x[:, k:]
            elif beside.x is None and beside.b.shape[1]:
                beside.x = torch.zeros_like(beside.b)
        return x[:, :k], iterations

    return solve
