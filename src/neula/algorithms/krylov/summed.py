"""Refinement of a least-squares problem whose rows are not in memory: sums over all rows are what is known.

The steps are those of :mod:`neula.algorithms.krylov.batched_lstsq`. Residuals and gradients come from passes
over blocks of rows (:mod:`neula.algorithms.krylov.streamed_lstsq`), or from sums that were kept
(:mod:`neula.algorithms.krylov.held_sums`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from neula.algorithms.krylov.batched_lstsq import lengths
from neula.algorithms.krylov.coordinates import Coordinates
from neula.algorithms.krylov.doubled_refinement import DoubledEvaluation
from neula.certificates.backward_error import Measures, Norms
from neula.certificates.forward_error import left_by_update


class SummedGradient(NamedTuple):
    """Sums over all rows for a solution x."""

    # Shape (r, k): P^H A^H (b - A x) with the projector P of the coordinates: the projection of the residual
    # on the range of A.
    projected: torch.Tensor
    rate: float  # ||I - W^H W||_F from above
    rest: torch.Tensor  # shape (k,): norm of the residual without that projection
    b: torch.Tensor  # shape (k,): norm of the right-hand side
    floor: torch.Tensor  # shape (k,): bound on the errors of the projection


class SummedProblem:
    """A problem that is refined by sums over its rows: a batch of one.

    Right-hand sides are given by their coordinates, ``Q^H b`` or ``R^-H A^H b``. Each step is one evaluation
    of the sums, from which all that is known after the update follows, too. All right-hand sides are updated
    by each step, as with a tolerance of 0.

    Parameters
    ----------
    coordinates : Coordinates
    sums : callable
        Maps x, an unevaluated sum of two tensors of shape (n, k), to a :class:`SummedGradient`.

    Attributes
    ----------
    rate : Tensor, shape (1,)
        Infinite before the first step, which measures it.
    found : SummedGradient
        That of the last step.
    """

    def __init__(
        self, coordinates: Coordinates, sums: Callable[[torch.Tensor, torch.Tensor], SummedGradient]
    ) -> None:
        self.coordinates, self._sums = coordinates, sums
        self.rate = coordinates.columns.new_full((1,), torch.inf)
        self.found: SummedGradient

    def start(self, b: torch.Tensor) -> torch.Tensor:
        return self.coordinates.inverse @ b

    def solution(self, unknowns: torch.Tensor) -> torch.Tensor:
        return unknowns

    def size(self, unknowns: torch.Tensor) -> torch.Tensor:
        return self.coordinates.length(unknowns)

    def evaluate(self, b: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> DoubledEvaluation:
        """``C P^H A^H r``; in place of the residual its norm, shape (1, k)."""
        of, self.found = self.coordinates, self._sums(high[0], low[0])
        self.rate.fill_(self.found.rate)
        left = of.inverse_norm * (self._left + self.found.floor)
        return DoubledEvaluation((of.inverse @ self.found.projected)[None], left[None], self.found.rest[None])

    @property
    def _left(self) -> torch.Tensor:
        """Norm of the projected residual after the last update, without errors of the sums; shape (k,)."""
        return left_by_update(self.found.rate) * lengths(self.found.projected[None])[0]

    def updated(
        self, b: torch.Tensor, unknowns: torch.Tensor, residual: torch.Tensor, update: torch.Tensor
    ) -> tuple[torch.Tensor, Measures]:
        """The norm of the residual that the last update leaves, shape (1, k), and what it says."""
        of, left = self.coordinates, self._left
        residual = torch.hypot(residual, left)
        norms = Norms(residual, of.norm_bound * left, left, of.norm * self.size(unknowns), self.found.b)
        return residual, norms.measures(of.norm)
