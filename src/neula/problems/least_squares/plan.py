"""Small least-squares problems of a shape that was solved before: the core, the verdict, the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from neula.certificates.verdict import Evidence
from neula.kernels import seminormal_host
from neula.kernels.seminormal_host import NUMBERS, SolutionMethod
from neula.pipeline.plans import Given, fields_of_single, returned
from neula.pipeline.result import LstsqResult
from neula.pipeline.result.deferred import Later
from neula.problems.least_squares.by_kernel import LABELS, kernel_for
from neula.problems.least_squares.fit import LinearFit
from neula.problems.least_squares.problem import LeastSquaresOptions, LeastSquaresSolutions, in_words

KNOWN = len(LeastSquaresSolutions.names)


class LeastSquaresPlan:
    """What single plain problems with k right-hand sides are solved with.

    Parameters
    ----------
    m, n, k : int
    options : LeastSquaresOptions
        Without damping and weights.
    fit_of : callable
        From operands, x and norms of residuals to what statistics are made of.
    """

    def __init__(
        self, m: int, n: int, k: int, options: LeastSquaresOptions, fit_of: Callable[..., LinearFit]
    ) -> None:
        self.options, self._shape, self._fit_of = options, (n, k), fit_of
        solve = kernel_for(m, n, options)
        assert solve is not None
        self._solve = solve
        self._limits = replace(options.limits((m, n)), forward_error=options.first_error(m, n))
        self._size, self._full_rank = seminormal_host.size_of(1, n, k), options.full_rank(m, n)

    def __call__(self, given: Given) -> LstsqResult[Any] | None:
        """The result; None where it is not accepted."""
        (a, b), (n, k), limits = given.arrays, self._shape, self._limits
        is_vector, written = b.ndim == 1, np.empty(self._size)
        if not self._solve(a, b[:, None] if is_vector else b, written):
            return None
        numbers = written[n * k :].tolist()
        condition, _, optimality, rank, zero, steps, way = numbers[len(Evidence._fields) : len(NUMBERS)]
        evidence = Evidence.from_numbers(numbers)
        if zero or not limits.accept(evidence):
            return None
        backward, forward, condition = evidence.backward_error, evidence.forward_error, max(1.0, condition)
        errors, norms = numbers[len(NUMBERS) : len(NUMBERS) + k], numbers[len(NUMBERS) + k :]
        label, bound, x = LABELS[SolutionMethod(way)], limits.backward_error, written[: n * k].reshape(n, k)
        fields = fields_of_single(
            given,
            self.options,
            label,
            (backward, forward, condition),
            forward if is_vector else errors,
            lambda: in_words(bound, backward, forward),
        )
        wrap = given.wrap

        def fit() -> LinearFit:
            return self._fit_of(a, b, torch.from_numpy(x[None]), torch.from_numpy(np.array([norms])))

        fields |= {
            "x": returned(given, x[:, 0] if is_vector else x, self.options),
            "iterations": int(steps),
            "tolerance": bound,
            "optimality": optimality,
            "residual_norm": norms if k > 1 else norms[0],
            "rank": int(rank),
            "full_rank": self._full_rank,
            "factorization": label,
            "ranks": Later(lambda: wrap(np.array(int(rank)))),
            "fit": Later(fit),
        }
        return LstsqResult.from_fields(fields)
