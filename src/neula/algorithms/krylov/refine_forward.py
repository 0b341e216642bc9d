"""Refinement of a large least-squares solution until its forward error is that of the format.

As :mod:`neula.algorithms.krylov.doubled_refinement` for small ones, with CGLS for the updates: it needs
no R that is accurate in double precision.
"""

from __future__ import annotations

import torch

from neula.algorithms.krylov.cgls import Stop, cgls
from neula.algorithms.krylov.driver import Refined, refine_sum
from neula.algorithms.krylov.operators import LeastSquaresOperator
from neula.algorithms.krylov.refinement import INNER_REDUCTION
from neula.algorithms.scaled_problems import ScaledProblems
from neula.algorithms.spectra.condition import solve_rt
from neula.algorithms.triangular.triangular import UpperTriangular
from neula.certificates.backward_error import Norms, Scale, norms_of
from neula.certificates.residuals import projection_noise, residual_noise
from neula.kernels.shift import shift
from neula.kernels.small_problems.refining import over


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
    """Update x by residuals and gradients in twice the working precision.

    ``operator``: A, shape (m, n), in double precision. ``r``, shape (n, n): preconditioner. ``problem``: the
    same one with scaled columns, for residuals; b is scaled by powers of two in both. ``start``: solutions to
    continue from. ``scale``: its columns are the reciprocals of the norms of those of A. ``smallest``:
    smallest singular value of ``A D^-1`` from below. ``tolerance``: forward error at which to stop.
    ``max_iterations``: inner iterations of each update. Returns Refined: with a bound on the forward error of
    each right-hand side.
    """
    b, terms = problem.b[0], (1 + problem.b.is_complex()) * sum(operator.shape)
    noise = 4 * residual_noise(terms, doubled=True, random=True)

    def size(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(x / scale.columns[:, None], dim=0)

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
        step = cgls(
            operator,
            r,
            residual,
            stop=Stop(preconditioned=torch.zeros_like(scale.columns[:1]), reduction=INNER_REDUCTION),
            max_iterations=max_iterations,
            gradient=gradient,
            by_gradient=True,
        )
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
