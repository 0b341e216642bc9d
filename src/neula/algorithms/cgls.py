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

PATIENCE = 3
"""Iterations without a new smallest ``||R^-T A^T r||`` after which only rounding errors are left; and half as
many more as it took to get there, since slow convergence is not monotone."""


@dataclass(frozen=True)
class Stop:
    """When a column is done: as soon as one of its two norms is small enough.

    Attributes
    ----------
    preconditioned : Tensor, shape (k,)
        For ``||R^-T A^T r||``, which is what CGLS reduces.
    gradient : Tensor, shape (k,), or float
        For ``||D A^T r||``, whose rounding errors R^-T does not amplify.
    scales : Tensor, shape (n,), or float
        The diagonal of D.
    """

    preconditioned: torch.Tensor
    gradient: torch.Tensor | float = 0.0
    scales: torch.Tensor | float = 1.0

    def done(self, s: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Which columns are done, given their ``R^-T A^T r`` and ``A^T r``."""
        scaled = (gradient.T * self.scales).T
        return (_norms(s) <= self.preconditioned) | (_norms(scaled) <= self.gradient)


@dataclass(frozen=True)
class InnerSolution:
    """A correction, and what it cost.

    Attributes
    ----------
    x : Tensor, shape (n, k)
    iterations : int
    smallest : float
        Estimate from above of the smallest singular value of ``A R^-1``, from the coefficients of CGLS for
        the first column; NaN where the solver gives none.
    """

    x: torch.Tensor
    iterations: int
    smallest: float = math.nan


def cgls(
    operator: LeastSquaresOperator,
    r: torch.Tensor,
    b: torch.Tensor,
    *,
    stop: Stop,
    max_iterations: int,
    gradient: torch.Tensor | None = None,
) -> InnerSolution:
    """Minimize ``||A x - b||`` from x = 0 for all columns of b together: one product an iteration.

    Parameters
    ----------
    operator : LeastSquaresOperator
        A, shape (m, n), float64.
    r : Tensor, shape (n, n)
        Upper triangular, with ``A R^-1`` well conditioned.
    b : Tensor, shape (m, k)
    stop : Stop
        When a column is done.
    max_iterations : int
        Stop here in any case, or as soon as the rate of convergence says that it will not be enough.
    gradient : Tensor, shape (n, k), optional
        ``A^T b`` where it is known already.
    """
    gradient = operator.rmatmul(b) if gradient is None else gradient
    residual = b.clone()
    s = solve_rt(r, gradient)
    x = torch.zeros_like(s)
    p = s
    gamma = start = s.square().sum(0)
    done = gamma == 0
    progress = [1.0]
    lanczos = _Lanczos()
    for _ in range(max_iterations):
        direction = solve_r(r, p)
        q = operator.matmul(direction)
        # A column that is done stays as it is: further steps would only add rounding errors.
        alpha = torch.where(done, 0.0, ratio(gamma, q.square().sum(0)))
        x += alpha * direction
        residual -= alpha * q
        gradient = operator.rmatmul(residual)
        s = solve_rt(r, gradient)
        gamma, before = s.square().sum(0), gamma
        done |= stop.done(s, gradient)
        progress.append(float(torch.where(done, 0.0, ratio(gamma, start)).max()))
        wanted = float(ratio(stop.preconditioned.square(), start).min())
        if bool(done.all()) or _hopeless(progress, wanted, max_iterations):
            break
        beta = ratio(gamma, before)
        lanczos.add(alpha, beta)
        p = s + beta * p
    return InnerSolution(x, len(progress) - 1, lanczos.smallest_singular_value(alpha))


class _Lanczos:
    """The tridiagonal matrix behind CGLS: its eigenvalues approximate those of ``(A R^-1)^T (A R^-1)``, the
    extreme ones first (Golub and Van Loan, section 11.3).
    """

    def __init__(self) -> None:
        self._coefficients: list[torch.Tensor] = []

    def add(self, alpha: torch.Tensor, beta: torch.Tensor) -> None:
        """Step length and direction coefficient of an iteration, one a column; the first column counts."""
        self._coefficients.append(torch.stack([alpha[0], beta[0]]))

    def smallest_singular_value(self, last_alpha: torch.Tensor) -> float:
        """From the iterations so far, the last of which has no beta yet."""
        alpha, beta = torch.stack([*self._coefficients, last_alpha.new_tensor([0.0, 0.0])]).cpu().T
        alpha[-1] = last_alpha[0]
        if not bool((alpha > 0).all()):
            return math.nan
        diagonal = 1 / alpha
        diagonal[1:] += beta[:-1] / alpha[:-1]
        off = beta[:-1].sqrt() / alpha[:-1]
        tridiagonal = torch.diag(diagonal) + torch.diag(off, 1) + torch.diag(off, -1)
        return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(tridiagonal)[0])))


def _hopeless(progress: list[float], wanted: float, max_iterations: int) -> bool:
    """Whether the slowest column stagnates, or at its mean rate needs more iterations than are allowed.

    ``progress`` holds ``||R^-T A^T r||^2`` after each iteration, as a part of the first.
    """
    iteration, latest = len(progress) - 1, progress[-1]
    best = progress.index(min(progress))
    if not math.isfinite(latest) or iteration - best >= PATIENCE + best // 2:
        return True
    if iteration < HOPELESS_AFTER or wanted <= 0:
        return False
    return latest >= 1.0 or iteration * math.log(wanted) / math.log(latest) > max_iterations


def _norms(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dim=0)


def ratio(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a / b`` where b is positive: a column that is done stays where it is."""
    return torch.where(b > 0, a / b, 0.0)
