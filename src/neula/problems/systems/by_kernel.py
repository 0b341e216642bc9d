"""Small systems on a CPU, one or a batch, by the compiled core: the first link without the chain.

What is accepted here is what the judge of the chain accepts; what is not begins with its first link.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from neula.algorithms.lapack.compiled import TAKEN, CompiledSolutions, available, solved
from neula.algorithms.lapack.factored import solved_by_factors
from neula.certificates.forward_error import digits_of
from neula.certificates.verdict import Limits
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


def takes(a: torch.Tensor, b: torch.Tensor, options: SystemsOptions) -> bool:
    """Whether small systems are for the core: such arrays, and what is asked for."""
    return a.shape[-1] <= LARGEST and available() and _takes(a, b, options)


def _takes(a: torch.Tensor, b: torch.Tensor, options: SystemsOptions) -> bool:
    named = options.pivot is not None or options.compute is not None
    here = a.is_cpu and b.is_cpu and options.engine.device.type == "cpu" and not options.over_rows.spread
    usual = options.dtype in TAKEN and a.dtype in TAKEN and b.dtype in TAKEN and options.progress is None
    some = 0 not in a.shape and 0 < b.shape[-1] <= FEW
    return some and usual and here and not named and options.engine.tuning.lapack


def _small(a: torch.Tensor, b: torch.Tensor, options: SystemsOptions) -> CompiledSolutions | None:
    """Small systems, one or a batch; None where this is no way for them."""
    if not takes(a, b, options):
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
    options = systems.options
    found = _small(systems.a, systems.b, options)
    if found is None:
        return None
    numbers = found.numbers[: len(SystemsSolutions.names)]
    values = SystemsSolutions.from_numbers(found.x, numbers, forward_error=found.forward_errors)
    updates, errors = _history(found, options.limits(systems.a.shape[-1]))
    return Answer(values, label_of(FP64, options), "", updates, errors, measured=numbers)


def label_of(format: Format, options: SystemsOptions) -> str:
    """As the links of the chain are called."""
    return f"cholesky {format.name}" if options.positive else f"lu {format.name} with pivoting"


def solve_by_kernel(call: Call, shapes: BatchedProblem, options: SystemsOptions) -> SolveResult[Any] | None:
    """The result of one larger system, where it is accepted."""
    if shapes.batch or shapes.a.shape[-1] <= LARGEST:
        return None
    found, format = _large(call, shapes.a, shapes.b, options) or (None, FP64)
    limits = options.limits(shapes.a.shape[-1])
    if found is None or not limits.accept(found.evidence):
        return None
    worst, bound, label = found.named(), limits.backward_error, label_of(format, options)
    backward_error, growth, forward_error = worst["backward_error"], worst["growth"], worst["forward_error"]
    updates = int(worst["updates"])
    history = (*worst["history"][:updates], worst["history"][-1])

    def attempts() -> tuple[Attempt, ...]:
        reason = in_words(history[-1], bound, forward_error, updates, growth)
        return (Attempt(label, True, reason),)

    layout, wrap = shapes.without_numbers(), call.first.wrap

    def of_members(name: str) -> Any:
        return wrap(layout.of_members(torch.from_numpy(np.array(found.named()[name]))).contiguous())

    return SolveResult.from_fields(
        {
            "x": call.hand_back(shapes.solutions(found.x), options.dtype),
            "converged": True,
            "iterations": updates,
            "backward_error": backward_error,
            "tolerance": bound,
            "condition": worst["condition"],
            "forward_error": forward_error,
            "digits": digits_of(forward_error, options.dtype),
            "history": history,
            "attempts": Later(attempts),
            "engine": str(options.engine),
            "accuracy": options.target.name,
            "growth": growth,
            "method": label,
            "accepted": Later(lambda: of_members("doubtful") == 0),
            "backward_errors": Later(lambda: of_members("backward_error")),
            "conditions": Later(lambda: of_members("condition")),
            "forward_errors": Later(lambda: wrap(layout.of_columns(_of_columns(found)).contiguous())),
            "seconds": call.seconds,
        }
    )


def _of_columns(found: CompiledSolutions) -> torch.Tensor:
    """Forward errors, shape (batch, k)."""
    errors = torch.from_numpy(found.forward_errors)
    return errors.reshape(-1, errors.shape[-1])


def _history(found: CompiledSolutions, limits: Limits) -> tuple[int, tuple[float, ...]]:
    """How many updates accepted systems have needed, and their largest errors before, between and after."""
    numbers = found.numbers
    if numbers.shape[1] > 1:
        accepted = limits.accept(found.evidence)
        numbers = numbers[:, accepted].max(1, keepdims=True, initial=0.0)
    updates, *errors = numbers[found.places["updates"] :, 0].tolist()
    return int(updates), (*errors[: int(updates)], errors[-1])
