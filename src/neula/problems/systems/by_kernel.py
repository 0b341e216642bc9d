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
    evidence = found.evidence
    of = {name: torch.from_numpy(numbers) for name, numbers in found.named().items()}
    values = SystemsSolutions(
        x=found.x,
        forward_error=torch.from_numpy(found.forward_errors),
        doubtful=of["doubtful"] > 0,
        residual=of["residual"],
        refined_error=of["history"][-1],
        backward_error=of["backward_error"],
        condition_bound=torch.from_numpy(evidence.condition_bound),
        condition=of["condition"],
        growth=of["growth"],
    )
    accepted = options.limits(a.shape[-1]).accept(evidence)
    updates, errors = _history(_worst(found, accepted)) if accepted.any() else (1, (0.0, 0.0))
    return Answer(values, label_of(FP64, options), "", updates, errors, worst=values.worst())


def label_of(format: Format, options: SystemsOptions) -> str:
    """As the links of the chain are called."""
    return f"cholesky {format.name}" if options.positive else f"lu {format.name} with pivoting"


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
    worst, bound, label = _worst(found), limits.backward_error, label_of(format, options)
    backward_error, growth = worst["backward_error"], worst["growth"]
    updates, history = _history(worst)
    forward_error = float(found.forward_errors.max())

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


def _worst(found: CompiledSolutions, accepted: np.ndarray | None = None) -> dict[str, Any]:
    """The worst of each number, of some systems or of all; the growth is that of the least accurate one."""
    numbers, growth = found.numbers, found.places["growth"]
    if numbers.ndim == 1:
        return found.named()
    numbers = numbers if accepted is None else numbers[:, accepted]
    most, worst = numbers.max(1), numbers[found.places["backward_error"]].argmax()
    most[growth] = numbers[growth, worst]
    return found._replace(numbers=most).named()


def _history(worst: dict[str, Any]) -> tuple[int, tuple[float, ...]]:
    """How many updates there were, and backward errors before, between and after them."""
    updates, errors = int(worst["updates"]), worst["history"]
    return updates, (*errors[:updates], errors[-1])
