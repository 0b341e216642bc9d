"""One least-squares problem by iterations that R of some factorization makes few, and the evidence for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn import functional

from neula.algorithms.krylov.cgls import Stop, cgls, lsqr
from neula.algorithms.krylov.doubled_refinement import DoubledSolution, Pace
from neula.algorithms.krylov.driver import Refined
from neula.algorithms.krylov.refinement import (
    INNER_REDUCTION,
    InnerSolver,
    refine,
    refine_forward,
    refine_minimum_norm,
)
from neula.algorithms.orthogonal.householder import normal_equations, qr_solve, solve_by_householder
from neula.algorithms.orthogonal.r_only import low_cholesky_r, sampled_max
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.spectra.condition import expected_decay, extreme_singular_values, solve_r, solve_rt
from neula.algorithms.spectra.gram import gram_r
from neula.algorithms.triangular.inverted import InvertedTuning
from neula.algorithms.triangular.triangular import BlockTriangular, UpperTriangular, triangular
from neula.certificates.backward_error import Measures, Scale, norms_of
from neula.certificates.bounds import lstsq_bound
from neula.certificates.forward_error import ESTIMATED, SURE, least_squares_error, residual_ratio
from neula.certificates.verdict import Evidence
from neula.engines import FP16
from neula.engines.formats import in_double
from neula.engines.random_vectors import gaussian
from neula.engines.reduction import Reduction
from neula.kernels.magnitudes import two_norms
from neula.pipeline.chain import Answer, Declined
from neula.pipeline.progress import digits_done, stage
from neula.problems.least_squares.problem import (
    LeastSquaresAnswer,
    LeastSquaresProblems,
    PreparedProblem,
    nonzero_norms,
)
from neula.problems.least_squares.together import RSource, certified, solve_together

FP16_GRAM_CONDITION = 300.0
"""A larger condition number of its R says that the Gram matrix is too coarse in fp16. Its rounding errors are
random and much smaller than ``cond^2 u``, but one with error correction costs no more than a few iterations.
"""

FP16_DECAY = 128.0
"""A diagonal of R that will fall by more, ``1 / (16 u)``, gives a QR in fp16 up half-way. With a geometric
spectrum that is a condition number of 2000, and the forty iterations or so that it would need take as long as
a better R."""

WELL_CONDITIONED = 1e5
"""Condition number up to which a direct solution is where iterations begin. Its backward error is larger than
theirs, and where the residual is large, the error of x grows with the square of the condition number."""

DOUBTFUL_ITERATIONS = 12
"""Iterations for an R in fp16 with a condition number above ``1/u``: its small singular values are mostly
rounding errors. A few of them cost a few iterations, many of them more than a better R takes."""


@dataclass(frozen=True)
class Preconditioner:
    """R of the scaled matrix, and what it says about its condition."""

    triangle: UpperTriangular  # shape (n, n)
    columns: torch.Tensor  # shape (n,): norms of the columns of R, which are those of the scaled matrix
    # Shape (2,): estimates of the largest and the smallest singular value of R with columns divided by their
    # norms.
    extremes: torch.Tensor
    # Whether they are those of A (Householder, double precision); those of any other R are only if A R^-1 is
    # well conditioned, which a problem with known solution shows.
    stable: bool = False

    @classmethod
    def from_factor(
        cls, r: torch.Tensor, triangle: UpperTriangular, *, stable: bool = False
    ) -> Preconditioner:
        """R as a matrix, and as it is solved with."""
        columns = nonzero_norms(two_norms(r, 0).double())
        return cls(triangle, columns, extreme_singular_values(r, triangle, columns), stable)


@dataclass(frozen=True)
class Limit:
    """Limits on an R in low precision, where a better one can be had."""

    condition: float
    iterations: int  # of the first solve with an R of a larger condition number
    decay: float = math.inf  # by how much its diagonal may fall

    def check_half(self, n: int, over_rows: Reduction, diagonal: torch.Tensor) -> None:
        """Give an R of n columns up, by the diagonal of its first ones."""
        decay = expected_decay(over_rows.agree(diagonal), n)
        if math.isnan(decay):
            raise Declined("R is not finite")
        if decay > self.decay:
            raise Declined(
                f"the diagonal of R will fall by a factor of about {decay:.1e}: "
                "A is too ill-conditioned for an R in this precision"
            )


LIMITS = {
    ("cholesky", "fp16"): Limit(FP16_GRAM_CONDITION, 0),
    ("rgsqrf", "fp16"): Limit(1 / FP16.u, DOUBTFUL_ITERATIONS, FP16_DECAY),
}
"""By method and arithmetic."""


def fast_r(problem: PreparedProblem, method: str, compute: str, limit: Limit | None) -> Preconditioner:
    """R of the scaled matrix by ``"rgsqrf"`` or from the Gram matrix (``"cholesky"``)."""
    # A GPU replays it if A is small and no progress is reported. Otherwise it is declined early where R will
    # be worse than ``limit`` allows.
    options, a, n = problem.options, problem.operator.a, problem.scales.numel()
    engine = options.engine.using(compute)
    report = stage(options.progress, f"factorizing in {compute}")
    size = problem.b.element_size() * math.prod(problem.shape)
    played_back = size <= options.engine.replayed_bytes and options.progress is None
    on_columns = None if options.progress is None else lambda k: report((k / n) ** 2)
    over_rows = options.over_rows
    on_half = None if played_back or limit is None else partial(limit.check_half, n, over_rows)

    def factorized(a: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if method == "cholesky" and engine.is_complex:  # rounded as it is split
            r = gram_r(a, engine, scales)
        elif method == "cholesky":
            operand = torch.empty(a.shape, dtype=engine.operand_dtype, device=a.device)
            r = gram_r(engine.fill(operand, a, scales), engine)
        else:
            work = engine.padded(*a.shape, dtype=engine.working_dtype)
            engine.fill(work[: len(a)], a, scales)
            r = rgsqrf(work, engine, overwrite_a=True, on_columns=on_columns, on_half=on_half)[1]
        r = over_rows.agree(r)
        # Dozens of launches that know nothing of A, which may be too large for a graph, or on another device.
        return r, *options.engine.alone.replay(known_of, (r,), "preconditioner")

    def known_of(r: torch.Tensor) -> tuple[torch.Tensor, ...]:
        triangle = BlockTriangular.from_factor(r, options.engine.tuning[InvertedTuning].inverted)
        found = Preconditioner.from_factor(r, triangle)
        return triangle.inverses, found.columns, found.extremes

    inputs = (a, problem.scales)
    if played_back:
        key = ("lstsq", method, repr(engine))
        r, inverses, columns, extremes = options.engine.replay(factorized, inputs, key)
    else:
        r, inverses, columns, extremes = factorized(*inputs)
    report(1.0)
    return Preconditioner(BlockTriangular(r, inverses), columns, over_rows.agree(extremes))


PROBE_ERROR = 1e-5
"""Error in a problem with known solution above which A may lack full rank. A null direction of A loses its
random component, of size ``1/sqrt(n)``; a matrix of full rank is solved to ``u cond(A)``."""

INEXACT = 1.05
"""For norms of columns that are those of an R in a low precision."""

ALIKE = 4.0
"""Columns of a wide matrix whose norms differ by less have nearly the condition number of the matrix with
normalized columns."""


@dataclass(frozen=True)
class LeastSquaresErrorBounds:
    """Norms that bound the error of a refined solution."""

    scale: Scale  # scaling of the backward errors
    smallest: float  # smallest singular value of B, estimated from above
    sizes: torch.Tensor  # norms of the columns of A: the diagonal of D
    # By how much norms of D x may exceed those of x, to which errors with scaled rows refer.
    spread: float = 1.0

    def size(self, x: torch.Tensor) -> torch.Tensor:
        """``||D x||``, shape (..., k)."""
        return two_norms(x * self.sizes[:, None], -2)

    @property
    def condition(self) -> float:
        """Condition number of B, estimated."""
        if not self.smallest > 0:
            return math.inf
        return max(1.0, self.scale.norm / self.smallest)

    def forward_error(self, refined: Refined) -> torch.Tensor:
        """Bound on the relative error of ``D x``, shape (k,)."""
        if refined.forward_error is not None:
            return refined.forward_error
        assert refined.residual_norm is not None
        if refined.row_error is not None:
            eta, ratio = refined.row_error, torch.zeros_like(refined.residual_norm)
        else:
            eta = refined.measures.backward_error
            ratio = residual_ratio(refined.residual_norm, self.scale.norm, self.size(refined.x))
        error = self.spread * least_squares_error(ESTIMATED * self.condition, eta, ratio)
        return error.masked_fill(~refined.x.any(0) & ~(refined.measures.optimality > 0), 0.0)


def answer_of(
    problem: PreparedProblem, label: str, refined: Refined, evidence: LeastSquaresErrorBounds, doubt: str
) -> LeastSquaresAnswer:
    """A solution in the user's units, with its evidence."""
    # A doubt concerns R or the rank: the singular values of R then say nothing about A.
    if doubt:
        evidence = replace(evidence, smallest=0.0)
    options, operator, over_rows = problem.options, problem.operator, problem.options.over_rows

    def norms(lost: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        (b_norm,), size = over_rows.norms(problem.b), refined.residual_norm
        if lost is not None and options.dtype != refined.x.dtype:  # x is not what was refined
            x = refined.x - lost[0]
            (size,) = over_rows.norms(problem.b - (operator.rmatmul if problem.wide else operator.matmul)(x))
        assert size is not None
        return size[None], b_norm[None]

    of_data = (x[None] for x in (refined.measures.backward_error, refined.measures.optimality))
    forward_error = evidence.forward_error(refined)[None]
    condition = forward_error.new_tensor([evidence.condition])
    values = certified(
        problem,
        DoubledSolution(refined.x[None], Measures(*of_data), problem.b[None], forward_error),
        options,
        size=evidence.size,
        norms=norms,
        conditions=(condition, ESTIMATED * condition),
        rank=problem.rank,
        doubtful=bool(doubt),
    )
    values = replace(values, forward_error=INEXACT * values.forward_error)
    return Answer(values, label, doubt, refined.iterations, tuple(refined.history))


def refined_with(
    problem: PreparedProblem,
    label: str,
    preconditioner: Preconditioner,
    limit: Limit | None = None,
    start: torch.Tensor | None = None,
) -> LeastSquaresAnswer:
    """Refine with R as preconditioner, and find out whether A has full rank; declined if R is too poor."""
    options, (largest, smallest) = problem.options, preconditioner.extremes.tolist()
    inner = lsqr if options.algorithm == "lsqr" else cgls
    iterations = _iterations(problem, largest, smallest, limit)
    r, scales = preconditioner.triangle, problem.scales  # R of the matrix as given
    r = r.scaled(scales) if isinstance(r, BlockTriangular) else r / scales
    columns = problem.scales / preconditioner.columns
    target = lstsq_bound(options.target, min(problem.shape)) / 3
    report = stage(options.progress, "refining")
    probed, doubt = _Probed(x=start), ""
    if not preconditioner.stable:
        probed = _probe(problem, r, columns, largest, target, inner, iterations)
    if not probed.error <= PROBE_ERROR:
        known = f"a problem with known solution is solved with error {probed.error:.1e}"
        doubt = f"{known}: R is too inaccurate, or A lacks full rank"
        if options.algorithm is None:
            raise Declined(doubt)
    scale = Scale(columns, largest, probed.smallest if probed.smallest > 0 else 1.0)
    left = options.max_iterations - probed.iterations
    if problem.wide:
        evidence = _evidence_of_wide(problem, preconditioner, scale)
        refined = refine_minimum_norm(
            *(problem.operator, r, problem.b),
            scale=evidence.scale,
            rows=scale,
            tolerance=target,
            max_iterations=left,
        )
        return answer_of(problem, label, refined, evidence, doubt)
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
    refined = replace(refined, iterations=refined.iterations + probed.iterations)
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
    return answer_of(problem, label, refined, LeastSquaresErrorBounds(scale, smallest, 1 / columns), doubt)


def _iterations(problem: PreparedProblem, largest: float, smallest: float, limit: Limit | None) -> int:
    """How many the first solve is given, by the extreme singular values of R with normalized columns."""
    if not (math.isfinite(largest) and smallest > 0):
        raise Declined("R is singular or not finite")
    _check_rank(problem, largest, smallest)
    iterations = problem.options.max_iterations
    if limit is not None and largest > limit.condition * smallest:
        iterations = min(iterations, limit.iterations)
    if iterations == 0:
        condition = largest / smallest
        raise Declined(f"condition number about {condition:.1e}: too large for an R in this precision")
    return iterations


def _check_rank(problem: PreparedProblem, largest: float, smallest: float) -> None:
    condition = largest / smallest if smallest > 0 else math.inf
    if not problem.options.limits(problem.shape).full_rank(ESTIMATED * condition):
        rcond = problem.options.certain_rcond(problem.shape)
        raise Declined(f"condition number about {condition:.1e}: not of full rank to {rcond:.1e}")


def _evidence_of_wide(
    problem: PreparedProblem, preconditioner: Preconditioner, scale: Scale
) -> LeastSquaresErrorBounds:
    """For a minimum-norm solution; its rank is decided in the matrix with normalized columns."""
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
    _check_rank(problem, largest, smallest)
    rows = float(scale.norm / preconditioner.extremes[1]) * smallest / largest
    return LeastSquaresErrorBounds(Scale(1 / sizes, largest), smallest, sizes, spread * max(1.0, rows))


@dataclass(frozen=True)
class _Probed:
    """A problem with known solution, solved together with the problem itself."""

    error: float = 0.0  # of the known solution
    smallest: float = 1.0  # smallest singular value of A R^-1 seen on the way
    # Shape (n, k): solutions of the problem, to single precision; None where they are to be found in another
    # way.
    x: torch.Tensor | None = None
    iterations: int = 0  # those that x took


def _probe(
    problem: PreparedProblem,
    r: UpperTriangular,
    columns: torch.Tensor,
    norm_a: float,
    tolerance: float,
    inner: InnerSolver,
    max_iterations: int,
) -> _Probed:
    """Solve a random problem whose solution is known; the error is that in the variables ``R x``."""
    # It is one more right-hand side in the first solve by CGLS, whose products read A once for all of them.
    z = gaussian(problem.rank, 1, problem.b.dtype, columns.device, seed=1)
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
        gradient=functional.pad(0.5 * tolerance * norm_a * problem.options.over_rows.norms(b)[0], (1, 0)),
        scales=columns,
        reduction=INNER_REDUCTION,
    )
    found = cgls(problem.operator, r, rhs, stop=stop, max_iterations=max_iterations, gradient=gradient)
    smallest = torch.full_like(size, found.smallest)
    measured = torch.cat([norm(triangular(r).matmul(found.x[:, :1] - known))[None] / size, smallest])
    error, smallest_of_all = problem.options.over_rows.agree(measured).tolist()
    if not together:
        return _Probed(error, smallest_of_all)
    return _Probed(error, smallest_of_all, found.x[:, 1:], found.iterations)


