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

from neula.algorithms.krylov.cgls import InnerSolution, Stop, cgls
from neula.algorithms.krylov.operators import LeastSquaresOperator
from neula.algorithms.spectra.condition import solve_rt
from neula.algorithms.triangular.triangular import UpperTriangular

INNER_REDUCTION = 1e-8
"""What one inner solve is asked for: the square root of double precision, far from where CGLS drifts."""

STAGNATION = 0.5
"""A restart that does not at least halve the backward error is the last one."""


class InnerSolver(Protocol):
    """CGLS or LSQR."""

    def __call__(
        self,
        operator: LeastSquaresOperator,
        r: UpperTriangular,
        b: torch.Tensor,
        *,
        stop: Stop,
        max_iterations: int,
        gradient: torch.Tensor | None = None,
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
    smallest : float
        Smallest singular value of ``A R^-1``, by which ``||R^-T A^T r||`` may be smaller than the projection
        of r on the range of A.
    """

    columns: torch.Tensor
    norm: float
    smallest: float = 1.0


@dataclass
class Measures:
    """Of each right-hand side: an upper bound on its backward error, and its optimality.

    Attributes
    ----------
    backward_error, optimality : Tensor, shape (k,)
    """

    backward_error: torch.Tensor
    optimality: torch.Tensor

    def to(self, device: torch.device) -> Measures:
        """The same on another device."""
        return Measures(self.backward_error.to(device), self.optimality.to(device))


@dataclass
class Norms:
    """Norms of each right-hand side from which all measures follow.

    Attributes
    ----------
    residual, gradient, projected : Tensor, shape (k,)
        ``||r||``, ``||D A^T r||`` and ``||P r||``, P the projector on the range of A.
    image : Tensor, shape (k,)
        ``||A D||_2 ||D^-1 x||``.
    b : Tensor, shape (k,)
    """

    residual: torch.Tensor
    gradient: torch.Tensor
    projected: torch.Tensor
    image: torch.Tensor
    b: torch.Tensor

    def to_host(self) -> Norms:
        """The same where decisions are made: a GPU is waited for once."""
        parts = (self.residual, self.gradient, self.projected, self.image, self.b)
        return Norms(*torch.stack(parts).cpu())

    def measures(self, norm: float | torch.Tensor) -> Measures:
        """Upper bounds on the normwise backward error of x, the smallest of three counting.

        ``norm`` is ``||A D||_2``. The perturbation ``E = -r r^T A / ||r||^2`` makes x exact and has norm
        ``||A^T r|| / ||r||`` (Stewart, 1977); changing b by the residual does so too; and the optimal
        perturbation is at most ``||P r|| / ||x||`` (Walden, Karlson, Sun, 1995).
        """
        optimality = over(self.gradient, norm * self.residual)
        consistent = over(self.residual, self.image + self.b)
        projected = over(self.projected, self.image)
        return Measures(torch.minimum(torch.minimum(optimality, consistent), projected), optimality)

    def stop(self, scale: Scale, tolerance: float) -> Stop:
        """What an inner solve should reach: the tolerance, or its share of the way there."""
        return Stop(
            preconditioned=scale.smallest
            * torch.maximum(INNER_REDUCTION * self.projected, tolerance * self.image),
            gradient=tolerance * scale.norm * self.residual,
            scales=scale.columns,
        )


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
    forward_error : Tensor, shape (k,), or None
        Bound on the relative error of x, where it was measured.
    """

    x: torch.Tensor
    measures: Measures
    residual_norm: torch.Tensor
    iterations: int = 0
    history: list[float] = field(default_factory=list)
    forward_error: torch.Tensor | None = None


def norms_of(
    scale: Scale,
    b: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    gradient: torch.Tensor,
    projected: torch.Tensor,
) -> Norms:
    """Norms of ``b``, ``x``, ``b - A x``, ``A^T (b - A x)`` and the projection of the residual.

    The projection on the range of A comes in coordinates: ``R^-T A^T r``, or ``U^T r`` with a basis U.
    """
    norm = torch.linalg.vector_norm
    return Norms(
        residual=norm(residual, dim=0),
        gradient=norm(gradient * scale.columns[:, None], dim=0),
        projected=norm(projected, dim=0),
        image=scale.norm * norm(x / scale.columns[:, None], dim=0),
        b=norm(b, dim=0),
    )


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

    Parameters
    ----------
    operator : LeastSquaresOperator
        A, shape (m, n), float64.
    r : UpperTriangular, shape (n, n)
        Preconditioner.
    b : Tensor, shape (m, k)
    scale : Scale
        What errors are measured against.
    tolerance : float
        Backward error at which to stop.
    max_iterations : int
        Inner iterations in total.
    start : Tensor, shape (n, k), optional
        Solutions that are known roughly; zero by default.
    inner : InnerSolver
        :func:`cgls` or :func:`lsqr`.
    on_restart : callable, optional
        Called with the backward error at every restart.
    """
    x = b.new_zeros(r.shape[0], b.shape[1]) if start is None else start
    residual, gradient = (b, operator.rmatmul(b)) if start is None else operator.normal(x, b)
    best = _Best(tolerance)
    history: list[float] = []
    iterations = 0
    while True:
        norms = norms_of(scale, b, x, residual, gradient, solve_rt(r, gradient) / scale.smallest)
        known = norms.to_host()
        measures = known.measures(scale.norm)
        improved = best.take(x, measures, known.residual)
        history.append(float(measures.backward_error.max()))
        if on_restart is not None:
            on_restart(history[-1])
        # Zero, if that is the first x, is not an answer unless it is optimal.
        done = best.satisfied and (start is not None or iterations > 0 or not known.gradient.any())
        if done or not improved or iterations >= max_iterations:
            break
        left = max_iterations - iterations
        # Asking for more than the tolerance needs would have CGLS iterate on rounding errors.
        stop = norms.stop(scale, 0.5 * tolerance)
        step = inner(operator, r, residual, stop=stop, max_iterations=left, gradient=gradient)
        iterations += step.iterations
        x = x + step.x
        residual, gradient = operator.normal(x, b)
    measures, residual_norm = best.measures.to(x.device), best.residual_norm.to(x.device)
    return Refined(best.x, measures, residual_norm, iterations, history)


class _Best:
    """The best solution so far of each right-hand side; measures and norms are on the host.

    Backward error counts first, down to the tolerance, then optimality, which is the stronger measure.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._worst = (math.inf, math.inf)

    def take(self, x: torch.Tensor, measures: Measures, residual_norm: torch.Tensor) -> bool:
        """Keep what is no worse than before; tell whether the worst column has improved enough to go on."""
        first = math.isinf(self._worst[0])
        if first:
            self.x, self.measures, self.residual_norm = x, measures, residual_norm
        error, optimality = self._merits(measures)
        old_error, old_optimality = self._merits(self.measures)
        better = (error < old_error) | ((error == old_error) & (optimality <= old_optimality))
        if bool(better.any()):
            self.x = torch.where(better.to(x.device), x, self.x)
        self.residual_norm = torch.where(better, residual_norm, self.residual_norm)
        self.measures = Measures(
            torch.where(better, measures.backward_error, self.measures.backward_error),
            torch.where(better, measures.optimality, self.measures.optimality),
        )
        before, self._worst = self._worst, (float(error.max()), float(optimality.max()))
        improved = any(new < STAGNATION * old for new, old in zip(self._worst, before, strict=True))
        self._worst = (min(self._worst[0], before[0]), min(self._worst[1], before[1]))
        return improved

    @property
    def satisfied(self) -> bool:
        """Whether every column meets the tolerance in both measures."""
        return all(bool((merit <= self._tolerance).all()) for merit in self._merits(self.measures))

    def _merits(self, measures: Measures) -> tuple[torch.Tensor, torch.Tensor]:
        both = (measures.backward_error, measures.optimality)
        error, optimality = (torch.nan_to_num(m, nan=math.inf).clamp_min(self._tolerance) for m in both)
        return error, optimality


def over(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a / b``, 0 where both vanish."""
    return (a / b).masked_fill(a == 0, 0.0)
