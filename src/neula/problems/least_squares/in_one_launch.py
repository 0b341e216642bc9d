"""One small least-squares problem on a GPU by one launch, and a look: the first link without the chain.

Batches, links, judges of many problems and records of what was tried take the host longer than the launch
takes the GPU. What is accepted here is what the judge of the chain accepts; from what is not, the chain goes
on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from neula.certificates.forward_error import digits_of
from neula.pipeline.call import Call
from neula.pipeline.chain import Answer
from neula.pipeline.result import Attempt, LstsqResult
from neula.pipeline.result.deferred import Later
from neula.pipeline.shapes import System
from neula.problems.least_squares.by_lapack import LABEL
from neula.problems.least_squares.chain import LeastSquaresJudge
from neula.problems.least_squares.fit import LinearFit
from neula.problems.least_squares.prepared import Problems
from neula.problems.least_squares.problem import Members, Options
from neula.problems.least_squares.report import norms_of
from neula.problems.least_squares.together import FROM_GRAM, in_one_launch, in_reach


def begin_alone(call: Call, shapes: System, options: Options) -> Answer[Members] | None:
    """What the kernel is to say of one problem, queued; None where it is not made for it."""
    (m, n), k, tuning = shapes.a.shape[-2:], shapes.b.shape[-1], options.engine.tuning
    plain = shapes.a.ndim == 2 and not shapes.batch and m >= n and k > 0 and options.progress is None
    first = plain and not options.named and tuning.small_r[0] == FROM_GRAM[0]
    if not first or not in_reach(shapes.a[None], k, options):
        return None
    problems = Problems(shapes.a[None], call.here(shapes.b)[None], options)
    return in_one_launch(problems, LABEL, tuning.blind_steps)


def solved_alone(
    call: Call, shapes: System, options: Options, begun: Answer[Members]
) -> LstsqResult[Any] | None:
    """The solution where it is accepted; the host waits."""
    assert begun.measured is not None
    numbers = begun.measured.flatten().tolist()
    of = dict(zip(Members.names, numbers, strict=True))
    judge = LeastSquaresJudge.of(shapes.a.shape[0], shapes.a.shape[1], options, together=True)
    fits = of["largest"] <= torch.finfo(options.dtype).max
    if not (fits and judge.settled(numbers, numbers)):
        return None
    values, first, known = begun.values, call.first, shapes.without_numbers()
    device, wrap, error = first.tensor.device, first.wrap, of["forward_error"]

    def later(arranged: Callable[[System], torch.Tensor]) -> Later:
        return Later(lambda: wrap(arranged(known).contiguous().to(device)))

    reason = f"backward error {of['backward_error']:.1e} (bound {judge.bound:.1e}), forward error {error:.1e}"
    fields = {
        "x": call.hand_back(shapes.solutions(values.x), options.dtype),
        "converged": True,
        "iterations": begun.iterations,
        "backward_error": of["backward_error"],
        "tolerance": judge.bound,
        "condition": of["condition"],
        "forward_error": error,
        "digits": digits_of(error),
        "attempts": (Attempt(LABEL, True, reason),),
        "engine": str(options.engine),
        "accuracy": options.target.name,
        "accepted": later(lambda shapes: shapes.of_members(values.accepted)),
        "backward_errors": later(lambda shapes: shapes.of_members(values.backward_error)),
        "conditions": later(lambda shapes: shapes.of_members(values.condition)),
        "forward_errors": later(lambda shapes: shapes.of_columns(values.forward_error)),
        "optimality": of["optimality"],
        "residual_norm": Later(partial(norms_of, values.residual_norm, known)),
        "rank": shapes.a.shape[1],
        "factorization": LABEL,
        "ranks": later(lambda shapes: shapes.of_members(values.rank)),
        "fit": LinearFit(call, shapes, options, values.x, values.residual_norm),
        "seconds": call.seconds,
    }
    return LstsqResult.of(fields)
