"""Iterative refinement of a least-squares solution, stopped by what is measured.

CGLS that is left running after convergence drifts away from the true residual, because it updates the
residual instead of computing it. So the outer loop computes residual and gradient anew in double precision,
measures the backward error, and lets CGLS (or LSQR) solve for a correction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from neula.algorithms.cgls import InnerSolution, cgls
from neula.algorithms.condition import solve_rt
from neula.algorithms.operators import LeastSquaresOperator

INNER_REDUCTION = 1e-8
"""What one inner solve is asked for: the square root of double precision, far from where CGLS drifts."""

STAGNATION = 0.5
"""A restart that does not at least halve the backward error is the last one."""


class InnerSolver(Protocol):
    """CGLS or LSQR."""

    def __call__(
        self,
        operator: LeastSquaresOperator,
        r: torch.Tensor,
        b: torch.Tensor,
        *,
        reduction: float,
        max_iterations: int,
    ) -> InnerSolution:
        """Solve for a correction."""


@dataclass(frozen=True)
class Scale:
    """Norms against which errors are measured.

    Attributes
    ----------
    columns : Tensor, shape (n,)
        Column scales D: every measure is that of the problem ``min ||(A D) y - b||``, so that a column in
        small units counts as much as one in large units.
    norm : float
        ``||A D||_2``.
    """

    columns: torch.Tensor
    norm: float


@dataclass
class Measures:
    """Backward error of each right-hand side, and its optimality."""

    backward_error: torch.Tensor
    optimality: torch.Tensor


@dataclass
class Refined:
    """Outcome of :func:`refine`.

    Attributes
    ----------
    x : Tensor, shape (n, k)
    measures : Measures
    residual_norm : Tensor, shape (k,)
    iterations : int
        Inner iterations in total.
    history : list of float
        Largest backward error of all right-hand sides at each restart.
    """

    x: torch.Tensor
    measures: Measures
    residual_norm: torch.Tensor
    iterations: int = 0
    history: list[float] = field(default_factory=list)


def measure(
    r: torch.Tensor,
    b: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    gradient: torch.Tensor,
    scale: Scale,
) -> Measures:
    """Upper bounds on the normwise backward error of ``x``, the smallest of three counting.

    The perturbation ``E = -r r^T A / ||r||^2`` makes x exact and has norm ``||A^T r|| / ||r||`` (Stewart,
    1977); changing b by the residual does so too; and the optimal perturbation is at most
    ``||P r|| / ||x||``, P the projector on the range of A (Walden, Karlson, Sun, 1995), computed as
    ``||R^-T A^T r||``.

    Parameters
    ----------
    r : Tensor, shape (n, n)
        R of the preconditioner.
    b, x, residual, gradient : Tensor
        Right-hand sides, solutions, ``b - A x`` and ``A^T (b - A x)``, one column each.
    scale : Scale
    """
    norm = torch.linalg.vector_norm
    norm_r = norm(residual, dim=0)
    norm_ax = scale.norm * norm(x / scale.columns[:, None], dim=0)
    gradient_scaled = norm(gradient * scale.columns[:, None], dim=0)
    optimality = _over(gradient_scaled, scale.norm * norm_r)
    consistent = _over(norm_r, norm_ax + norm(b, dim=0))
    projected = _over(norm(solve_rt(r, gradient), dim=0), norm_ax)
    return Measures(torch.minimum(torch.minimum(optimality, consistent), projected), optimality)


def refine(
    operator: LeastSquaresOperator,
    r: torch.Tensor,
    b: torch.Tensor,
    *,
    scale: Scale,
    tolerance: float,
    max_iterations: int,
    inner: InnerSolver = cgls,
    x0: torch.Tensor | None = None,
    probes: int = 0,
    on_restart: Callable[[float], None] | None = None,
) -> Refined:
    """Solve ``min ||A x - b||`` to a measured backward error, or as far as it goes.

    Parameters
    ----------
    operator : LeastSquaresOperator
        A, shape (m, n), float64.
    r : Tensor, shape (n, n)
        Preconditioner, upper triangular, float64.
    b : Tensor, shape (m, k)
    scale : Scale
        What errors are measured against.
    tolerance : float
        Backward error at which to stop.
    max_iterations : int
        Inner iterations in total.
    inner : InnerSolver
        :func:`cgls` or :func:`lsqr`.
    x0 : Tensor, shape (n, k), optional
        First approximation, zero by default.
    probes : int
        The last so many columns of b are refined along, but nobody waits for them.
    on_restart : callable, optional
        Called with the backward error at every restart.
    """
    x = torch.zeros(r.shape[0], b.shape[1], dtype=b.dtype, device=b.device) if x0 is None else x0.clone()
    best: Refined | None = None
    history: list[float] = []
    iterations = 0
    wanted = slice(0, b.shape[1] - probes)
    while True:
        residual = b - operator.matmul(x)
        measures = measure(r, b, x, residual, operator.rmatmul(residual), scale)
        worst = float(measures.backward_error[wanted].max())
        history.append(worst)
        if on_restart is not None:
            on_restart(worst)
        improved = best is None or worst < STAGNATION * min(history[:-1])
        if best is None or worst < min(history[:-1]) or not math.isfinite(history[0]):
            best = Refined(x, measures, torch.linalg.vector_norm(residual, dim=0))
        if worst <= tolerance or not improved or not math.isfinite(worst) or iterations >= max_iterations:
            break
        step = inner(
            operator, r, residual, reduction=INNER_REDUCTION, max_iterations=max_iterations - iterations
        )
        iterations += step.iterations
        x = x + step.x
    best.iterations, best.history = iterations, history
    return best


def _over(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a / b``, 0 where both vanish."""
    return torch.where(a == 0, 0.0, a / b)
