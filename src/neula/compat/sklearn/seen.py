"""Rows that come in parts: their means, and a fit of what differs from these, held open.

T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances", COMPSTAT 1982: sums of squares of deviations add up, with one more term for the distance of the
means. In least squares that term is one more row.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

import neula
from neula.compat.sklearn.data import TrainingData

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Seen:
    """Sums over all rows so far.

    Means are kept as sums of two numbers, of which only the second one changes: rounding errors of a mean
    that is far larger than the deviations would be those of the distance of two means.
    """

    # Of their deviations from the means; of the rows themselves without an intercept. Never changed.
    held: neula.LeastSquares
    weight: float  # sum of their weights
    origin: Pair  # means of x and y of the first rows; zeros without an intercept
    apart: Pair  # term to add for all rows
    centred: bool  # whether there is an intercept

    @classmethod
    def begin(cls, data: TrainingData, engine: Any, *, centred: bool) -> Seen:
        """The first ones, which say how large the columns are, and where the fit is kept."""
        sizes = torch.linalg.vector_norm(data.x, dim=0) / max(1, len(data.x)) ** 0.5
        sizes = torch.where(sizes > 0, sizes, data.x_mean.abs())
        where = data.x.device.type if engine == "auto" else engine
        held = neula.LeastSquares(data.x.shape[1], scales=torch.where(sizes > 0, sizes, 1.0), engine=where)
        held.update(data.x, data.y, weights=data.weights)
        return cls(held, data.total, data.means, data.left, centred)

    def plus(self, data: TrainingData) -> Seen:
        """Add rows."""
        held, total = copy(self.held), self.weight + data.total
        if not self.centred:
            held.update(data.x, data.y, weights=data.weights)
            return replace(self, held=held, weight=total)
        part = data.total / total if total else 0.0
        parts = zip(self.origin, self.apart, data.means, data.left, strict=True)
        steps = [(mean - old.to(mean)) + (left - far.to(left)) for old, far, mean, left in parts]
        last = (((1 - part) * data.total) ** 0.5 * step[None] for step in steps)
        weights = None if data.weights is None else torch.cat([data.weights, data.weights.new_ones(1)])
        joined: Any = zip((data.x, data.y), last, strict=True)
        held.update(*map(torch.cat, joined), weights=weights)
        x, y = (far.to(step) + part * step for far, step in zip(self.apart, steps, strict=True))
        return replace(self, held=held, weight=total, apart=(x, y))

    @property
    def means(self) -> Pair:
        """Means of x and of y."""
        return self.origin[0] + self.apart[0], self.origin[1] + self.apart[1]

    def solve(self, damp: float, **how: Any) -> neula.LstsqResult[Any]:
        """The fit of all rows: the minimum-norm solution if they are too few."""
        held, missing = self.held, self.held.n - self.held.rows
        if missing > 0:  # rows of zeros change nothing
            held = copy(held)
            zeros = torch.zeros(missing, held.n, dtype=torch.float64, device=self.origin[0].device)
            held.update(zeros, zeros.new_zeros(missing, *self.origin[1].shape))
        return held.solve(damp=damp, accuracy=how["accuracy"])
