"""Small systems on a CPU, one or a batch, by a kernel in C: the first link of their chain without the chain.

What is accepted here is what the judge of the chain accepts; what is not begins with its first link.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from neula.algorithms.lapack.compiled import NAMES, TAKEN, CompiledSolutions, available, solved
from neula.algorithms.lapack.factored import solved_by_factors
from neula.certificates.forward_error import digits_of
from neula.engines import FP32, FP64, Format
from neula.pipeline.call import Call
from neula.pipeline.chain import Answer
from neula.pipeline.in_numpy import FEW, is_large
from neula.pipeline.result import Attempt, SolveResult
from neula.pipeline.result.deferred import Later
from neula.pipeline.shapes import BatchedProblem
from neula.problems.systems.problem import Systems, SystemsOptions, SystemsSolutions, in_words

LARGEST = 208
"""Order of the largest systems that it factorizes: from 256 on LAPACK takes less time (two threads of an
Intel Xeon), and its factors are used."""


def suits(n: int, k: int, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether there is a kernel for systems of order n with k right-hand sides, of arrays of some dtypes."""
    return 0 < n <= LARGEST and 0 < k <= FEW and all(dtype in TAKEN for dtype in dtypes) and available()


def _takes(a: torch.Tensor, b: torch.Tensor, options: SystemsOptions) -> bool:
    """Whether kernels are for such arrays, and what is asked for."""
    named = options.pivot is not None or options.compute is not None
    here = a.is_cpu and b.is_cpu and options.engine.device.type == "cpu" and not options.over_rows.spread
    usual = options.dtype in TAKEN and a.dtype in TAKEN and b.dtype in TAKEN and options.progress is None
    some = 0 not in a.shape and 0 < b.shape[-1] <= FEW
    return some and usual and here and not named and options.engine.tuning.lapack


def _small(a: torch.Tensor, b: torch.Tensor, options: SystemsOptions) -> CompiledSolutions | None:
    """Small systems, one or a batch; None where this is no way for them."""
    n = a.shape[-1]
    if n > LARGEST or not _takes(a, b, options):
        return None
    return solved(a, b, options.dtype, options.digits, definite=options.positive)


def _large(
    call: Call, a: torch.Tensor, b: torch.Tensor, options: SystemsOptions
) -> tuple[CompiledSolutions, Format] | None:
    """One larger system, where it is accepted, and in which format its factors are."""
    n, tuning = a.shape[-1], options.engine.tuning
    rows = a.stride() == (n, 1) and not options.forward  # that needs updates until nothing is left
    formats = [FP32] if options.target is not FP64 else []  # factors in which cost least at any order
    if n < (tuning.direct_definite if options.positive else max(tuning.direct, tuning.direct_alone)):
        formats.append(FP64)
    if not (rows and n > LARGEST and _takes(a, b, options)):
        return None
    found, format = None, FP64
    for format in formats:
        with call.computing():
            found = solved_by_factors(
                a,
                b,
                options.dtype,
                single=format is FP32,
                large=is_large(a.numel(), options),
                in_blocks=tuning.lu_in_blocks,
                definite=options.positive,
            )
        if found is None or bool(options.limits(n).accept(found.evidence)):
            break
    return None if found is None else (found, format)


def batch_by_kernel(systems: Systems) -> Answer[SystemsSolutions] | None:
    """Solutions of all systems, of which some may not be accepted; None where this is no way for them."""
    options, a, b = systems.options, systems.a, systems.b
    found = _small(a, b, options)
    if found is None:
        return None
    of, evidence = dict(zip(NAMES, found.known, strict=False)), found.evidence
    values = SystemsSolutions(
        x=found.x,
        forward_error=_of_columns(found.known).contiguous(),
        doubtful=of["doubtful"] > 0,
        residual=of["residual"],
        refined_error=of["history"],
        backward_error=of["backward_error"],
        condition_bound=torch.from_numpy(evidence.condition_bound),
        condition=of["condition"],
        growth=of["growth"],
    )
    accepted = options.limits(a.shape[-1]).accept(evidence)
    solved_ones = found.known if accepted.all() else found.known[:, torch.from_numpy(accepted)]
    updates, errors = _history(_worst(solved_ones)) if accepted.any() else (1, (0.0, 0.0))
    return Answer(values, label_of(FP64, options), "", updates, errors, worst=values.worst())


def label_of(format: Format, options: SystemsOptions) -> str:
    """As the links of the chain are called."""
    return f"cholesky {format.name}" if options.positive else f"lu {format.name} with pivoting"


def _of_columns(known: torch.Tensor) -> torch.Tensor:
    """Forward errors, shape (batch, k)."""
    return known[len(NAMES) :].reshape(len(known) - len(NAMES), -1).mT


def solve_by_kernel(call: Call, shapes: BatchedProblem, options: SystemsOptions) -> SolveResult[Any] | None:
    """The result where all systems are accepted, and are some for this way."""
    if 0 in shapes.batch:
        return None
    format = FP64
    if shapes.batch:
        found = _small(shapes.matrices, shapes.columns, options)
    elif shapes.a.shape[-1] <= LARGEST:
        found = _small(shapes.a, shapes.b, options)
    else:
        found, format = _large(call, shapes.a, shapes.b, options) or (None, FP64)
    limits = options.limits(shapes.a.shape[-1])
    if found is None or not np.all(limits.accept(found.evidence)):
        return None
    worst, bound = _worst(found.known), limits.backward_error
    backward_error, condition, growth = worst[2:5]
    updates, history = _history(worst)
    known, label = found.known, label_of(format, options)
    forward_error = max(worst[len(NAMES) :])

    def attempts() -> tuple[Attempt, ...]:
        reason = in_words(history[-1], bound, forward_error, updates, growth)
        return (Attempt(label, True, reason),)

    layout, wrap = shapes.without_numbers(), call.first.wrap

    def later(known: torch.Tensor) -> Later:
        return Later(lambda: wrap(layout.of_members(known).contiguous()))

    return SolveResult.from_fields(
        {
            "x": call.hand_back(shapes.solutions(found.x), options.dtype),
            "converged": True,
            "iterations": updates,
            "backward_error": backward_error,
            "tolerance": bound,
            "condition": condition,
            "forward_error": forward_error,
            "digits": digits_of(forward_error, options.dtype),
            "history": history,
            "attempts": Later(attempts),
            "engine": str(options.engine),
            "accuracy": options.target.name,
            "growth": growth,
            "method": label,
            "accepted": Later(lambda: wrap(layout.of_members(known[0] == 0).contiguous())),
            "backward_errors": later(known[NAMES.index("backward_error")]),
            "conditions": later(known[NAMES.index("condition")]),
            "forward_errors": Later(lambda: wrap(layout.of_columns(_of_columns(known)).contiguous())),
            "seconds": call.seconds,
        }
    )


def _history(worst: list[float]) -> tuple[int, tuple[float, ...]]:
    """How many updates there were, and backward errors before, between and after them."""
    updates = int(worst[NAMES.index("updates")])
    errors = worst[NAMES.index("history") : len(NAMES)]
    return updates, (*errors[:updates], errors[-1])


def _worst(known: torch.Tensor) -> list[float]:
    """What speaks for all of a batch: what is worst of any, and the growth of the one that is worst."""
    if known.ndim == 1:
        return list(known.tolist())
    of = known.numpy()
    worst = of[NAMES.index("backward_error")].argmax()
    most = of.max(1)
    most[NAMES.index("growth")] = of[NAMES.index("growth"), worst]
    return list(most.tolist())
