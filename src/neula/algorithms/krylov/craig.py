"""Minimum-norm solution of a wide system, with R of its transpose as preconditioner.

Conjugate gradients on ``W^T W z = R^-T b`` with ``W = B R^-1``, ``B = A^T`` (Craig's method, also CGNE: Saad,
"Iterative Methods for Sparse Linear Systems", section 8.3). Every update lies in the range of B, so x
stays the solution of minimum norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch

from neula.algorithms.krylov.cgls import InnerSolution, ratio
from neula.algorithms.krylov.driver import iterate
from neula.algorithms.krylov.refinement import INNER_REDUCTION, RefinedLeastSquares
from neula.algorithms.spectra.condition import solve_r, solve_rt
from neula.algorithms.triangular.triangular import UpperTriangular
from neula.certificates import stagnation
from neula.certificates.backward_error import Measures, Scale
from neula.kernels.refining import over


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


@dataclass(frozen=True)
class _CraigIterate:
    """A solution with its residual, and the backward error of each right-hand side, with rows as they are and
    scaled.
    """

    x: torch.Tensor
    residual: torch.Tensor
    error: torch.Tensor
    row_error: torch.Tensor


def refine_minimum_norm(
    b_matrix: torch.Tensor,
    r: UpperTriangular,
    rhs: torch.Tensor,
    *,
    scale: Scale,
    rows: Scale,
    tolerance: float,
    max_iterations: int,
) -> RefinedLeastSquares:
    """Repeat :func:`craig` on the true residual until the measured backward error meets the tolerance.

    The backward error is ``||b - A x|| / (||B|| ||D x|| + ||b||)`` (Rigal and Gaches, 1967), as for other
    shapes. It is to be as small with rows of A scaled to comparable size, and x not: that bounds the error of
    x.

    Parameters
    ----------
    b_matrix, r, rhs
        As for :func:`craig`.
    scale : Scale
        Of the columns of A.
    rows : Scale
        Of the rows of A.
    tolerance : float
    max_iterations : int
    """
    norm = partial(torch.linalg.vector_norm, dim=0)
    history: list[float] = []
    best: RefinedLeastSquares | None = None

    def goes_on(found: _CraigIterate) -> bool:
        nonlocal best
        smallest = min(history, default=math.inf)
        error = float(torch.maximum(found.error, found.row_error).max())
        history.append(error)
        if best is None or error < smallest:
            measures = Measures(found.error, found.error)
            best = RefinedLeastSquares(found.x, measures, norm(found.residual), row_error=found.row_error)
        return stagnation.goes_on(error, smallest, tolerance)

    def measured(x: torch.Tensor) -> _CraigIterate:
        residual = rhs - b_matrix.T @ x
        error = over(norm(residual), scale.norm * norm(x / scale.columns[:, None]) + norm(rhs))
        of_residual, of_rhs = (norm(v * rows.columns[:, None]) for v in (residual, rhs))
        return _CraigIterate(x, residual, error, over(of_residual, rows.norm * norm(x) + of_rhs))

    def update(found: _CraigIterate, left: int) -> tuple[_CraigIterate, int]:
        step = craig(b_matrix, r, found.residual, reduction=INNER_REDUCTION, max_iterations=left)
        return measured(found.x + step.x), step.iterations

    first = measured(rhs.new_zeros(b_matrix.shape[0], rhs.shape[1]))
    iterations = iterate(first, goes_on, update, max_iterations)
    assert best is not None
    best.iterations, best.history = iterations, history
    return best
