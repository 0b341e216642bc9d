"""Solves with the same factors, again and again: from the second one on an engine may play them back.

A solve by blocks is dozens of launches, for which a host takes longer than a GPU: 2 ms of one and 0.4 of the
other at order 10000 (on an H200).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from neula.algorithms.elimination.factorization import Factorization
from neula.engines import Engine

Operator = Callable[[torch.Tensor], torch.Tensor]


def recorded(function: Operator, engine: Engine) -> Operator:
    """A function that an engine records when it is called for a shape for the second time."""
    known: dict[torch.Size, Operator] = {}

    def called(x: torch.Tensor) -> torch.Tensor:
        if x.shape not in known:
            known[x.shape] = function
        elif known[x.shape] is function:
            known[x.shape] = engine.recorded(function, x)
        return known[x.shape](x)

    return called


class Recorded:
    """A factorization, the solves of which are recorded."""

    def __init__(self, factors: Factorization, engine: Engine) -> None:
        self._factors, self._engine = factors, engine
        self.solve = self._recorded(factors.solve)
        self.solve_transposed = self.solve
        if not factors.symmetric:
            self.solve_transposed = self._recorded(factors.solve_transposed)
        self._in_double: Recorded | None = None

    def _recorded(self, function: Operator) -> Operator:
        """Narrow factors solve for a few columns in the time of one: a single recording does for all."""
        solve, most = recorded(function, self._engine), self._engine.tuning.at_a_time
        if not self._factors.narrow or most < 2:
            return solve

        def together(b: torch.Tensor) -> torch.Tensor:
            missing = most - b.shape[1]
            return solve(b) if missing <= 0 else solve(pad(b, (0, missing)))[:, : b.shape[1]]

        return together

    @property
    def growth(self) -> float:
        return self._factors.growth

    @property
    def narrow(self) -> bool:
        return self._factors.narrow

    @property
    def symmetric(self) -> bool:
        return self._factors.symmetric

    def in_double(self) -> Recorded:
        """The recorder of solves in double precision; one for all callers, so that they share its graph."""
        if self._in_double is None:
            double = self._factors.in_double()
            if double is self._factors:
                return self  # kept nowhere: a circle might be dropped, with its graph, while one is captured
            self._in_double = Recorded(double, self._engine)
        return self._in_double
