"""Systems of an order that was solved before: the core or what is launched, the verdict, the result."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from neula.algorithms.elimination import compiled
from neula.certificates.verdict import Evidence
from neula.engines import FP64
from neula.errors import of_batch
from neula.kernels.core import core
from neula.kernels.small_problems.embedding import embedded, of_stacked_parts, stacked_parts
from neula.pipeline.call import Call
from neula.pipeline.chain import Answer
from neula.pipeline.plans import Extremes, Given, LaunchedPlan, accepted_solution
from neula.pipeline.result import SolveResult
from neula.pipeline.shapes import BatchedProblem, shape_of_one
from neula.problems.systems.by_core import CoreTuning, is_for_core, is_small, takes
from neula.problems.systems.factor_source import SOURCES
from neula.problems.systems.links import CHOLESKY, PIVOTED, chain_together
from neula.problems.systems.problem import Systems, SystemsOptions, SystemsSolutions, in_words
from neula.problems.systems.system import SystemsJudge

UPDATES = len(SystemsSolutions.names)  # where the core says how many updates there were; the history follows


class SystemsPlan:
    def __init__(self, n: int, k: int, options: SystemsOptions) -> None:
        kernels = core()
        assert kernels is not None
        self._parts = (
            2 if options.dtype.is_complex else 1
        )  # of a number, in the real system that the core solves
        self.options, self._n, self._k = options, self._parts * n, k
        self._solve, self._count = kernels.solve_systems, compiled.count_of(kernels)
        self._asked = options.positive, options.dtype.to_real() == torch.float32, 1
        self._setting = compiled.setting_for(kernels, self._n, options.digits)
        self._places = compiled.places_of(kernels)
        self._limits = options.limits(n)
        self._label = (CHOLESKY if options.positive else PIVOTED).format(FP64.name)

    def __call__(self, given: Given) -> SolveResult[Any] | None:
        (a, b), k, limits = given.arrays, self._k, self._limits
        x, errors, numbers = np.empty((self._n, k)), np.empty((1, k)), np.empty((self._count, 1))
        b = b[:, None] if b.ndim == 1 else b
        if self._parts > 1:
            a, b = embedded(a), stacked_parts(b)
        if not self._solve(a, b, self._setting, x, errors, numbers, *self._asked):
            return None
        if self._parts > 1:
            compiled.double_errors_of_parts(numbers, self._places)
            x = of_stacked_parts(x)
        of = numbers.ravel().tolist()
        _, _, refined, backward, forward, _, condition, largest, growth = of[:UPDATES]
        if not (limits.accept(Evidence.from_numbers(of)) and math.isfinite(largest)):
            return None
        updates, bound = int(of[UPDATES]), limits.backward_error
        fields = {
            "backward_error": backward,
            "forward_error": forward,
            "condition": condition,
            "iterations": updates,
            "tolerance": bound,
            "history": (*of[UPDATES + 1 : UPDATES + 1 + updates], refined),
            "growth": growth,
            "method": self._label,
        }
        told = self._label, lambda: in_words(refined, bound, forward, updates, growth)
        return accepted_solution(SolveResult, given, self.options, told, fields, x, errors[0].tolist())


class LaunchedSystemsPlan(LaunchedPlan[Systems, SystemsSolutions, SolveResult[Any]]):
    result = SolveResult

    judge: SystemsJudge
    options: SystemsOptions

    def problems(self, a: torch.Tensor, b: torch.Tensor) -> Systems:
        return Systems(a, b, self.options)

    def reason(self, found: Answer[Any], of: Extremes) -> str:
        error, forward, growth = (of[name][1] for name in ("refined_error", "forward_error", "growth"))
        words = in_words(error, self.judge.limits.backward_error, forward, found.iterations, growth)
        return of_batch(words, 0, len(found.values), "systems")

    def fields(
        self, given: Given, shapes: BatchedProblem, found: Answer[SystemsSolutions], of: Extremes
    ) -> dict[str, Any]:
        bound, growth = self.judge.limits.backward_error, of["growth"][1]
        return {"tolerance": bound, "growth": growth, "method": found.label}


def core_plan(m: int, n: int, k: int, options: SystemsOptions) -> SystemsPlan | None:
    """Plan for single systems of order n with k right-hand sides, on the host, if the core takes them."""
    fits = m == n and is_for_core(n, options) and is_small(n, options)
    fits = fits and options.engine.tuning[CoreTuning].has_room(n, k)
    return SystemsPlan(n, k, options) if fits else None


def plan_for(shapes: BatchedProblem, options: SystemsOptions) -> SystemsPlan | LaunchedSystemsPlan | None:
    """One small system on the host where the core takes it, or one that is launched on a device."""
    a, b = shapes.a, shapes.b
    n = a.shape[-1]
    if takes(a, b, options) and (one := shape_of_one(a, b)) and (found := core_plan(*one, options)):
        return found
    if shapes.batch or 0 in (a.numel(), b.numel()) or options.progress is not None:
        return None
    links = chain_together(len(shapes.matrices), n, options)
    if not links or (source := SOURCES.get(links[0].label)) is None or source.synchronizes:
        return None
    return LaunchedSystemsPlan(links[0], SystemsJudge.for_shape(n, options, improves=False), options)


def solved_by_plan(
    call: Call, shapes: BatchedProblem, options: SystemsOptions
) -> SolveResult[Any] | Answer[SystemsSolutions] | None:
    """The result where all systems are accepted, else what the first link of a device has found, if any."""
    plan = plan_for(shapes, options)
    if not isinstance(plan, SystemsPlan):
        return None if plan is None else plan.solved(Given.of_call(call), shapes)
    right = shapes.b[:, 0] if shapes.is_vector else shapes.b
    return plan(Given((shapes.a.numpy(), right.numpy()), call.first.wrap_array, call.begun))
