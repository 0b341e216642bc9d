"""Least-squares problems of a shape that was solved before: the core or what is launched, the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from neula.algorithms.krylov.doubled_refinement import LaunchTuning, Pace
from neula.certificates.verdict import Evidence
from neula.kernels.core import DTYPES
from neula.kernels.small_problems import seminormal_host
from neula.kernels.small_problems.embedding import embedded, of_stacked_parts, stacked_parts
from neula.kernels.small_problems.seminormal_host import NUMBERS, SolutionMethod
from neula.pipeline.call import Call
from neula.pipeline.chain import Answer, Link
from neula.pipeline.plans import Extremes, Given, LaunchedPlan, accepted_solution, returned
from neula.pipeline.result import LstsqResult
from neula.pipeline.result.deferred import Later
from neula.pipeline.shapes import BatchedProblem, shape_of_one
from neula.problems.least_squares.by_core import LABEL, LABELS, kernel_for, takes, takes_right
from neula.problems.least_squares.links import chain_together
from neula.problems.least_squares.prepared import LeastSquaresProblems
from neula.problems.least_squares.problem import (
    LeastSquaresJudge,
    LeastSquaresOptions,
    LeastSquaresSolutions,
    in_words,
    norms_of,
)
from neula.problems.least_squares.regression import RegressionFit
from neula.problems.least_squares.together import in_one_launch, in_reach

FitOf = Callable[[Sequence[Any], torch.Tensor, torch.Tensor], RegressionFit | None]

ZERO = LeastSquaresSolutions.names.index("zero")
"""Where the core says that a solution is zero, which the chain checks."""


class LeastSquaresPlan:
    """A plan for single problems with k right-hand sides.

    ``options``: without weights. ``fit_of``: from the user's operands, x and norms of residuals to what
    statistics are made of.
    """

    def __init__(
        self, m: int, n: int, k: int, options: LeastSquaresOptions, fit_of: FitOf = lambda *_: None
    ) -> None:
        self.options, self._shape, self._fit_of = options, (n, k), fit_of
        self._damping = options.damp * np.eye(n) if options.damp else None
        solve = kernel_for(options.rows(m, n), n, options)
        assert solve is not None
        self._solve = solve
        self._limits = options.limits((m, n), options.first_error(m, n))
        self._order = (1 + options.dtype.is_complex) * n  # of unknowns in the core
        self._size, self._full_rank = seminormal_host.size_of(1, self._order, k), options.full_rank(m, n)

    def solved(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, list[float]] | None:
        """X, shape (n, k), and what is known of it; None where it is not accepted."""
        (n, k), written = self._shape, np.empty(self._size)
        if self._damping is not None:
            a, b = np.concatenate([a, self._damping]), np.concatenate([b, np.zeros((n, k))])
        if self._order > n:
            a, b = embedded(a), stacked_parts(b)
        if not self._solve(a, b, written):
            return None
        x, numbers = written[: self._order * k].reshape(self._order, k), written[self._order * k :].tolist()
        if numbers[ZERO] or not self._limits.accept(Evidence.from_numbers(numbers)):
            return None
        if self._order > n:
            rank = NUMBERS.index("rank")
            x, numbers[rank] = of_stacked_parts(x), numbers[rank] / 2
            if numbers[rank] % 1:  # half of a complex direction counts
                return None
        return x, numbers

    def __call__(self, given: Given) -> LstsqResult[Any] | None:
        """The result; None where it is not accepted."""
        (a, b), k = given.arrays, self._shape[1]
        found = self.solved(a, b[:, None] if b.ndim == 1 else b)
        if found is None:
            return None
        x, numbers = found
        evidence, wrap = Evidence.from_numbers(numbers), given.wrap
        condition, _, optimality, rank, _, steps, way = numbers[len(Evidence._fields) : len(NUMBERS)]
        backward, forward, condition = evidence.backward_error, evidence.forward_error, max(1.0, condition)
        errors, norms = numbers[len(NUMBERS) : len(NUMBERS) + k], numbers[len(NUMBERS) + k :]
        label, bound = LABELS[SolutionMethod(int(way))], self._limits.backward_error

        def fit() -> RegressionFit | None:
            return self._fit_of(
                given.operands, torch.from_numpy(x[None]), torch.from_numpy(np.array([norms]))
            )

        fields = {
            "backward_error": backward,
            "forward_error": forward,
            "condition": condition,
            "iterations": int(steps),
            "tolerance": bound,
            "optimality": optimality,
            "residual_norm": norms if k > 1 else norms[0],
            "rank": int(rank),
            "full_rank": self._full_rank,
            "factorization": label,
            "ranks": Later(lambda: wrap(np.array(int(rank)))),
            "_fit": Later(fit),
        }
        told = label, lambda: in_words(bound, backward, forward)
        return accepted_solution(LstsqResult, given, self.options, told, fields, x, errors)


class LaunchedLeastSquaresPlan(LaunchedPlan[LeastSquaresProblems, LeastSquaresSolutions, LstsqResult[Any]]):
    """A plan for problems whose first link launches its work.

    ``fit_of``: from the user's operands, x and norms of residuals to what statistics are made of.
    """

    result = LstsqResult
    judge: LeastSquaresJudge
    options: LeastSquaresOptions

    def __init__(
        self,
        link: Link[LeastSquaresProblems, LeastSquaresSolutions],
        judge: LeastSquaresJudge,
        options: LeastSquaresOptions,
        fit_of: FitOf,
    ) -> None:
        super().__init__(link, judge, options)
        self._fit_of = fit_of

    def problems(self, a: torch.Tensor, b: torch.Tensor) -> LeastSquaresProblems:
        return LeastSquaresProblems(a, b, self.options)

    def begin(self, problems: LeastSquaresProblems) -> Answer[LeastSquaresSolutions] | None:
        if not in_reach(problems.a, problems.b.shape[2], self.options):
            return super().begin(problems)
        # Needs none of the solvers, which take half a second to load.
        steps = self.options.engine.tuning[LaunchTuning].prelaunched_steps
        return in_one_launch(problems, LABEL, Pace.prelaunched(steps))

    def reason(self, found: Answer[Any], of: Extremes) -> str:
        return self.judge.reason(of["backward_error"][1], of["forward_error"][1], len(found.values))

    def fields(
        self, given: Given, shapes: BatchedProblem, found: Answer[LeastSquaresSolutions], of: Extremes
    ) -> dict[str, Any]:
        values, layout = found.values, shapes.without_numbers()
        return {
            "tolerance": self.judge.limits.backward_error,
            "optimality": of["optimality"][1],
            "residual_norm": Later(partial(norms_of, values.residual_norm, layout)),
            "rank": int(of["rank"][0]),
            "full_rank": self.options.full_rank(*shapes.a.shape[-2:]),
            "factorization": found.label,
            "ranks": Later(lambda: given.give(layout.of_members(values.rank).contiguous())),
            "_fit": Later(lambda: self._fit_of(given.operands, values.x, values.residual_norm)),
        }


def core_plan(m: int, n: int, k: int, options: LeastSquaresOptions, fit_of: FitOf) -> LeastSquaresPlan | None:
    """Plan for single m x n matrices with k right-hand sides, on the host, if the core takes them."""
    special = options.weights is not None or options.progress is not None
    fits = not special and takes(m, n, options) and k > 0 and takes_right(k, m, n, options)
    return LeastSquaresPlan(m, n, k, options, fit_of) if fits else None


def plan_for(
    shapes: BatchedProblem, options: LeastSquaresOptions, fit_of: FitOf
) -> LeastSquaresPlan | LaunchedLeastSquaresPlan | None:
    """One problem on the host that the core takes, or problems whose first link launches its work."""
    a, b = shapes.a, shapes.b
    m, n = a.shape[-2:]
    here = all(x.is_cpu and x.dtype.to_real() in DTYPES for x in (a, b))
    if here and (one := shape_of_one(a, b)) and (found := core_plan(*one, options, fit_of)):
        return found
    launches = options.engine.tuning[LaunchTuning].prelaunched_steps and not options.over_rows.spread
    if not launches or shapes.copies > 1 or 0 in (a.numel(), b.numel()):
        return None
    if not (links := chain_together(len(shapes.matrices), m, n, options)):
        return None
    judge = LeastSquaresJudge.for_shape(m, n, options, together=True)
    return LaunchedLeastSquaresPlan(links[0], judge, options, fit_of)


def solved_by_plan(
    call: Call, shapes: BatchedProblem, options: LeastSquaresOptions
) -> LstsqResult[Any] | Answer[LeastSquaresSolutions] | None:
    """The result where all problems are accepted, else what the first link of a device has found, if any."""

    def fit_of(_: Sequence[Any], x: torch.Tensor, norms: torch.Tensor) -> RegressionFit:
        return RegressionFit(call, shapes, options, x, norms)

    plan = plan_for(shapes, options, fit_of)
    if not isinstance(plan, LeastSquaresPlan):
        return None if plan is None else plan.solved(Given.of_call(call), shapes)
    right = shapes.b[:, 0] if shapes.is_vector else shapes.b
    given = Given((shapes.a.numpy(), right.numpy()), call.first.wrap_array, call.begun)
    return plan(given)


class InversePlan:
    """A plan for pseudoinverses of single m x n matrices: solutions for the columns of an identity."""

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