def by_fast_r(
    problems: LeastSquaresProblems,
    before: LeastSquaresAnswer | None,
    *,
    label: str,
    method: str,
    compute: str,
    limit: Limit | None,
) -> LeastSquaresAnswer:
    """R by ``"rgsqrf"`` or from the Gram matrix (``"cholesky"``) in some arithmetic."""
    problem = problems.prepared
    return refined_with(problem, label, fast_r(problem, method, compute, limit), limit)


def by_gram(
    problems: LeastSquaresProblems,
    before: LeastSquaresAnswer | None,
    *,
    label: str,
    compute: str,
) -> LeastSquaresAnswer:
    """R from the Gram matrix in some arithmetic, and the corrected seminormal equations."""
    # Where R is as good as a step of these needs, a step is one pass over A, as an iteration is, and
    # guarantees a number of digits. In plain fp16, with residuals in working precision, R is checked before.
    options, over_rows = problems.options, problems.options.over_rows
    factor = partial(low_cholesky_r, engine=options.engine.using(compute))
    plain = compute == "fp16"
    source = RSource(partial(factor, sampled=True), half_precision=True, plain_residuals=plain)
    pace = Pace.asynchronous(2 if source.checked_first else 1)
    solve = partial(solve_together, problems, before, label=label, pace=pace)
    answer = solve(source=source)
    shape = (over_rows.count(problems.a.shape[1]), problems.a.shape[2])
    assert answer.measured is not None
    evidence = Evidence.from_numbers(answer.measured[:, 0].tolist())
    if not options.limits(shape, SURE).accept(evidence):
        beyond = problems.largest[0] > over_rows.largest(sampled_max(problems.a[0]))
        if bool(over_rows.agree(beyond.any())):
            answer = solve(source=replace(source, factor=factor))
    return answer


