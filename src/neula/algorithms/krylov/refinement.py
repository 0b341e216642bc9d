"""Iterative refinement of a least-squares solution, stopped by what is measured.

CGLS that is left running after convergence drifts away from the true residual, because it updates the
residual instead of computing it. So the outer loop computes residual and gradient anew in double precision,
measures the backward error, and lets CGLS (or LSQR) solve for an update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from neula.algorithms.krylov.cgls import InnerSolution, LeastSquaresOperator, Stop, cgls
from neula.algorithms.krylov.driver import BestSolutions, Evaluated, Refined, iterate, refine_sum
from neula.algorithms.scaled_problems import ScaledProblems
from neula.algorithms.spectra.condition import solve_rt
from neula.algorithms.triangular.triangular import UpperTriangular
from neula.certificates import residuals
from neula.certificates.backward_error import Measures, Norms, Scale, norms_of
from neula.certificates.residuals import projection_noise, residual_noise
from neula.kernels.magnitudes import two_norms
from neula.kernels.shift import shift
from neula.kernels.small_problems.refining import over

INNER_REDUCTION = 1e-8
"""Reduction by one inner solve: the square root of double precision, before CGLS drifts."""

InnerSolver = Callable[..., InnerSolution]
"""CGLS or LSQR: solves for an update."""


def refine(
    operator: LeastSquaresOperator,
    r: UpperTriangular,
    b: torch.Tensor,
    *,
    scale: Scale,
    tolerance: float,
    max_iterations: int,
    start: torch.Tensor | None = None,
    inner: InnerSolver = cgls,
    on_restart: Callable[[float], None] | None = None,
) -> Refined:
    """Solve ``min ||A x - b||``, shape (m, k), to a measured backward error, or as far as it goes.

    ``max_iterations`` are inner ones in total. ``start``, shape (n, k), are solutions that are known roughly.
    """

    def evaluated(x: torch.Tensor, residual: torch.Tensor, gradient: torch.Tensor) -> Evaluated:
        projected = solve_rt(r, gradient) / scale.smallest
        norms = norms_of(scale, b, x, residual, gradient, projected, operator.over_rows)
        return Evaluated((x,), norms.stacked, (x, residual, gradient, norms))

    def errors_of(numbers: torch.Tensor) -> torch.Tensor:
        # Backward error counts first, down to the tolerance, then optimality, which is the stronger measure.
        measures = Norms(*numbers).measures(scale.norm)
        error = measures.backward_error.clamp_min(tolerance)
        return torch.stack([error, measures.optimality]).nan_to_num(math.inf)

    def goes_on(errors: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        # Zero, if that is the first x, is not an answer unless it is optimal.
        is_answer = start is not None or not before.isinf().all()
        left = torch.minimum(errors, before) > tolerance if is_answer else errors[1] > 0
        worst, worst_before = (x.clamp_min(tolerance).amax(1) for x in (errors, before))
        return (left.any() & residuals.improves(worst, worst_before).any()).expand(b.shape[1])

    def update(best: BestSolutions, _: torch.Tensor, left: int) -> tuple[Evaluated, int]:
        x, residual, gradient, norms = best.latest.state
        # The tolerance, or a fixed reduction of the error: asking for more than the tolerance needs would
        # have CGLS iterate on rounding errors.
        aim = torch.maximum(INNER_REDUCTION * norms.projected, 0.5 * tolerance * norms.image)
        gradient_norm = 0.5 * tolerance * scale.norm * norms.residual
        stop = Stop(scale.smallest * aim, gradient_norm, scale.columns)
        step = inner(operator, r, residual, stop=stop, max_iterations=left, gradient=gradient)
        x = x + step.x
        return evaluated(x, *operator.normal(x, b)), step.iterations

    if start is None:
        first = evaluated(b.new_zeros(r.shape[0], b.shape[1]), b, operator.rmatmul(b))
    else:
        first = evaluated(start, *operator.normal(start, b))
    history: list[float] = []
    for best in iterate(
        *(first, update, goes_on),
        errors_of=errors_of,
        max_iterations=max_iterations,
        over_rows=operator.over_rows,
    ):
        history.append(float(Norms(*best.latest.numbers).measures(scale.norm).backward_error.max()))
        if on_restart is not None:
            on_restart(history[-1])
    norms = Norms(*best.numbers)
    measures = norms.measures(scale.norm)
    parts = torch.stack([measures.backward_error, measures.optimality, norms.residual]).to(b.device)
    return Refined(
        best.vectors[0], Measures(*parts[:2]), parts[2], iterations=best.iterations, history=history
    )


def _by_gradient(
    operator: LeastSquaresOperator,
    r: UpperTriangular,
    residual: torch.Tensor,
    gradient: torch.Tensor,
    max_iterations: int,
) -> InnerSolution:
    """An update by CGLS from a gradient that is more accurate than the residual."""
    stop = Stop(torch.zeros_like(gradient[:1, 0].real), reduction=INNER_REDUCTION)
    steps = partial(cgls, stop=stop, max_iterations=max_iterations)
    return steps(operator, r, residual, gradient=gradient, by_gradient=True)


def refine_minimum_norm(
    operator: LeastSquaresOperator,
    r: UpperTriangular,
    rhs: torch.Tensor,
    *,
    scale: Scale,
    rows: Scale,
    tolerance: float,
    max_iterations: int,
) -> Refined:
    """Solve ``min ||x||`` subject to ``B^H x = rhs``, shape (m, k), for the operator B, shape (n, m), n >= m.

    ``B^H B z = rhs`` is solved by CGLS, whose iterates ``x = B z`` are those of Craig's method (CGNE: Saad,
    "Iterative Methods for Sparse Linear Systems", section 8.3): all of them are in the range of B. The
    backward error is ``||b - A x|| / (||B|| ||D x|| + ||b||)`` (Rigal and Gaches, 1967), as for other
    shapes. It is to be as small with rows of A scaled to comparable size, and x not: that bounds the error of
    x. ``scale`` is that of the columns of A, ``rows`` that of its rows.
    """
    norm = partial(torch.linalg.vector_norm, dim=0)

    def evaluated(x: torch.Tensor) -> Evaluated:
        residual = rhs - operator.rmatmul(x)
        size = norm(residual)
        error = over(size, scale.norm * norm(x / scale.columns[:, None]) + norm(rhs))
        of_residual, of_rhs = (norm(v * rows.columns[:, None]) for v in (residual, rhs))
        row_error = over(of_residual, rows.norm * norm(x) + of_rhs)
        return Evaluated((x,), torch.stack([error, row_error, size]), (x, residual))

    def largest(numbers: torch.Tensor) -> torch.Tensor:
        return numbers[:2].amax(0, keepdim=True)

    def improves(errors: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return residuals.goes_on(errors.max(), before.max(), tolerance).expand(rhs.shape[1])

    def update(best: BestSolutions, _: torch.Tensor, left: int) -> tuple[Evaluated, int]:
        x, residual = best.latest.state
        step = _by_gradient(operator, r, residual, residual, left)
        return evaluated(x + operator.matmul(step.x)), step.iterations

    first, history = evaluated(rhs.new_zeros(len(operator.a), rhs.shape[1])), list[float]()
    for best in iterate(first, update, improves, errors_of=largest, max_iterations=max_iterations):
        history.append(float(largest(best.latest.numbers).max()))
    error, row_error, size = best.numbers.to(rhs.device)
    measures = Measures(error, error)
    return Refined(
        best.vectors[0], measures, size, row_error=row_error, iterations=best.iterations, history=history
    )


def refine_forward(
    operator: LeastSquaresOperator,
    r: UpperTriangular,
    problem: ScaledProblems,
    start: Refined,
    *,
    scale: Scale,
    smallest: float,
    tolerance: float,
    max_iterations: int,
) -> Refined:
    """Update x by residuals and gradients in twice the working precision, until the forward error is small.

    As :mod:`neula.algorithms.krylov.doubled_refinement`, with CGLS for the updates: it needs no R that is
    accurate in double precision.

    ``problem`` is that of the operator with scaled columns; b is scaled by powers of two in both. Columns of
    the ``scale`` are the reciprocals of the norms of those of A, and ``smallest`` bounds the singular values
    of ``A D^-1`` from below.
    """
    b, terms = problem.b[0], (1 + problem.b.is_complex()) * sum(operator.shape)
    noise = 4 * residual_noise(terms, doubled=True, random=True)

    def size(x: torch.Tensor) -> torch.Tensor:
        return two_norms(x / scale.columns[:, None], 0)

    def evaluate(
        high: torch.Tensor, low: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        residual, gradient = problem.gradient(problem.scale(high[None]), problem.scale(low[None]))
        residual, gradient = residual[0], shift(gradient, problem.columns.mT)[0]
        projected = solve_rt(r, gradient) / scale.smallest
        norms = norms_of(scale, b, high, residual, gradient, projected, operator.over_rows)
        sizes = size(high), norms.b, norms.residual
        left = norms.projected + projection_noise(noise, scale.norm, scale.norm / smallest, *sizes)
        error = over(left / smallest, size(high))
        return torch.cat([error[None], norms.stacked]), (residual, gradient)

    def update(state: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
        residual, gradient = state
        step = _by_gradient(operator, r, residual, gradient, max_iterations)
        return step.x, step.iterations

    best = refine_sum(start.x, evaluate, update, size=size, tolerance=tolerance, over_rows=operator.over_rows)
    forward_error, _, *found = best.numbers.to(b.device)
    norms = Norms(*found)
    return Refined(
        best.vectors[0],
        norms.measures(scale.norm),
        norms.residual,
        forward_error=forward_error,
        iterations=start.iterations + best.iterations,
        history=start.history,
    )
