"""Minimum-norm solution of a wide system, with R of its transpose as preconditioner.

Conjugate gradients on ``W^H W z = R^-H b`` with ``W = B R^-1``, ``B = A^H`` (Craig's method, also CGNE: Saad,
"Iterative Methods for Sparse Linear Systems", section 8.3). Every update lies in the range of B, so x stays
the minimum-norm solution.
"""

from __future__ import annotations

from functools import partial

import torch

from neula.algorithms.krylov.cgls import InnerSolution, ratio
from neula.algorithms.krylov.driver import BestSolutions, Evaluated, Refined, iterate
from neula.algorithms.krylov.refinement import INNER_REDUCTION
from neula.algorithms.spectra.condition import solve_r, solve_rt
from neula.algorithms.triangular.triangular import UpperTriangular
from neula.certificates.backward_error import Measures, Scale
from neula.certificates.residuals import goes_on
from neula.kernels.magnitudes import squares
from neula.kernels.small_problems.refining import over


def craig(
    b_matrix: torch.Tensor, r: UpperTriangular, rhs: torch.Tensor, *, reduction: float, max_iterations: int
) -> InnerSolution:
    """Minimize ``||x||`` subject to ``B^H x = rhs`` for all columns of rhs together, shape (m, k).

    B, shape (n, m) with n >= m, is in double precision, and ``B R^-1`` well conditioned. Stop when ``||R^-H
    (rhs - B^H x)||`` has fallen to the part ``reduction`` of its first value in every column.
    """
    residual = rhs.clone()
    s = solve_rt(r, residual)
    p = s
    gamma = squares(s).sum(0)
    target = gamma * reduction**2
    x = rhs.new_zeros(b_matrix.shape[0], rhs.shape[1])
    for iteration in range(1, max_iterations + 1):
        q = b_matrix @ solve_r(r, p)
        alpha = ratio(gamma, squares(q).sum(0))
        x += alpha * q
        residual -= alpha * (b_matrix.mH @ q)
        s = solve_rt(r, residual)
        gamma, before = squares(s).sum(0), gamma
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
    rows: Scale,
    tolerance: float,
    max_iterations: int,
) -> Refined:
    """Repeat :func:`craig` on the true residual until the measured backward error meets the tolerance.

    The backward error is ``||b - A x|| / (||B|| ||D x|| + ||b||)`` (Rigal and Gaches, 1967), as for other
    shapes. It is to be as small with rows of A scaled to comparable size, and x not: that bounds the error of
    x. ``scale`` is that of the columns of A, ``rows`` that of its rows.
    """
    norm = partial(torch.linalg.vector_norm, dim=0)

    def evaluated(x: torch.Tensor) -> Evaluated:
        residual = rhs - b_matrix.mH @ x
        size = norm(residual)
        error = over(size, scale.norm * norm(x / scale.columns[:, None]) + norm(rhs))
        of_residual, of_rhs = (norm(v * rows.columns[:, None]) for v in (residual, rhs))
        row_error = over(of_residual, rows.norm * norm(x) + of_rhs)
        return Evaluated((x,), torch.stack([error, row_error, size]), (x, residual))

    def largest(numbers: torch.Tensor) -> torch.Tensor:
        return numbers[:2].amax(0, keepdim=True)

    def improves(errors: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return goes_on(errors.max(), before.max(), tolerance).expand(rhs.shape[1])

    def update(best: BestSolutions, _: torch.Tensor, left: int) -> tuple[Evaluated, int]:
        x, residual = best.latest.state
        step = craig(b_matrix, r, residual, reduction=INNER_REDUCTION, max_iterations=left)
        return evaluated(x + step.x), step.iterations

    first, history = evaluated(rhs.new_zeros(b_matrix.shape[0], rhs.shape[1])), list[float]()
    for best in iterate(first, update, improves, errors_of=largest, max_iterations=max_iterations):
        history.append(float(largest(best.latest.numbers).max()))
    error, row_error, size = best.numbers.to(rhs.device)
    measures = Measures(error, error)
    return Refined(
        best.vectors[0], measures, size, row_error=row_error, iterations=best.iterations, history=history
    )
