"""One linear system without the chain: what the first link has queued, where that is accepted.

A small system takes a GPU less time than a host takes for batches, records of what was tried and who is the
worst. What is accepted here is what the judge of the chain accepts; with what is not the chain goes on.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from neula.certificates.forward_error import digits_of
from neula.pipeline.call import Call
from neula.pipeline.chain import Answer
from neula.pipeline.memory import MemoryGuard
from neula.pipeline.result import Attempt, SolveResult
from neula.pipeline.result.deferred import Later
from neula.pipeline.shapes import System as Shapes
from neula.problems.systems.chain import SystemsJudge, chain_together
from neula.problems.systems.problem import Members, Options, Systems
from neula.problems.systems.queued import DEFINITE, NORMAL_EQUATIONS


def queued_alone(call: Call, shapes: Shapes, options: Options) -> Answer[Members] | None:
    """What the first link finds for a single system, if it is one that queues; None for others."""
    n = shapes.a.shape[-1]
    if shapes.a.ndim != 2 or shapes.batch or 0 in (n, shapes.b.shape[-1]):
        return None
    links = chain_together(n, options)
    if not links or links[0].label not in (DEFINITE, NORMAL_EQUATIONS):
        return None
    systems = Systems(call.here(shapes.matrices), call.here(shapes.columns), options)
    with call.computing(), MemoryGuard(systems.device).attempt(links[0].label):
        return links[0].answer(systems, None)
    return None


def accepted_alone(
    call: Call, shapes: Shapes, options: Options, answer: Answer[Members]
) -> SolveResult[Any] | None:
    """The result, for which the host waits; None where it is not accepted."""
    assert answer.measured is not None
    answer.measured = answer.measured.cpu()
    of = dict(zip(Members.names, answer.measured[:, 0].tolist(), strict=True))
    judge = SystemsJudge.of(shapes.a.shape[-1], options)
    if not (
        judge.accepts(of) and of["forward_error"] <= options.largest_error and math.isfinite(of["largest"])
    ):
        return None
    values, first, layout, error = answer.values, call.first, shapes.without_numbers(), of["forward_error"]

    def later(known: Any) -> Later:
        return Later(lambda: first.wrap_array(np.array(known)))

    reason = (
        f"backward error {of['refined_error']:.1e} (bound {judge.bound:.1e}), forward error {error:.1e}, "
        f"{answer.iterations} iterations, growth {of['growth']:.1e}"
    )
    return SolveResult.of(
        {
            "x": call.hand_back(shapes.solutions(values.x), options.dtype),
            "converged": True,
            "iterations": answer.iterations,
            "backward_error": of["backward_error"],
            "tolerance": judge.bound,
            "condition": of["condition"],
            "forward_error": error,
            "digits": digits_of(error),
            "attempts": (Attempt(answer.label, True, reason),),
            "engine": str(options.engine),
            "accuracy": options.target.name,
            "growth": of["growth"],
            "method": answer.label,
            "accepted": later(True),
            "backward_errors": later(of["backward_error"]),
            "conditions": later(of["condition"]),
            "forward_errors": Later(
                lambda: first.give_back(layout.of_columns(values.forward_error), torch.float64)
            ),
            "seconds": call.seconds,
        }
    )
