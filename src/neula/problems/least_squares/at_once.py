"""Least-squares problems that the first link of their chain solves on a GPU: without the rest.

Where it does, judges of each problem by itself and records of what was tried take longer than small problems
take the GPU. What is accepted here is what the judge of the chain accepts; where
that is not so of all problems, the chain goes on from what was found.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from neula.algorithms.krylov.pace import Pace
from neula.certificates.forward_error import digits_of
from neula.pipeline.call import Call
from neula.pipeline.chain import Answer
from neula.pipeline.memory import MemoryGuard
from neula.pipeline.pending import answer_of_first
from neula.pipeline.result import Attempt, LstsqResult
from neula.pipeline.result.deferred import Later
from neula.pipeline.shapes import BatchedProblem
from neula.problems.least_squares.by_kernel import LABEL
from neula.problems.least_squares.fit import LinearFit
from neula.problems.least_squares.judge import LeastSquaresJudge
from neula.problems.least_squares.links import chain_together
from neula.problems.least_squares.prepared import LeastSquaresProblems
from neula.problems.least_squares.problem import LeastSquaresOptions, LeastSquaresSolutions
from neula.problems.least_squares.report import norms_of
from neula.problems.least_squares.together import in_one_launch, in_reach


def begin_at_once(
    call: Call, shapes: BatchedProblem, problems: LeastSquaresProblems
) -> Answer[LeastSquaresSolutions] | None:
    """What the first link finds for problems that are solved together; None where others begin."""
    options, empty = problems.options, 0 in (problems.a.numel(), problems.b.numel())
    (count, m, n), tuning = problems.a.shape, options.engine.tuning
    if empty or shapes.shares or options.over_rows.spread or not tuning.prelaunched_steps:
        return None
    with MemoryGuard(problems.device).attempt(""):
        if in_reach(problems.a, problems.b.shape[2], options):
            # Needs none of the solvers, which take half a second to load, and is what the first link does.
            return in_one_launch(problems, LABEL, Pace.prelaunched(tuning.prelaunched_steps))
        with call.computing():
            return answer_of_first(chain_together(count, m, n, options), problems)
    return None


def solved_at_once(
    call: Call, shapes: BatchedProblem, options: LeastSquaresOptions, begun: Answer[LeastSquaresSolutions]
) -> LstsqResult[Any] | None:
    """The solutions where all are accepted; the host waits."""
    measured = begun.measured
    if not isinstance(measured, torch.Tensor) or begun.doubt:
        return None
    judge = LeastSquaresJudge.for_shape(shapes.a.shape[-2], shapes.a.shape[-1], options, together=True)
    x = call.hand_back(shapes.solutions(begun.values.x), options.dtype)  # launched before the look
    smallest, largest = _extremes(measured)
    of = dict(zip(LeastSquaresSolutions.names, largest, strict=True))
    fits = of["largest"] <= torch.finfo(options.dtype).max
    if not (fits and judge.settled(largest)):
        return None
    values, first, known = begun.values, call.first, shapes.without_numbers()
    device, wrap, errors = first.tensor.device, first.wrap, (of["backward_error"], of["forward_error"])

    def later(arranged: Callable[[BatchedProblem], torch.Tensor]) -> Later:
        return Later(lambda: wrap(arranged(known).contiguous().to(device)))

    fields = {
        "x": x,
        "converged": True,
        "iterations": begun.iterations,
        "backward_error": errors[0],
        "tolerance": judge.limits.backward_error,
        "condition": max(1.0, of["condition"]),
        "forward_error": errors[1],
        "digits": digits_of(errors[1], options.dtype),
        "attempts": (Attempt(begun.label, True, judge.reason(*errors, len(values))),),
        "engine": str(options.engine),
        "accuracy": options.target.name,
        "accepted": later(lambda shapes: shapes.of_members(~values.doubtful)),
        "backward_errors": later(lambda shapes: shapes.of_members(values.backward_error)),
        "conditions": later(lambda shapes: shapes.of_members(values.condition)),
        "forward_errors": later(lambda shapes: shapes.of_columns(values.forward_error)),
        "optimality": of["optimality"],
        "residual_norm": Later(partial(norms_of, values.residual_norm, known)),
        "rank": int(smallest[LeastSquaresSolutions.names.index("rank")]),
        "full_rank": options.full_rank(*shapes.a.shape[-2:]),
        "factorization": begun.label,
        "ranks": later(lambda shapes: shapes.of_members(values.rank)),
        "fit": LinearFit(call, shapes, options, values.x, values.residual_norm),
        "seconds": call.seconds,
    }
    return LstsqResult.from_fields(fields)


def _extremes(measured: torch.Tensor) -> tuple[list[float], list[float]]:
    """The smallest and the largest of each number that was measured, NaN where one is."""
    if measured.shape[1] == 1:
        numbers = measured.flatten().tolist()
        return numbers, numbers
    smallest, largest = torch.stack(measured.aminmax(dim=1)).tolist()
    return smallest, largest
