"""Methods for one least-squares problem, except the SVD: R, and iterations preconditioned by it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch

from neula.algorithms.krylov.doubled_refinement import Pace
from neula.algorithms.krylov.driver import Refined
from neula.algorithms.krylov.refinement import InnerSolver
from neula.algorithms.orthogonal.householder import normal_equations, qr_solve
from neula.algorithms.orthogonal.r_only import low_cholesky_r, sampled_max
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.spectra.condition import solve_rt
from neula.certificates.backward_error import Scale, norms_of
from neula.certificates.forward_error import ESTIMATED, SURE
from neula.certificates.verdict import Evidence
from neula.engines.formats import in_double
from neula.pipeline.chain import Answer, Declined
from neula.problems.least_squares.prepared import LeastSquaresProblems
from neula.problems.least_squares.problem import LeastSquaresSolutions
from neula.problems.least_squares.refined import (
    LeastSquaresErrorBounds,
    Limit,
    Preconditioner,
    answer_of,
    fast_r,
    householder_r,
    refined_with,
)
from neula.problems.least_squares.together import solve_together
from neula.problems.least_squares.with_r import RSource

Solution = Answer[LeastSquaresSolutions]


def by_fast_r(
    problems: LeastSquaresProblems,
    before: Solution | None,
    *,
    label: str,
    method: str,
    compute: str,
    inner: InnerSolver,
    limit: Limit | None,
) -> Solution:
    """R by ``"rgsqrf"`` or from the Gram matrix (``"cholesky"``) in some arithmetic."""
    problem = problems.prepared
    return refined_with(problem, label, fast_r(problem, method, compute, limit), inner, limit)


def by_gram(
    problems: LeastSquaresProblems,
    before: Solution | None,
    *,
    label: str,
    compute: str,
    plain_residuals: bool = False,
) -> Solution:
    """R from the Gram matrix in some arithmetic, and the corrected seminormal equations.

    Where R is as good as a step of these needs, a step is one pass over A, as an iteration is, and guarantees
    a number of digits. With ``plain_residuals``, those in working precision, R is checked before.
    """
    options, over_rows = problems.options, problems.options.over_rows
    factor = partial(low_cholesky_r, engine=options.engine.using(compute))
    source = RSource(partial(factor, sampled=True), half_precision=True, plain_residuals=plain_residuals)
    pace = Pace.asynchronous(2 if source.checked_first else 1)
    solve = partial(solve_together, problems, before, label=label, pace=pace)
    answer = solve(source=source)
    shape = (over_rows.count(problems.a.shape[1]), problems.a.shape[2])
    assert answer.measured is not None
    evidence = Evidence.from_numbers(answer.measured[:, 0].tolist())
    if not options.limits(shape, SURE).accept(evidence):
        beyond = problems.largest.of_a > over_rows.largest(sampled_max(problems.a[0]))
        if bool(over_rows.agree(beyond.any())):
            answer = solve(source=replace(source, factor=factor))
    return answer


def by_householder(
    problems: LeastSquaresProblems, before: Solution | None, *, label: str, inner: InnerSolver
) -> Solution:
    """R by the library's Householder reflections, and iterations that start from what they give."""
    problem = problems.prepared
    preconditioner, start = householder_r(problem)
    return refined_with(problem, label, preconditioner, inner, start=start)


def unrefined(
    problems: LeastSquaresProblems, before: Solution | None, *, label: str, algorithm: str, compute: str
) -> Solution:
    """The comparators of the papers, which do not refine: ``"direct"`` or the normal equations."""
    problem, options = problems.prepared, problems.options
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
