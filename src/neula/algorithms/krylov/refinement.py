"""Iterative refinement of a least-squares solution, stopped by what is measured.

CGLS that is left running after convergence drifts away from the true residual, because it updates the
residual instead of computing it. So the outer loop computes residual and gradient anew in double precision,
measures the backward error, and lets CGLS (or LSQR) solve for an update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from neula.algorithms.krylov.cgls import InnerSolution, Stop, cgls
from neula.algorithms.krylov.driver import iterate
from neula.algorithms.krylov.operators import LeastSquaresOperator
from neula.algorithms.spectra.condition import solve_rt
from neula.algorithms.triangular.triangular import UpperTriangular
from neula.certificates.backward_error import Measures, Norms, Scale, norms_of
from neula.certificates.stagnation import improves

INNER_REDUCTION = 1e-8
"""What one inner solve is asked for: the square root of double precision, far from where CGLS drifts."""


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
        """Solve for an update."""


@dataclass
class RefinedLeastSquares:
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
    row_error : Tensor, shape (k,), or None
        Of a wide A the backward error with rows scaled to comparable size.
    """

    x: torch.Tensor
    measures: Measures
    residual_norm: torch.Tensor
    iterations: int = 0
    history: list[float] = field(default_factory=list)
    forward_error: torch.Tensor | None = None
    row_error: torch.Tensor | None = None


@dataclass(frozen=True)
class _LeastSquaresIterate:
    """A solution with its residual, ``A^T`` times that, and the norms of all."""

    x: torch.Tensor
    residual: torch.Tensor
    gradient: torch.Tensor
    norms: Norms


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
) -> RefinedLeastSquares:
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
    best = _BestSolutions(tolerance)
    history: list[float] = []

    def measured(x: torch.Tensor, residual: torch.Tensor, gradient: torch.Tensor) -> _LeastSquaresIterate:
        projected = solve_rt(r, gradient) / scale.smallest
        norms = norms_of(scale, b, x, residual, gradient, projected, operator.over_rows)
        return _LeastSquaresIterate(x, residual, gradient, norms)

    def goes_on(found: _LeastSquaresIterate) -> bool:
        known = found.norms.to_host(operator.over_rows)
        measures = known.measures(scale.norm)
        improved = best.take(found.x, measures, known.residual)
        history.append(float(measures.backward_error.max()))
        if on_restart is not None:
            on_restart(history[-1])
        # Zero, if that is the first x, is not an answer unless it is optimal.
        is_answer = start is not None or len(history) > 1 or not known.gradient.any()
        return improved and not (best.satisfied and is_answer)

    def update(found: _LeastSquaresIterate, left: int) -> tuple[_LeastSquaresIterate, int]:
        # Asking for more than the tolerance needs would have CGLS iterate on rounding errors.
        stop = _inner_stop(found.norms, scale, 0.5 * tolerance)
        step = inner(operator, r, found.residual, stop=stop, max_iterations=left, gradient=found.gradient)
        x = found.x + step.x
        return measured(x, *operator.normal(x, b)), step.iterations

    if start is None:
        first = measured(b.new_zeros(r.shape[0], b.shape[1]), b, operator.rmatmul(b))
    else:
        first = measured(start, *operator.normal(start, b))
    iterations = iterate(first, goes_on, update, max_iterations)
    measures, residual_norm = best.measures.to(b.device), best.residual_norm.to(b.device)
    return RefinedLeastSquares(best.x, measures, residual_norm, iterations, history)


def _inner_stop(norms: Norms, scale: Scale, tolerance: float) -> Stop:
    """What an inner solve should reach: the tolerance, or its share of the way there."""
    return Stop(
        preconditioned=scale.smallest
        * torch.maximum(INNER_REDUCTION * norms.projected, tolerance * norms.image),
        gradient=tolerance * scale.norm * norms.residual,
        scales=scale.columns,
    )


class _BestSolutions:
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
        if bool(better.all()):
            self.x = x
        elif bool(better.any()):
            self.x = torch.where(better.to(x.device), x, self.x)
        self.residual_norm = torch.where(better, residual_norm, self.residual_norm)
        self.measures = Measures(
            torch.where(better, measures.backward_error, self.measures.backward_error),
            torch.where(better, measures.optimality, self.measures.optimality),
        )
        before, self._worst = self._worst, (float(error.max()), float(optimality.max()))
        improved = any(map(improves, self._worst, before))
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
