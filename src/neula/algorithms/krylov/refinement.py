"""Iterative refinement of a least-squares solution, stopped by what is measured.

CGLS that is left running after convergence drifts away from the true residual, because it updates the
residual instead of computing it. So the outer loop computes residual and gradient anew in double precision,
measures the backward error, and lets CGLS (or LSQR) solve for an update.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from neula.algorithms.krylov.cgls import InnerSolution, Stop, cgls
from neula.algorithms.krylov.driver import BestSolutions, Evaluated, Refined, iterate
from neula.algorithms.krylov.operators import LeastSquaresOperator
from neula.algorithms.spectra.condition import solve_rt
from neula.algorithms.triangular.triangular import UpperTriangular
from neula.certificates.backward_error import Measures, Norms, Scale, norms_of
from neula.certificates.residuals import improves

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
    """Solve ``min ||A x - b||`` to a measured backward error, or as far as it goes.

    Shapes: b (m, k). ``operator``: A, shape (m, n), in double precision. ``r``, shape (n, n): preconditioner.
    ``scale``: norms that errors are relative to. ``tolerance``: backward error at which to stop.
    ``max_iterations``: inner iterations in total. ``start``, shape (n, k): solutions that are known roughly;
    zero by default. ``inner``: :func:`cgls` or :func:`lsqr`. ``on_restart``: called with the backward error
    at every restart.
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
        return (left.any() & improves(worst, worst_before).any()).expand(b.shape[1])

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
