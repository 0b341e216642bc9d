"""Least squares with a preconditioner: R of a fast factorization, and iterations that it makes few."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch.nn import functional

from neula.algorithms.krylov.cgls import Stop, cgls
from neula.algorithms.krylov.craig import refine_minimum_norm
from neula.algorithms.krylov.operators import LeastSquaresOperator
from neula.algorithms.krylov.refine_forward import ExactProblem, refine_forward
from neula.algorithms.krylov.refinement import INNER_REDUCTION, InnerSolver, Refined, refine
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.scaling import power_of_two_scales, shift
from neula.algorithms.spectra.condition import (
    expected_decay,
    extreme_singular_values,
    multiply_r,
    solve_r,
)
from neula.algorithms.spectra.gram import gram_r
from neula.algorithms.triangular.triangular import BlockTriangular
from neula.algorithms.triangular.triangular import UpperTriangular as Triangular
from neula.certificates.backward_error import Scale
from neula.certificates.forward_error import least_squares_error, residual_ratio
from neula.engines import FP16
from neula.pipeline.inputs import check_finite
from neula.pipeline.progress import digits_done, stage
from neula.problems.least_squares.problem import Options
from neula.problems.least_squares.scaled import ScaledProblems

PROBE_ERROR = 1e-5
"""Error in a problem with known solution above which A may lack full rank. A null direction of A loses its
random component, of size ``1/sqrt(n)``; a matrix of full rank is solved to ``u cond(A)``."""

FP16_GRAM_CONDITION = 300.0
"""A larger condition number of its R says that the Gram matrix is too coarse in fp16. Its rounding errors are
random and much smaller than ``cond^2 u``, but one with error correction costs no more than a few iterations.
"""

FP16_DECAY = 128.0
"""A diagonal of R that will fall by more, ``1 / (16 u)``, gives a QR in fp16 up half-way. With a geometric
spectrum that is a condition number of 2000, and the forty iterations or so that it would need take as long as
a better R (on an H200)."""

DOUBTFUL_ITERATIONS = 12
"""What an R in fp16 with a condition number above ``1/u`` is given: its small singular values are mostly
rounding errors. A few of them cost a few iterations, many of them more than a better R takes."""

ESTIMATED = 3.0
"""Factor between an estimate of a condition number by some steps of the power method and a bound on it."""

INEXACT = 1.05
"""For norms of columns that are those of an R in a low precision."""

ALIKE = 4.0
"""Columns of a wide matrix whose norms differ by less have nearly the condition number of the matrix with
normalized columns."""


@dataclass(frozen=True)
class Outcome:
    """What one attempt came to.

    Attributes
    ----------
    label : str
    refined : Refined or None
        In the units of :class:`Problem`.
    rank : int
    doubt : str
        Why its rank is not to be trusted, or why there is no solution.
    scale : Scale or None
        What errors were measured in.
    smallest : float
        Smallest singular value of B, estimated from above.
    sizes : Tensor or None
        Norms of the columns of A: the diagonal of D.
    spread : float
        By how much norms of ``D x`` may exceed those that backward errors refer to.
    """

    label: str
    refined: Refined | None
    rank: int
    doubt: str = ""
    scale: Scale | None = None
    smallest: float = math.nan
    sizes: torch.Tensor | None = None
    spread: float = 1.0

    def size(self, x: torch.Tensor) -> torch.Tensor:
        """``||D x||``, shape (k,)."""
        assert self.sizes is not None
        return torch.linalg.vector_norm(x * self.sizes[:, None], dim=0)

    @property
    def condition(self) -> float:
        """Condition number of B, estimated."""
        if self.scale is None or not self.smallest > 0:
            return math.inf
        return max(1.0, self.scale.norm / self.smallest)

    def forward_error(self, problem: Problem) -> torch.Tensor:
        """Bound on the relative error of ``D x``, shape (k,)."""
        refined, scale = self.refined, self.scale
        assert refined is not None
        assert scale is not None
        if refined.forward_error is not None:
            return refined.forward_error
        if problem.wide:
            ratio = torch.zeros_like(refined.residual_norm)
        else:
            ratio = residual_ratio(refined.residual_norm, scale.norm, self.size(refined.x))
        condition = ESTIMATED * self.condition
        error = self.spread * least_squares_error(condition, refined.measures.backward_error, ratio)
        return error.masked_fill(~refined.x.any(0) & ~(refined.measures.optimality > 0), 0.0)


@dataclass(frozen=True)
class Preconditioner:
    """R of the scaled matrix, and what it says about its condition.

    Attributes
    ----------
    triangle : Triangular, shape (n, n)
    columns : Tensor, shape (n,)
        Norms of the columns of R, which are those of the scaled matrix.
    extremes : Tensor, shape (2,)
        Estimates of the largest and the smallest singular value of R with columns divided by their norms.
    stable : bool
        Whether they are those of A (Householder, double precision); those of any other R are only if
        ``A R^-1`` is well conditioned, which a problem with known solution shows.
    """

    triangle: Triangular
    columns: torch.Tensor
    extremes: torch.Tensor
    stable: bool = False

    @classmethod
    def of(cls, r: torch.Tensor, triangle: Triangular, *, stable: bool = False) -> Preconditioner:
        """R as a matrix, and as it is solved with."""
        columns = nonzero(torch.linalg.vector_norm(r, dim=0).double())
        return cls(triangle, columns, extreme_singular_values(r, triangle, columns), stable)


def nonzero(norms: torch.Tensor) -> torch.Tensor:
    """Norms of columns to divide by: 1 for zero columns."""
    return norms.masked_fill(norms == 0, 1.0)


@dataclass(frozen=True)
class Units:
    """Exponents of two by which a problem with numbers near the ends of the range was divided.

    Attributes
    ----------
    x : Tensor of int, shape (n, 1)
        What to add to those of b for x.
    b : Tensor of int, shape (1, k)
    a_low, b_low : Tensor or None
        What rounding A and b has lost when weights were applied.
    """

    x: torch.Tensor
    b: torch.Tensor
    a_low: torch.Tensor | None = None
    b_low: torch.Tensor | None = None


@dataclass(frozen=True)
class Problem:
    """A problem in double precision.

    Attributes
    ----------
    operator : LeastSquaresOperator
        The tall matrix that is factorized: A with weights and damping, or the transpose of a wide A.
    b : Tensor, shape (rows, k)
        Its columns scaled by powers of two.
    given_b : Tensor, shape (m, k)
        The same before weights and damping.
    b_scales : Tensor, shape (k,)
    scales : Tensor, shape (n,)
        Powers of two for the columns of the operator.
    wide : bool
        Whether the operator is the transpose.
    units : Units or None
        Those of a problem that was scaled before.
    """

    operator: LeastSquaresOperator
    b: torch.Tensor
    given_b: torch.Tensor
    b_scales: torch.Tensor
    scales: torch.Tensor
    wide: bool
    options: Options
    units: Units | None = None

    @classmethod
    def of(
        cls,
        a: torch.Tensor,
        b: torch.Tensor,
        options: Options,
        units: Units | None = None,
    ) -> Problem:
        """Apply weights and damping, check the numbers, choose the scales.

        Parameters
        ----------
        a : Tensor, shape (m, n)
        b : Tensor, shape (m, k)
        options : Options
        units : Units, optional
            Of a problem that was scaled before, weights and damping applied.
        """
        weights, damp = (options.weights, options.damp) if units is None else (None, 0.0)
        # Powers of two, so that norms of b and x neither overflow nor underflow.
        b_scales = power_of_two_scales(options.engine.column_max(b))
        b = given_b = b * b_scales
        wide = a.shape[0] < a.shape[1] and not damp
        if wide:
            weighted = a if weights is None else a * weights[:, None]
            operator = LeastSquaresOperator(weighted.T)
            b = b if weights is None else b * weights[:, None]
        else:
            operator = LeastSquaresOperator(a, weights, damp)
            b = operator.right_hand_side(b)
        column_max = operator.column_max(options.engine)
        check_finite(a, column_max, "A")
        check_finite(b, options.engine.column_max(b), "b")
        scales = power_of_two_scales(column_max)
        return cls(operator, b, given_b, b_scales, scales, wide, options, units)

    @property
    def rank(self) -> int:
        """Full rank."""
        return self.scales.numel()

    def residual_norm(self, x: torch.Tensor) -> torch.Tensor:
        """``||b - A x||``, shape (k,)."""
        image = self.operator.rmatmul(x) if self.wide else self.operator.matmul(x)
        return torch.linalg.vector_norm(self.b - image, dim=0)

    @cached_property
    def sizes_of_wide(self) -> torch.Tensor:
        """Norms of the columns of a wide A."""
        return nonzero(torch.linalg.vector_norm(self.operator.a, dim=1))

    def unscale(self, x: torch.Tensor) -> torch.Tensor:
        """Solutions of the problem that was given."""
        x = x / self.b_scales
        return x if self.units is None else shift(x, self.units.x + self.units.b)

    def rescale(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`unscale`."""
        x = x if self.units is None else shift(x, -self.units.x - self.units.b)
        return x * self.b_scales

    def unscale_residual(self, norm: torch.Tensor) -> torch.Tensor:
        """Norms of residuals of the problem that was given."""
        norm = norm / self.b_scales
        return norm if self.units is None else shift(norm, self.units.b[0])

    def preconditioner(self, method: str, compute: str, limit: Limit | None) -> Preconditioner:
        """R of the scaled matrix by ``"rgsqrf"`` or from the Gram matrix (``"cholesky"``).

        A GPU plays it back where A is small and nobody wants to hear of its progress. Otherwise it ends early
        with :class:`GivenUp` where R will be worse than ``limit`` allows.
        """
        options, operator, n = self.options, self.operator, self.scales.numel()
        engine = options.engine.using(compute)
        report = stage(options.progress, f"factorizing in {compute}")
        size = 8 * math.prod(operator.shape)
        played_back = size <= options.engine.replayed_bytes and options.progress is None
        on_columns = None if options.progress is None else lambda k: report((k / n) ** 2)
        on_half = None if played_back or limit is None else partial(limit.check_decay, n)

        def factorized(
            a: torch.Tensor, scales: torch.Tensor, *weights: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            same = replace(operator, a=a, weights=weights[0] if weights else None)
            if method == "cholesky":
                r = gram_r(same.operand(engine, scales), engine)
            else:
                work = same.fill(engine, scales)
                r = rgsqrf(work, engine, overwrite_a=True, on_columns=on_columns, on_half=on_half)[1]
            triangle = BlockTriangular.of(r, options.engine.tuning.inverted)
            found = Preconditioner.of(r, triangle)
            return r, triangle.inverses, found.columns, found.extremes

        inputs = (operator.a, self.scales, *(() if operator.weights is None else (operator.weights,)))
        if played_back:
            key = ("lstsq", method, repr(engine), operator.damp)
            r, inverses, columns, extremes = options.engine.replay(factorized, inputs, key)
        else:
            r, inverses, columns, extremes = factorized(*inputs)
        report(1.0)
        return Preconditioner(BlockTriangular(r, inverses), columns, extremes)

    def exact(self, sizes: torch.Tensor) -> ExactProblem:
        """The problem in numbers near 1, with what rounding weighted numbers has lost.

        Parameters
        ----------
        sizes : Tensor, shape (n,)
            Norms of the columns.
        """
        operator = self.operator
        if operator.weights is None and not operator.damp:
            scales = power_of_two_scales(sizes)
            a_low, b_low = (None, None) if self.units is None else (self.units.a_low, self.units.b_low)
            return ExactProblem(
                operator.a * scales,
                self.b,
                scales,
                None if a_low is None else a_low * scales,
                None if b_low is None else b_low * self.b_scales,
            )
        found = ScaledProblems.of(operator.a[None], self.given_b[None], operator.weights, operator.damp)
        scales, units = shift(torch.ones_like(sizes), -found.columns[0, 0]), found.b_columns[0]
        low = None if found.a_low is None else found.a_low[0]
        b_low = None if found.b_low is None else shift(found.b_low[0], units)
        return ExactProblem(found.a[0], shift(found.b[0], units), scales, low, b_low)

    def householder(self) -> Preconditioner:
        """R by Householder reflections in double precision."""
        report = stage(self.options.progress, "factorizing in fp64")
        r = torch.linalg.qr(self.operator.dense() * self.scales, mode="r")[1]
        report(1.0)
        # The library's substitution is as stable as can be, and several times slower on a GPU.
        return Preconditioner.of(r, r, stable=True)


def preconditioned(
    problem: Problem,
    label: str,
    preconditioner: Preconditioner,
    bound: float,
    inner: InnerSolver,
    *,
    limit: Limit | None = None,
) -> Outcome:
    """Refine with R as preconditioner, and find out whether A has full rank.

    An R whose condition number exceeds that of ``limit`` is not tried for longer than that says.
    """
    options, n = problem.options, problem.rank
    largest, smallest = preconditioner.extremes.tolist()
    if not (math.isfinite(largest) and smallest > 0):
        return Outcome(label, None, n, "R is singular or not finite")
    rcond = options.certain_rcond(problem.operator.shape)
    if smallest <= ESTIMATED * rcond * largest:
        doubt = f"condition number about {largest / smallest:.1e}: not of full rank to {rcond:.1e}"
        return Outcome(label, None, n, doubt)
    iterations = options.max_iterations
    if limit is not None and largest > limit.condition * smallest:
        iterations = min(iterations, limit.iterations)
    if iterations == 0:
        reason = f"condition number about {largest / smallest:.1e}: too large for an R in this precision"
        return Outcome(label, None, n, reason)
    r = _unscale(preconditioner.triangle, problem.scales)
    columns = problem.scales / preconditioner.columns
    target = bound / 3
    report = stage(options.progress, "refining")
    probed = _Probed()
    if not preconditioner.stable:
        probed = _probe(problem, r, columns, largest, target, inner, iterations)
    doubt = ""
    if not probed.error <= PROBE_ERROR:
        doubt = f"a known solution comes back with error {probed.error:.1e}: R is poor, or A not of full rank"
    if doubt and options.algorithm is None:
        return Outcome(label, None, n, doubt)
    scale = Scale(columns, largest, probed.smallest if probed.smallest > 0 else 1.0)
    left = options.max_iterations - probed.iterations
    if problem.wide:
        return _wide(problem, label, preconditioner, r, scale, target, left, doubt)
    refined = refine(
        problem.operator,
        r,
        problem.b,
        scale=scale,
        tolerance=target,
        max_iterations=left,
        start=probed.x,
        inner=inner,
        on_restart=lambda error: report(digits_done(error, target)),
    )
    refined.iterations += probed.iterations
    smallest *= min(1.0, scale.smallest)
    if options.forward and not doubt:
        refined = refine_forward(
            problem.operator,
            r,
            problem.exact(1 / columns),
            refined,
            scale=scale,
            smallest=smallest / ESTIMATED,
            tolerance=options.digits,
            max_iterations=options.max_iterations,
        )
    return Outcome(label, refined, n, doubt, scale, smallest, 1 / columns)


def _wide(
    problem: Problem,
    label: str,
    preconditioner: Preconditioner,
    r: Triangular,
    scale: Scale,
    target: float,
    iterations: int,
    doubt: str,
) -> Outcome:
    """The minimum-norm solution; its rank is decided in the matrix with normalized columns."""
    n, rcond = problem.rank, problem.options.certain_rcond(problem.operator.shape)
    largest, smallest, spread = _condition_of_wide(problem, preconditioner)
    if not smallest > ESTIMATED * rcond * largest:
        doubt = (
            f"condition number about {largest / max(smallest, 1e-300):.1e}: not of full rank to {rcond:.1e}"
        )
        return Outcome(label, None, n, doubt)
    refined = refine_minimum_norm(
        problem.operator.a, r, problem.b, scale=scale, tolerance=target, max_iterations=iterations
    )
    measured = Scale(scale.columns, largest)
    rows = float(scale.norm / preconditioner.extremes[1]) * smallest / largest
    spread *= max(1.0, rows)
    return Outcome(label, refined, n, doubt, measured, smallest, problem.sizes_of_wide, spread)


def _condition_of_wide(problem: Problem, preconditioner: Preconditioner) -> tuple[float, float, float]:
    """Extreme singular values of B, and by how much norms of its columns differ."""
    sizes = problem.sizes_of_wide
    spread = float(sizes.max() / sizes.min())
    if spread <= ALIKE:
        # Those of A itself, rows in their own units.
        triangle = preconditioner.triangle
        r = triangle.r if isinstance(triangle, BlockTriangular) else triangle
        found = extreme_singular_values(r, triangle, problem.scales)
    else:
        r = torch.linalg.qr(problem.operator.a / sizes[:, None], mode="r")[1]
        found = extreme_singular_values(r, r)
    largest, smallest = found.tolist()
    return largest, smallest, spread


def _unscale(r: Triangular, scales: torch.Tensor) -> Triangular:
    """R of the matrix as it was given."""
    return r.scaled(scales) if isinstance(r, BlockTriangular) else r / scales


class GivenUp(Exception):
    """A factorization that was ended early, and why."""


@dataclass(frozen=True)
class Limit:
    """Iterations of the first solve with an R of a larger condition number than this, and by how much its
    diagonal may fall.
    """

    condition: float
    iterations: int
    decay: float = math.inf

    def check_decay(self, n: int, diagonal: torch.Tensor) -> None:
        """Give an R of n columns up by the diagonal of its first ones."""
        decay = expected_decay(diagonal, n)
        if math.isnan(decay):
            raise GivenUp("R is not finite")
        if decay > self.decay:
            raise GivenUp(
                f"the diagonal of R will fall by a factor of about {decay:.1e}: "
                "A is too ill-conditioned for an R in this precision"
            )


LIMITS = {
    ("cholesky", "fp16"): Limit(FP16_GRAM_CONDITION, 0),
    ("rgsqrf", "fp16"): Limit(1 / FP16.u, DOUBTFUL_ITERATIONS, FP16_DECAY),
}


@dataclass(frozen=True)
class _Probed:
    """A problem with known solution, solved together with the problem itself.

    Attributes
    ----------
    error : float
        Of the known solution.
    smallest : float
        Smallest singular value of ``A R^-1`` seen on the way.
    x : Tensor, shape (n, k), or None
        Solutions of the problem, to single precision; None where they are to be found in another way.
    iterations : int
        Those that x took.
    """

    error: float = 0.0
    smallest: float = 1.0
    x: torch.Tensor | None = None
    iterations: int = 0


def _probe(
    problem: Problem,
    r: Triangular,
    columns: torch.Tensor,
    norm_a: float,
    tolerance: float,
    inner: InnerSolver,
    max_iterations: int,
) -> _Probed:
    """Solve a random problem whose solution is known; the error is that in the variables ``R x``.

    It is one more right-hand side in the first solve by CGLS, whose products read A once for all of them.
    """
    generator = torch.Generator("cpu").manual_seed(1)
    n = problem.rank
    z = torch.randn(n, 1, generator=generator, dtype=torch.float64, device="cpu").to(columns.device)
    known = solve_r(r, z)
    together = inner is cgls and not problem.wide
    if together:  # [A known, b] and its gradient in one pass over A
        b, k = problem.b, problem.b.shape[1]
        rhs, gradient = problem.operator.normal(functional.pad(-known, (0, k)), functional.pad(b, (1, 0)))
    else:
        b = problem.b[:, :0]
        rhs, gradient = problem.operator.normal(known)
    norm = torch.linalg.vector_norm
    size = norm(z, dim=0)
    stop = Stop(
        preconditioned=functional.pad(PROBE_ERROR / 10 * size, (0, b.shape[1])),
        gradient=functional.pad(0.5 * tolerance * norm_a * norm(b, dim=0), (1, 0)),
        scales=columns,
        reduction=INNER_REDUCTION,
    )
    found = cgls(problem.operator, r, rhs, stop=stop, max_iterations=max_iterations, gradient=gradient)
    error = float(norm(multiply_r(r, found.x[:, :1] - known)) / size)
    if not together:
        return _Probed(error, found.smallest)
    return _Probed(error, found.smallest, found.x[:, 1:], found.iterations)
