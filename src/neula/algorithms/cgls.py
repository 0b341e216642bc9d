"""CGLS with R as right preconditioner.

Zhang, Baharlouei, Wu (HPDC 2020), Algorithm 3, with what it leaves out: a stopping test, several right-hand
sides at once, and x in the variables of the problem (the paper's x is ``R x``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from neula.algorithms.condition import solve_r, solve_rt
from neula.algorithms.operators import LeastSquaresOperator

HOPELESS_AFTER = 8
"""Iterations after which a rate of convergence can be trusted enough to give up on it."""


@dataclass(frozen=True)
class InnerSolution:
    """Attributes: the correction ``x`` (n, k), the iterations spent, and whether they did what was asked."""

    x: torch.Tensor
    iterations: int
    reduced: bool


def cgls(
    operator: LeastSquaresOperator,
    r: torch.Tensor,
    b: torch.Tensor,
    *,
    reduction: float,
    max_iterations: int,
) -> InnerSolution:
    """Minimize ``||A x - b||`` from x = 0 for all columns of b together: one product an iteration.

    Parameters
    ----------
    operator : LeastSquaresOperator
        A, shape (m, n), float64.
    r : Tensor, shape (n, n)
        Upper triangular, with ``A R^-1`` well conditioned.
    b : Tensor, shape (m, k)
    reduction : float
        Stop when ``||R^-T A^T (b - A x)||`` has fallen to this part of its first value in every column.
    max_iterations : int
        Stop here in any case, or as soon as the rate of convergence says that it will not be met.
    """
    residual = b.clone()
    s = solve_rt(r, operator.rmatmul(residual))
    x = torch.zeros_like(s)
    p = s
    gamma = _squares(s)
    target = gamma * reduction**2
    start = gamma
    for iteration in range(1, max_iterations + 1):
        direction = solve_r(r, p)
        q = operator.matmul(direction)
        alpha = _ratio(gamma, _squares(q))
        x += alpha * direction
        residual -= alpha * q
        s = solve_rt(r, operator.rmatmul(residual))
        gamma, before = _squares(s), gamma
        worst = float(_ratio(gamma, start).max())
        if bool((gamma <= target).all()):
            return InnerSolution(x, iteration, True)
        if not math.isfinite(worst) or _hopeless(worst, reduction**2, iteration, max_iterations):
            return InnerSolution(x, iteration, False)
        p = s + _ratio(gamma, before) * p
    return InnerSolution(x, max_iterations, False)


def _hopeless(progress: float, target: float, iteration: int, max_iterations: int) -> bool:
    """Whether the mean rate so far needs more than twice the iterations that are allowed."""
    if iteration < HOPELESS_AFTER:
        return False
    if progress >= 1.0:
        return True
    return iteration * math.log(target) / math.log(progress) > 2 * max_iterations


def _squares(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum(0)


def _ratio(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a / b`` where b is positive: a column that is done stays where it is."""
    return torch.where(b > 0, a / b, 0.0)
