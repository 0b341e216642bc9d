"""One least-squares problem by iterations that R of some factorization makes few, and the evidence for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from neula.algorithms.krylov.batched_lstsq import MARGIN, PROBES
from neula.algorithms.krylov.cgls import Stop, cgls
from neula.algorithms.krylov.craig import refine_minimum_norm
from neula.algorithms.krylov.driver import Refined
from neula.algorithms.krylov.refine_forward import refine_forward
from neula.algorithms.krylov.refinement import INNER_REDUCTION, InnerSolver, refine
from neula.algorithms.spectra.condition import extreme_singular_values, multiply_r, solve_r, solve_rt
from neula.algorithms.triangular.triangular import BlockTriangular, UpperTriangular
from neula.certificates.backward_error import Scale
from neula.certificates.forward_error import (
    ESTIMATED,
    MAX_RATE,
    least_squares_error,
    residual_ratio,
    rounded_error,
)
from neula.engines.formats import in_double
from neula.engines.random_vectors import gaussian
from neula.kernels.small_problems.refining import over
from neula.pipeline.chain import Answer, Declined
from neula.pipeline.progress import digits_done, stage
from neula.problems.least_squares.preconditioner import Limit, Preconditioner
from neula.problems.least_squares.prepared import PreparedProblem
from neula.problems.least_squares.problem import LeastSquaresSolutions

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
        """``||D x||``, shape (k,)."""
        return torch.linalg.vector_norm(x * self.sizes[:, None], dim=0)

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
    problem: PreparedProblem,
    label: str,
    refined: Refined,
    evidence: LeastSquaresErrorBounds,
    doubt: str,
) -> Answer[LeastSquaresSolutions]:
    """A solution in the user's units, with its evidence.

    A doubt concerns R or the rank: the singular values of R then say nothing about A, and no digit is
    guaranteed.
    """
    if doubt:
        evidence = replace(evidence, smallest=0.0)
    options, measures, residual_norm = problem.options, refined.measures, refined.residual_norm
    assert residual_norm is not None
    x = in_double(problem.unscale(refined.x).to(options.dtype))
    rounding = over(evidence.size(problem.rescale(x) - refined.x), evidence.size(refined.x))
    forward_error = INEXACT * rounded_error(evidence.forward_error(refined), rounding)
    refined_error = measures.backward_error.amax()
    if options.dtype != x.dtype:  # x is not what was refined
        residual_norm = problem.residual_norm(problem.rescale(x))
    (b_norm,) = options.over_rows.norms(problem.b)
    condition = forward_error.new_tensor([evidence.condition])
    values = LeastSquaresSolutions(
        x=x[None],
        residual_norm=problem.unscale_residual(residual_norm)[None],
        forward_error=forward_error[None],
        backward_error=(measures.backward_error + rounding).amax()[None],
        refined_error=refined_error[None],
        optimality=measures.optimality.amax()[None],
        residual=over(residual_norm, b_norm).amax()[None],
        condition=condition,
        condition_bound=ESTIMATED * condition,
        rank=torch.tensor([problem.rank], device=x.device),
        doubtful=torch.tensor([bool(doubt)], device=x.device),
    )
    # Results and decisions are equal on all processes.
    values = LeastSquaresSolutions(*options.over_rows.agreed(*values.tensors))
    return Answer(values, label, doubt, refined.iterations, tuple(refined.history))


def refined_with(
    problem: PreparedProblem,
    label: str,
    preconditioner: Preconditioner,
    inner: InnerSolver,
    limit: Limit | None = None,
    start: torch.Tensor | None = None,
) -> Answer[LeastSquaresSolutions]:
    """Refine with R as preconditioner, and find out whether A has full rank.

    An R whose condition number exceeds that of ``limit`` is not tried for longer than that says. Iterations
    begin with ``start``, where that is known.

    Raises Declined if R is too poor, or A may lack full rank.
    """
    options, (largest, smallest) = problem.options, preconditioner.extremes.tolist()
    iterations = _iterations(problem, largest, smallest, limit)
    r = _unscale(preconditioner.triangle, problem.scales)
    columns = problem.scales / preconditioner.columns
    target = problem.bound / 3
    report = stage(options.progress, "refining")
    probed, doubt = _Probed(x=start), ""
    if not preconditioner.stable and start is not None:
        probed = _sampled(problem, r, start)
    elif not preconditioner.stable:
        probed = _probe(problem, r, columns, largest, target, inner, iterations)
    if not probed.error <= PROBE_ERROR:
        doubt = f"a known solution comes back with error {probed.error:.1e}: R is poor, or A not of full rank"
        if options.algorithm is None:
            raise Declined(doubt)
    scale = Scale(columns, largest, probed.smallest if probed.smallest > 0 else 1.0)
    left = options.max_iterations - probed.iterations
    if problem.wide:
        evidence = _evidence_of_wide(problem, preconditioner, scale)
        refined = refine_minimum_norm(
            *(problem.operator.a, r, problem.b),
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
    if not problem.options.limits(problem.operator.shape).full_rank(ESTIMATED * condition):
        rcond = problem.options.certain_rcond(problem.operator.shape)
        raise Declined(f"condition number about {condition:.1e}: not of full rank to {rcond:.1e}")


def _evidence_of_wide(
    problem: PreparedProblem, preconditioner: Preconditioner, scale: Scale
) -> LeastSquaresErrorBounds:
    """For a minimum-norm solution; its rank is decided in the matrix with normalized columns."""
    largest, smallest, spread = _condition_of_wide(problem, preconditioner)
    _check_rank(problem, largest, smallest)
    rows = float(scale.norm / preconditioner.extremes[1]) * smallest / largest
    spread *= max(1.0, rows)
    return LeastSquaresErrorBounds(
        Scale(1 / problem.sizes_of_wide, largest), smallest, problem.sizes_of_wide, spread
    )


def _condition_of_wide(
    problem: PreparedProblem, preconditioner: Preconditioner
) -> tuple[float, float, float]:
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


def _unscale(r: UpperTriangular, scales: torch.Tensor) -> UpperTriangular:
    """R of the matrix as given."""
    return r.scaled(scales) if isinstance(r, BlockTriangular) else r / scales


@dataclass(frozen=True)
class _Probed:
    """A problem with known solution, solved together with the problem itself."""

    error: float = 0.0  # of the known solution
    smallest: float = 1.0  # smallest singular value of A R^-1 seen on the way
    # Shape (n, k): solutions of the problem, to single precision; None where they are to be found in another
    # way.
    x: torch.Tensor | None = None
    iterations: int = 0  # those that x took


def _sampled(problem: PreparedProblem, r: UpperTriangular, start: torch.Tensor) -> _Probed:
    """Find out along random vectors whether the singular values of ``A R^-1`` are near 1.

    That takes less than a problem with known solution, where iterations are hardly needed.
    """
    z = gaussian(problem.rank, PROBES, start.dtype, start.device, seed=1)
    image = problem.operator.rmatmul(problem.operator.matmul(solve_r(r, z)))
    norm = torch.linalg.matrix_norm
    rate = float(MARGIN * norm(z - solve_rt(r, image)) / PROBES**0.5)
    # A null direction of A leaves a whole component.
    return _Probed(0.0 if rate <= MAX_RATE else rate, max(0.0, 1 - rate) ** 0.5, start)


def _probe(
    problem: PreparedProblem,
    r: UpperTriangular,
    columns: torch.Tensor,
    norm_a: float,
    tolerance: float,
    inner: InnerSolver,
    max_iterations: int,
) -> _Probed:
    """Solve a random problem whose solution is known; the error is that in the variables ``R x``.

    It is one more right-hand side in the first solve by CGLS, whose products read A once for all of them.
    """
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
    measured = torch.cat([norm(multiply_r(r, found.x[:, :1] - known))[None] / size, smallest])
    error, smallest_of_all = problem.options.over_rows.agree(measured).tolist()
    if not together:
        return _Probed(error, smallest_of_all)
    return _Probed(error, smallest_of_all, found.x[:, 1:], found.iterations)
