"""Small least-squares problems of a shape that was solved before: the core, the verdict, the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from neula.certificates.verdict import Evidence
from neula.kernels import seminormal_host
from neula.kernels.core import DTYPES, core
from neula.kernels.seminormal_host import NUMBERS, SolutionMethod
from neula.pipeline.call import Call
from neula.pipeline.plans import Given, fields_of_single, returned
from neula.pipeline.result import LstsqResult
from neula.pipeline.result.deferred import Later
from neula.pipeline.shapes import BatchedProblem
from neula.problems.least_squares.by_kernel import LABELS, kernel_for, most_right, takes
from neula.problems.least_squares.fit import LinearFit
from neula.problems.least_squares.problem import LeastSquaresOptions, LeastSquaresSolutions, in_words

if TYPE_CHECKING:
    from neula._core import Core

ZERO = LeastSquaresSolutions.names.index("zero")
"""Where the core says that a solution is zero, which the chain looks at."""


class LeastSquaresPlan:
    """What single plain problems with k right-hand sides are solved with.

    Parameters
    ----------
    m, n, k : int
    options : LeastSquaresOptions
        Without damping and weights.
    fit_of : callable, optional
        From operands, x and norms of residuals to what statistics are made of.
    """

    def __init__(
        self,
        m: int,
        n: int,
        k: int,
        options: LeastSquaresOptions,
        fit_of: Callable[..., LinearFit | None] = lambda *_: None,
    ) -> None:
        self.options, self._shape, self._fit_of = options, (n, k), fit_of
        solve = kernel_for(m, n, options)
        assert solve is not None
        self._solve = solve
        self._limits = replace(options.limits((m, n)), forward_error=options.first_error(m, n))
        self._size, self._full_rank = seminormal_host.size_of(1, n, k), options.full_rank(m, n)

    def solved(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, list[float]] | None:
        """X, shape (n, k), and what is known of it; None where it is not accepted."""
        (n, k), written = self._shape, np.empty(self._size)
        if not self._solve(a, b, written):
            return None
        numbers = written[n * k :].tolist()
        if numbers[ZERO] or not self._limits.accept(Evidence.from_numbers(numbers)):
            return None
        return written[: n * k].reshape(n, k), numbers

    def __call__(
        self, given: Given, fit_of: Callable[..., LinearFit | None] | None = None
    ) -> LstsqResult[Any] | None:
        """The result; None where it is not accepted."""
        fit_of = fit_of or self._fit_of
        (a, b), k = given.arrays, self._shape[1]
        is_vector = b.ndim == 1
        found = self.solved(a, b[:, None] if is_vector else b)
        if found is None:
            return None
        x, numbers = found
        evidence = Evidence.from_numbers(numbers)
        condition, _, optimality, rank, _, steps, way = numbers[len(Evidence._fields) : len(NUMBERS)]
        backward, forward, condition = evidence.backward_error, evidence.forward_error, max(1.0, condition)
        errors, norms = numbers[len(NUMBERS) : len(NUMBERS) + k], numbers[len(NUMBERS) + k :]
        label, bound = LABELS[SolutionMethod(int(way))], self._limits.backward_error
        fields = fields_of_single(
            given,
            self.options,
            label,
            (backward, forward, condition),
            forward if is_vector else errors,
            lambda: in_words(bound, backward, forward),
        )
        wrap = given.wrap

        def fit() -> LinearFit | None:
            return fit_of(a, b, torch.from_numpy(x[None]), torch.from_numpy(np.array([norms])))

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


@lru_cache(maxsize=128)
def _plan(kernels: Core, m: int, n: int, k: int, options: LeastSquaresOptions) -> LeastSquaresPlan:
    """Made once for a core and what is asked of it."""
    return LeastSquaresPlan(m, n, k, options)


def solved_by_plan(
    call: Call, shapes: BatchedProblem, options: LeastSquaresOptions
) -> LstsqResult[Any] | None:
    """The result of one small plain problem on the host, where the core takes it and it is accepted."""
    a, b, kernels = shapes.a, shapes.b, core()
    special = options.damp or options.weights is not None or options.progress is not None
    if kernels is None or special or shapes.batch or a.ndim != 2 or not (a.is_cpu and b.is_cpu):
        return None
    (m, n), k = a.shape, b.shape[1]
    fits = a.dtype in DTYPES and b.dtype in DTYPES and 0 < k <= most_right(m, n)
    if not (fits and takes(m, n, options)):
        return None
    right = b[:, 0] if shapes.is_vector else b
    given = Given((a.numpy(), right.numpy()), call.first.wrap_array, call.begun)

    def fit_of(a: np.ndarray, b: np.ndarray, x: torch.Tensor, norms: torch.Tensor) -> LinearFit:
        return LinearFit(call, shapes, options, x, norms)

    return _plan(kernels, m, n, k, options)(given, fit_of)


class InversePlan:
    """What pseudoinverses of single m x n matrices are found with: solutions for the columns of an identity.

    Parameters
    ----------
    m, n : int
    options : LeastSquaresOptions
    """

    def __init__(self, m: int, n: int, options: LeastSquaresOptions) -> None:
        self.options, self._tall, (few, many) = options, m > n, sorted((m, n))
        self._plan, self._identity = LeastSquaresPlan(few, many, few, options), np.eye(few)

    def __call__(self, given: Given) -> Any | None:
        """The pseudoinverse; None where it is not accepted."""
        (a,) = given.arrays
        found = self._plan.solved(a.T if self._tall else a, self._identity)
        if found is None:
            return None
        return returned(given, np.ascontiguousarray(found[0].T) if self._tall else found[0], self.options)
