"""LSQR with R as right preconditioner: the alternative to CGLS.

Paige and Saunders, "LSQR: An Algorithm for Sparse Linear Equations and Sparse Least Squares", ACM TOMS 8,
1982. Mathematically the same iterates, from a bidiagonalization whose short recurrences keep more digits.
"""

from __future__ import annotations

import torch

from neula.algorithms.krylov.cgls import InnerSolution, Stop, ratio
from neula.algorithms.krylov.operators import LeastSquaresOperator
from neula.algorithms.spectra.condition import solve_r, solve_rt
from neula.algorithms.trace import TraceEvent, Tracer
from neula.algorithms.triangular.triangular import UpperTriangular
from neula.engines.reduction import HERE, Reduction


# item: Q LSQR
def lsqr(
    operator: LeastSquaresOperator,
    r: UpperTriangular,
    b: torch.Tensor,
    *,
    stop: Stop,
    max_iterations: int,
    gradient: torch.Tensor | None = None,
    trace: Tracer | None = None,
) -> InnerSolution:
    """Minimize ``||A x - b||`` from x = 0; parameters and result as those of :func:`cgls`.

    The bidiagonalization yields ``||R^-T A^T r||`` but not ``A^T r``, so the first bound of ``stop`` counts.
    """
    over_rows = operator.over_rows
    beta, u = _normalize(b, over_rows)
    gradient = operator.rmatmul(b) if gradient is None else gradient
    alpha, v = _normalize(solve_rt(r, ratio(gradient, beta)))
    w, y = v, torch.zeros_like(v)
    phi, rho_bar = beta, alpha
    for iteration in range(1, max_iterations + 1):
        beta, u = _normalize(operator.matmul(solve_r(r, v)) - alpha * u, over_rows)
        alpha, v = _normalize(solve_rt(r, operator.rmatmul(u)) - beta * v)
        rho = torch.hypot(rho_bar, beta)
        cosine, sine = ratio(rho_bar, rho), ratio(beta, rho)
        theta, rho_bar = sine * alpha, -cosine * alpha
        y = y + ratio(cosine * phi, rho) * w
        phi = sine * phi
        w = v - ratio(theta, rho) * w
        reduced = phi * alpha * cosine.abs()
        if trace is not None:
            trace(TraceEvent("iteration", value=float(reduced.max())))
        if bool(over_rows.agree((reduced <= stop.preconditioned).all())):
            return InnerSolution(solve_r(r, y), iteration)
    return InnerSolution(solve_r(r, y), max_iterations)


def _normalize(x: torch.Tensor, over_rows: Reduction = HERE) -> tuple[torch.Tensor, torch.Tensor]:
    (norm,) = over_rows.norms(x)
    return norm, ratio(x, norm)
