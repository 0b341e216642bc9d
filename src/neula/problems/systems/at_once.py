"""One linear system without the chain: what the first link has launched, where that is accepted.

A small system takes a GPU less time than a host takes for batches, records of what was tried and who is the
worst. What is accepted here is what the judge of the chain accepts; with what is not the chain goes on.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from neula.certificates.forward_error import digits_of
from neula.certificates.verdict import Evidence
from neula.pipeline.call import Call
from neula.pipeline.chain import Answer
from neula.pipeline.memory import MemoryGuard
from neula.pipeline.result import Attempt, SolveResult
from neula.pipeline.result.deferred import Later
from neula.pipeline.shapes import BatchedProblem
from neula.problems.systems.links import chain_together
from neula.problems.systems.problem import Systems, SystemsOptions, SystemsSolutions, in_words
from neula.problems.systems.queued import QUEUED, QueuedSolutions, answer_of, label_of, queued, steps_of


def solve_at_once(
    call: Call, shapes: BatchedProblem, options: SystemsOptions
) -> SolveResult[Any] | Answer[SystemsSolutions] | None:
    """The result where it is accepted, else what the first link has found; None for what it is not made for.

    It is for single systems whose first link queues all that it does.
    """
    n = shapes.a.shape[-1]
    if shapes.a.ndim != 2 or shapes.batch or 0 in (n, shapes.b.shape[-1]) or options.progress is not None:
        return None
    links = chain_together(1, n, options)
    if not links or (label := links[0].label) not in QUEUED:
        return None
    systems = Systems(call.here(shapes.matrices), call.here(shapes.columns), options)
    found = None
    with call.computing(), MemoryGuard(systems.device).attempt(label):
        found = queued(systems, label)
        found = found._replace(read=found.numbers.cpu()) if found.read is None else found
    if found is None:  # the chain begins with the same, and goes on where memory does not suffice
        return None
    return _accepted(call, shapes, systems, found, label) or answer_of(found, systems, label)


def _accepted(
    call: Call, shapes: BatchedProblem, systems: Systems, found: QueuedSolutions, label: str
) -> SolveResult[Any] | None:
    """The result; None where it is not accepted."""
    options, steps, label = systems.options, steps_of(systems.options), label_of(systems, label)
    assert found.read is not None
    numbers, limits = found.read[:, 0].tolist(), options.limits(shapes.a.shape[-1])
    of = dict(zip(SystemsSolutions.names, numbers, strict=True))
    if not (limits.accept(Evidence.from_numbers(numbers)) and math.isfinite(of["largest"])):
        return None
    first, layout, error = call.first, shapes.without_numbers(), of["forward_error"]

    def later(known: Any) -> Later:
        return Later(lambda: first.wrap_array(np.array(known)))

    reason = in_words(of["refined_error"], limits.backward_error, error, steps, of["growth"])
    return SolveResult.from_fields(
        {
            "x": call.hand_back(shapes.solutions(found.x), options.dtype),
            "converged": True,
            "iterations": steps,
            "backward_error": of["backward_error"],
            "tolerance": limits.backward_error,
            "condition": of["condition"],
            "forward_error": error,
            "digits": digits_of(error, options.dtype),
            "attempts": (Attempt(label, True, reason),),
            "engine": str(options.engine),
            "accuracy": options.target.name,
            "growth": of["growth"],
            "method": label,
            "accepted": later(True),
            "backward_errors": later(of["backward_error"]),
            "conditions": later(of["condition"]),
            "forward_errors": Later(
                lambda: first.give_back(layout.of_columns(found.forward_error), torch.float64)
            ),
            "seconds": call.seconds,
        }
    )
