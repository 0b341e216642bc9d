"""Minimum-norm solution of a wide system, with R of its transpose as preconditioner.

Conjugate gradients on ``W^T W z = R^-T b`` with ``W = B R^-1``, ``B = A^T`` (Craig's method, also CGNE: Saad,
"Iterative Methods for Sparse Linear Systems", section 8.3). Every correction lies in the range of B, so x
stays the solution of minimum norm.
"""

from __future__ import annotations

import torch

from neula.algorithms.krylov.cgls import InnerSolution, ratio
from neula.algorithms.krylov.refinement import INNER_REDUCTION, STAGNATION, Measures, Refined, Scale, over
from neula.algorithms.spectra.condition import solve_r, solve_rt
from neula.algorithms.triangular.triangular import UpperTriangular


def craig(
    b_matrix: torch.Tensor, r: UpperTriangular, rhs: torch.Tensor, *, reduction: float, max_iterations: int
) -> InnerSolution:
    """Minimize ``||x||`` subject to ``B^T x = rhs`` for all columns of rhs together.

    Parameters
    ----------
    b_matrix : Tensor, shape (n, m), n >= m
        B, float64.
    r : UpperTriangular, shape (m, m)
        With ``B R^-1`` well conditioned.
    rhs : Tensor, shape (m, k)
    reduction : float
        Stop when ``||R^-T (rhs - B^T x)||`` has fallen to this part of its first value in every column.
    max_iterations : int
    """
    residual = rhs.clone()
    s = solve_rt(r, residual)
    p = s
    gamma = s.square().sum(0)
    target = gamma * reduction**2
    x = rhs.new_zeros(b_matrix.shape[0], rhs.shape[1])
    for iteration in range(1, max_iterations + 1):
        q = b_matrix @ solve_r(r, p)
        alpha = ratio(gamma, q.square().sum(0))
        x += alpha * q
        residual -= alpha * (b_matrix.T @ q)
        s = solve_rt(r, residual)
        gamma, before = s.square().sum(0), gamma
        if bool((gamma <= target).all()):
            return InnerSolution(x, iteration)
        p = s + ratio(gamma, before) * p
    return InnerSolution(x, max_iterations)


def refine_minimum_norm(
    b_matrix: torch.Tensor,
    r: UpperTriangular,
    rhs: torch.Tensor,
    *,
    scale: Scale,
    tolerance: float,
    max_iterations: int,
) -> Refined:
    """Repeat :func:`craig` on the true residual until the measured backward error meets the tolerance.

    The backward error is ``||b - A x|| / (||A|| ||x|| + ||b||)``, rows of A scaled to comparable size (Rigal
    and Gaches, 1967).
    """
    x = rhs.new_zeros(b_matrix.shape[0], rhs.shape[1])
    history: list[float] = []
    iterations = 0
    best: Refined | None = None
    while True:
        residual = rhs - b_matrix.T @ x
        scaled = [torch.linalg.vector_norm(v * scale.columns[:, None], dim=0) for v in (residual, rhs)]
        size = scale.norm * torch.linalg.vector_norm(x, dim=0) + scaled[1]
        error = over(scaled[0], size)
        history.append(float(error.max()))
        stagnates = best is not None and not history[-1] < STAGNATION * min(history[:-1])
        if best is None or history[-1] < min(history[:-1]):
            best = Refined(x, Measures(error, error), torch.linalg.vector_norm(residual, dim=0))
        if history[-1] <= tolerance or stagnates or iterations >= max_iterations:
            break
        step = craig(
            b_matrix, r, residual, reduction=INNER_REDUCTION, max_iterations=max_iterations - iterations
        )
        iterations += step.iterations
        x = x + step.x
    best.iterations, best.history = iterations, history
    return best