def by_householder(
    problems: LeastSquaresProblems, before: LeastSquaresAnswer | None, *, label: str
) -> LeastSquaresAnswer:
    """R by the library's Householder reflections in double precision, and iterations that start from the
    solution by them, where A is well-conditioned.
    """
    problem, start, over_rows = problems.prepared, None, problems.options.over_rows
    report = stage(problem.options.progress, "factorizing in fp64")
    a = problem.operator.a * problem.scales
    if problem.wide or over_rows.spread:
        r = over_rows.merged_r(a, lambda rows: torch.linalg.qr(rows, mode="r")[1])
    else:
        x, r = solve_by_householder(a, problem.b)
        start = x * problem.scales[:, None]
    report(1.0)
    # The library's substitution is as stable as can be, and several times slower on a GPU.
    found = Preconditioner.from_factor(r, r, stable=True)
    found = replace(found, extremes=over_rows.agree(found.extremes))
    largest, smallest = found.extremes.tolist()
    # Elsewhere the digits that iterations from zero add may be the only guaranteed ones.
    start = start if largest <= WELL_CONDITIONED * smallest else None
    return refined_with(problem, label, found, start=start)


def unrefined(
    problems: LeastSquaresProblems,
    before: LeastSquaresAnswer | None,
    *,
    label: str,
    compute: str,
) -> LeastSquaresAnswer:
    """The comparators of the papers, which do not refine: ``"direct"`` or the normal equations."""
    problem, options = problems.prepared, problems.options
    algorithm = options.algorithm
    if problem.wide:
        raise ValueError(f"algorithm {algorithm!r} needs at least as many rows as columns: use 'cgls'")
    engine, over_rows = options.engine.using(compute), options.over_rows
    work = engine.empty(*problem.operator.a.shape)
    engine.fill(work, problem.operator.a, problem.scales)
    rhs = problem.b.to(engine.storage)
    if algorithm == "direct":
        q, r = rgsqrf(work, engine, overwrite_a=True)
        y = qr_solve(q, r, rhs, over_rows)
    else:
        y, r = normal_equations(work, rhs, engine)
    y, r = map(in_double, over_rows.agreed(y, r))
    if not bool(torch.isfinite(y).all()):
        raise Declined("the factorization broke down: A is too ill-conditioned for it")
    preconditioner = Preconditioner.from_factor(r, r)
    largest, smallest = over_rows.agree(preconditioner.extremes).tolist()
    n, condition = problem.rank, largest / smallest if smallest > 0 else math.inf
    x = in_double(y) * problem.scales[:, None]
    residual = problem.b - problem.operator.matmul(x)
    gradient = problem.operator.rmatmul(residual)
    columns = problem.scales / preconditioner.columns
    scale = Scale(columns, largest)
    projected = solve_rt(r / problem.scales, gradient)
    norms = norms_of(scale, problem.b, x, residual, gradient, projected, over_rows)
    refined = Refined(x, norms.measures(scale.norm), norms.residual)
    # Rounding errors of this R move singular values by so much; the normal equations square them.
    errors = 4 * n**0.5 * engine.format.u * (condition if algorithm == "normal" else 1.0)
    doubt, bound = "", ESTIMATED * condition
    if not (options.limits(problem.shape).full_rank(bound) and bound * errors < 1):
        doubt = f"condition number about {condition:.1e}: A may lack full rank"
    return answer_of(problem, label, refined, LeastSquaresErrorBounds(scale, smallest, 1 / columns), doubt)
