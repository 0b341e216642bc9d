"""Small systems of an order that was solved before: the core, the verdict, the result."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from neula.algorithms.elimination import compiled
from neula.certificates.verdict import Evidence
from neula.engines import FP64
from neula.kernels.core import core
from neula.pipeline.plans import Given, fields_of_single, returned
from neula.pipeline.result import SolveResult
from neula.problems.systems.by_kernel import label_of
from neula.problems.systems.problem import SystemsOptions, SystemsSolutions, in_words

UPDATES = len(SystemsSolutions.names)
"""Where the core says how many updates there were; the history follows."""


class SystemsPlan:
    """What single systems of order n with k right-hand sides are solved with.

    Parameters
    ----------
    n, k : int
    options : SystemsOptions
    """

    def __init__(self, n: int, k: int, options: SystemsOptions) -> None:
        kernels = core()
        assert kernels is not None
        self.options, self._n, self._k = options, n, k
        self._solve, self._count = kernels.solve_systems, compiled.count_of(kernels)
        self._asked = options.positive, options.dtype == torch.float32, 1
        self._setting = compiled.setting_for(kernels, n, options.digits)
        self._limits, self._label = options.limits(n), label_of(FP64, options)

    def __call__(self, given: Given) -> SolveResult[Any] | None:
        """The result; None where it is not accepted."""
        (a, b), k, limits = given.arrays, self._k, self._limits
        x, errors, numbers = np.empty((self._n, k)), np.empty((1, k)), np.empty((self._count, 1))
        is_vector = b.ndim == 1
        if not self._solve(
            a, b[:, None] if is_vector else b, self._setting, x, errors, numbers, *self._asked
        ):
            return None
        of = numbers.ravel().tolist()
        _, _, refined, backward, forward, _, condition, largest, growth = of[:UPDATES]
        if not (limits.accept(Evidence.from_numbers(of)) and math.isfinite(largest)):
            return None
        updates, bound = int(of[UPDATES]), limits.backward_error
        fields = fields_of_single(
            given,
            self.options,
            self._label,
            (backward, forward, condition),
            forward if is_vector else errors[0].tolist(),
            lambda: in_words(refined, bound, forward, updates, growth),
        )
        fields |= {
            "x": returned(given, x[:, 0] if is_vector else x, self.options),
            "iterations": updates,
            "tolerance": bound,
            "history": (*of[UPDATES + 1 : UPDATES + 1 + updates], refined),
            "growth": growth,
            "method": self._label,
        }
        return SolveResult.from_fields(fields)
