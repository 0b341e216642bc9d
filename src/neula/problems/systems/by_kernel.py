"""Systems on a CPU, one or a batch, by the compiled core: the first link.

What is accepted here is what the judge of the chain accepts; what is not begins with its first link.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from neula.algorithms.elimination.compiled import TAKEN, CompiledSolutions, available, solved
from neula.algorithms.elimination.factored import solved_by_factors
from neula.certificates.verdict import Limits
from neula.engines import FP32, FP64, Format
from neula.pipeline.chain import Answer
from neula.problems.systems.problem import Systems, SystemsOptions, SystemsSolutions

LARGEST = 208
"""Order of the largest systems that it factorizes: from 256 on LAPACK takes less time (two threads of an
Intel Xeon), and its factors are used."""

COLUMNS = 32
"""Right-hand sides up to which its solves take less time than products of all of them by a library (order
300, on one core of an AMD EPYC: 20 take 3.0 ms and 15, 300 take 65 and 70)."""


def suits(n: int, k: int, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether there is a kernel for systems of order n with k right-hand sides, of arrays of some dtypes."""
    return 0 < n <= LARGEST and 0 < k <= COLUMNS and all(dtype in TAKEN for dtype in dtypes) and available()


def takes(a: torch.Tensor, b: torch.Tensor, options: SystemsOptions) -> bool:
    """Whether small systems are for the core: such arrays, and what is asked for."""
    return a.shape[-1] <= LARGEST and available() and _takes(a, b, options)


def _takes(a: torch.Tensor, b: torch.Tensor, options: SystemsOptions) -> bool:
    named = options.pivot is not None or options.compute is not None
    here = a.is_cpu and b.is_cpu and options.engine.device.type == "cpu" and not options.over_rows.spread
    usual = options.dtype in TAKEN and a.dtype in TAKEN and b.dtype in TAKEN and options.progress is None
    some = 0 not in a.shape and 0 < b.shape[-1] <= COLUMNS
    return some and usual and here and not named and options.engine.tuning.lapack


def _small(a: torch.Tensor, b: torch.Tensor, options: SystemsOptions) -> CompiledSolutions | None:
    """Small systems, one or a batch; None where this is no way for them."""
    if not takes(a, b, options):
        return None
    return solved(a, b, options.dtype, options.digits, definite=options.positive)


def _takes_large(a: torch.Tensor, b: torch.Tensor, options: SystemsOptions) -> bool:
    """Whether larger systems are solved by their factors in one step: not where updates are asked for until
    nothing is left.
    """
    return a.shape[-1] > LARGEST and not options.forward and _takes(a, b, options)


def _large(
    a: torch.Tensor, b: torch.Tensor, options: SystemsOptions, format: Format
) -> CompiledSolutions | None:
    """One larger system with factors in a format."""
    return solved_by_factors(
        a.contiguous(),
        b,
        options.dtype,
        single=format is FP32,
        in_blocks=options.engine.tuning.lu_in_blocks,
        definite=options.positive,
    )


def _each_large(systems: Systems, format: Format) -> CompiledSolutions | None:
    """Some larger systems, one after the other; None where one of them has no factors."""
    if not _takes_large(systems.a, systems.b, systems.options):
        return None
    found = []
    for a, b in zip(systems.a, systems.b, strict=True):
        one = _large(a, b, systems.options, format)
        if one is None:
            return None
        found.append(one)
    return CompiledSolutions.joined(found)


def batch_by_kernel(systems: Systems, format: Format = FP64) -> Answer[SystemsSolutions] | None:
    """Solutions of all systems, of which some may not be accepted; None where this is no way for them."""
    options = systems.options
    found = _small(systems.a, systems.b, options) if format is FP64 else None
    if found is None:
        found = _each_large(systems, format)
    if found is None:
        return None
    numbers = found.numbers[: len(SystemsSolutions.names)]
    values = SystemsSolutions.from_numbers(found.x, numbers, forward_error=found.forward_errors)
    updates, errors = _history(found, options.limits(systems.a.shape[-1]))
    return Answer(values, label_of(format, options), "", updates, errors, measured=numbers)


def label_of(format: Format, options: SystemsOptions) -> str:
    """As the links of the chain are called."""
    return f"cholesky {format.name}" if options.positive else f"lu {format.name} with pivoting"


def _history(found: CompiledSolutions, limits: Limits) -> tuple[int, tuple[float, ...]]:
    """How many updates accepted systems have needed, and their largest errors before, between and after."""
    numbers = found.numbers
    if numbers.shape[1] > 1:
        accepted = limits.accept(found.evidence)
        numbers = numbers[:, accepted].max(1, keepdims=True, initial=0.0)
    updates, *errors = numbers[found.places["updates"] :, 0].tolist()
    return int(updates), (*errors[: int(updates)], errors[-1])
