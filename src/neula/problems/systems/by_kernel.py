"""Small systems on a CPU, one or a batch, by a kernel in C: the first link of their chain without the chain.

What is accepted here is what the judge of the chain accepts; what is not begins with its first link.
"""

from __future__ import annotations

from typing import Any

import torch

from neula.algorithms.lapack.compiled import NAMES, TAKEN, Solved, solved
from neula.certificates.bounds import solve_bound
from neula.certificates.forward_error import digits_of
from neula.pipeline.call import Call
from neula.pipeline.chain import Answer
from neula.pipeline.result import Attempt, SolveResult
from neula.pipeline.result.deferred import Later
from neula.pipeline.shapes import System as Shapes
from neula.pipeline.solutions import FEW
from neula.problems.systems.problem import Members, Options, Systems

LARGEST = 128
"""Order of the largest systems: the factors of larger ones are LAPACK's."""

LABEL = "lu fp64 with pivoting"


def kernel_takes(a: torch.Tensor, b: torch.Tensor, options: Options) -> bool:
    """Whether it is made for systems like these."""
    named = options.pivot is not None or options.compute is not None or options.positive
    here = a.is_cpu and b.is_cpu and options.engine.device.type == "cpu" and not options.over_rows.spread
    usual = options.dtype in TAKEN and a.dtype in TAKEN and b.dtype in TAKEN and options.progress is None
    small = 0 < a.shape[-1] <= LARGEST and 0 < b.shape[-1] <= FEW and 0 not in a.shape
    return small and usual and here and not named and options.engine.tuning.lapack


def by_kernel(a: torch.Tensor, b: torch.Tensor, options: Options) -> Solved | None:
    """Solutions, of which some may not be accepted; None where there is no compiler."""
    bound = solve_bound(options.target, a.shape[-1])
    return solved(
        a.resolve_neg(), b.resolve_neg(), options.dtype, options.digits, options.largest_error, bound
    )


def batch_by_kernel(systems: Systems) -> Answer[Members] | None:
    """Solutions of all systems, of which some may not be accepted; None where this is no way for them."""
    options, a, b = systems.options, systems.a, systems.b
    found = by_kernel(a, b, options) if kernel_takes(a, b, options) else None
    if found is None:
        return None
    known = dict(zip(NAMES, found.known, strict=False))
    accepted = known["accepted"] > 0
    history = tuple(
        float(known[name][accepted].max()) if accepted.any() else 0.0
        for name in ("first_error", "refined_error")
    )
    values = Members(
        x=found.x,
        forward_error=_of_columns(found.known).contiguous(),
        backward_error=known["backward_error"],
        condition=known["condition"],
        refined_error=known["refined_error"],
        accepted=accepted,
        growth=known["growth"],
    )
    return Answer(values, LABEL, "", 1, history, worst=values.worst())


def _of_columns(known: torch.Tensor) -> torch.Tensor:
    """Forward errors, shape (batch, k)."""
    return known[len(NAMES) :].reshape(len(known) - len(NAMES), -1).mT


def solve_by_kernel(call: Call, shapes: Shapes, options: Options) -> SolveResult[Any] | None:
    """The result where all systems are accepted, and are some for this way."""
    if not kernel_takes(shapes.a, shapes.b, options) or 0 in shapes.batch:
        return None
    single = not shapes.batch
    a, b = (shapes.a, shapes.b) if single else (shapes.matrices, shapes.columns)
    found = by_kernel(a, b, options) if b.shape[-1] <= FEW else None
    if found is None:
        return None
    known = found.known
    if single:
        numbers = known.tolist()
    else:
        every = known.numpy()
        worst = int(every[3].argmax())
        numbers = [
            every[0].min(),
            *every[1:5].max(1).tolist(),
            float(every[5, worst]),
            float(every[6:].max()),
        ]
    accepted, refined_error, first_error, backward_error, condition, growth, *errors = numbers
    if not accepted:
        return None
    forward_error, bound = max(errors), solve_bound(options.target, a.shape[-1])
    reason = (
        f"backward error {refined_error:.1e} (bound {bound:.1e}), forward error {forward_error:.1e}, "
        f"1 iterations, growth {growth:.1e}"
    )
    layout, wrap = shapes.without_numbers(), call.first.wrap

    def later(row: int) -> Later:
        return Later(lambda: wrap(layout.of_members(known[row]).contiguous()))

    return SolveResult.of(
        {
            "x": call.hand_back(shapes.solutions(found.x), options.dtype),
            "converged": True,
            "iterations": 1,
            "backward_error": backward_error,
            "tolerance": bound,
            "condition": condition,
            "forward_error": forward_error,
            "digits": digits_of(forward_error),
            "history": (first_error, refined_error),
            "attempts": (Attempt(LABEL, True, reason),),
            "engine": str(options.engine),
            "accuracy": options.target.name,
            "growth": growth,
            "method": LABEL,
            "accepted": Later(lambda: wrap(layout.of_members(known[0] > 0).contiguous())),
            "backward_errors": later(3),
            "conditions": later(4),
            "forward_errors": Later(lambda: wrap(layout.of_columns(_of_columns(known)).contiguous())),
            "seconds": call.seconds,
        }
    )
