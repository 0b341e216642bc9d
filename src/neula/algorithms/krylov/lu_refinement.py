"""Refining solutions with LU factors that stay around, of a matrix that they remember by reference.

Factors in a low format are as accurate as that format; with the matrix itself at hand a solution is refined
to the accuracy of its own dtype (:mod:`neula.algorithms.krylov.iterative_refinement`). Only a reference is
kept, so before each refinement the product of A with one random vector says whether it still is the same
matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
from neula.algorithms.krylov.driver import Refined
from neula.algorithms.krylov.iterative_refinement import classical, gmres_refinement, refine
from neula.algorithms.scaling import power_of_two_scales
from neula.algorithms.spectra.inverse_norm import sampled_inverse_norm
from neula.algorithms.triangular.substitution import Substitution
from neula.certificates.backward_error import Measures, Scaling, backward_error
from neula.certificates.residuals import SLOW
from neula.engines import FP64, Engine
from neula.engines.formats import double_of, matching_dtype
from neula.engines.random_vectors import gaussian
from neula.kernels.few_vectors.thin import thin_product

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
        """Whether a product with v is that of the matrix that was factorized.

        It may differ from the first one by the rounding errors of both: twice
        ``n u |A| |v|`` (Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1), and by as
        much for the sums in the bound. A smaller change passes; refinement goes for A as it is now.
        """
        if torch.equal(image, self.image):
            return
        n, change = len(self.a), (image - self.image).abs()[:, 0]
        # Products that underflow have an absolute error.
        allowed = 4 * n * FP64.u * self.row_norms + n * torch.finfo(torch.float64).tiny
        # Written so that NaN and Inf are changes.
        if not bool((change < allowed).all()):
            raise ValueError(
                "A was changed since it was factorized, so that its factors cannot refine: factorize "
                "it again, or a copy (lu_factor(A.copy())), or pass refine=False"
            )

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
    """Solve ``A x = b`` with factors of A, refined to a backward error.

    ``solver`` has the factors to solve with in single or double precision: those of A, or of A mixed by
    butterflies, the ``transform``. B, shape (n, k), is float64, on the device of the factors, with no
    exponents far from 0. Refinement aims at a quarter of the ``bound`` on backward errors. Raises a
    ValueError if A was changed since it was factorized. The result must not be used without a check of
    its numbers.
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
    # A few times the rounding errors of residuals: below, a matrix cannot be told from a singular one.
    finest = 4 * math.sqrt(len(b)) * FP64.u
    bound, solved = FIRST, None
    while True:
        solved = refine_with(
            a, b * sizes, factors, scalings=[plain, scaling], bound=bound, engine=kept.engine, start=solved
        )
        z = solved.x / sizes
        z = z if scaling.columns is None else z / scaling.columns[:, None]
        condition = float(scaling.norm) * sampled_inverse_norm(z)
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
