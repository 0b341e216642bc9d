"""Systems on a CPU, one or a batch, by the compiled core: the first link."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from neula.algorithms.elimination.compiled import CompiledSolutions, available, solved
from neula.algorithms.elimination.factored import solved_by_factors
from neula.certificates.verdict import Limits
from neula.engines import FP32, Format, select_engine
from neula.kernels.core import DTYPES
from neula.pipeline.chain import Answer, Declined
from neula.problems.systems.problem import Systems, SystemsOptions, SystemsSolutions

FORWARD = SystemsSolutions.names.index("forward_error")


@dataclass(frozen=True)
class CoreTuning:
    """Up to where the compiled core takes less time than a library."""

    core_order: int  # of systems that it factorizes itself; beyond, it uses LAPACK's factors
    core_numbers: int  # of x, of more than 32 right-hand sides

    def has_room(self, n: int, k: int) -> bool:
        """Whether k right-hand sides of order n are few enough."""
        return n * k > 0 and (k <= 32 or n * k <= self.core_numbers)


def suits(n: int, k: int, dtypes: Iterable[torch.dtype]) -> bool:
    """Whether there is a kernel for systems of order n with k right-hand sides, of arrays of some dtypes."""
    most, dtypes = select_engine("cpu", torch.device("cpu")).tuning[CoreTuning], tuple(dtypes)
    n *= 1 + any(dtype.is_complex for dtype in dtypes)
    small = 0 < n <= most.core_order and most.has_room(n, k)
    return small and all(dtype.to_real() in DTYPES for dtype in dtypes) and available()


def is_for_core(n: int, options: SystemsOptions) -> bool:
    """Whether systems of order n are for the core: larger ones by their factors in one step, where updates
    are not asked for until nothing is left.
    """
    named = options.pivot is not None or options.compute is not None or options.progress is not None
    here = options.engine.device.type == "cpu" and options.engine.tuning.lapack
    usual = here and not (named or options.over_rows.spread) and options.dtype.to_real() in DTYPES and n > 0
    by_factors = not (options.forward or options.dtype.is_complex)
    return usual and available() and (is_small(n, options) or by_factors)


def is_small(n: int, options: SystemsOptions) -> bool:
    """Whether the core factorizes systems of order n itself, complex ones as real ones of twice the order."""
    return n * (1 + options.dtype.is_complex) <= options.engine.tuning[CoreTuning].core_order


def takes(a: torch.Tensor, b: torch.Tensor, options: SystemsOptions) -> bool:
    few = options.engine.tuning[CoreTuning].has_room(a.shape[-1], b.shape[-1])
    alike = a.is_complex() or not options.dtype.is_complex
    return few and alike and a.is_cpu and b.is_cpu and {a.dtype.to_real(), b.dtype.to_real()} <= {*DTYPES}


def by_core(
    systems: Systems, before: Answer[SystemsSolutions] | None, *, label: str, format: Format
) -> Answer[SystemsSolutions]:
    """Solutions of all systems; those that are not accepted are solved by the next link."""
    a, b, options = systems.a, systems.b, systems.options
    found = None
    if takes(a, b, options):
        found = (
            solved(a, b, options.dtype, options.digits, definite=options.positive)
            if is_small(a.shape[-1], options)
            else _each_large(systems, format)
        )
    if found is None:
        raise Declined
    numbers, limits = found.numbers[: len(SystemsSolutions.names)], options.limits(a.shape[-1])
    rejected = ~limits.accept(found.evidence)
    if rejected.all():
        raise Declined
    # Of what it does not accept the core may not have measured all.
    numbers[FORWARD, rejected], found.forward_errors[rejected] = math.inf, math.inf
    values = SystemsSolutions.from_numbers(found.x, numbers, forward_error=found.forward_errors)
    updates, errors = _history(found, limits)
    return Answer(values, label, "", updates, errors, measured=numbers, again=True)


def _each_large(systems: Systems, format: Format) -> CompiledSolutions | None:
    """Larger systems, one after the other; None where one of them has no factors."""
    found, options = [], systems.options
    for a, b in zip(systems.a, systems.b, strict=True):
        one = solved_by_factors(
            a.contiguous(),
            b,
            options.dtype,
            single=format is FP32,
            definite=options.positive,
        )
        if one is None:
            return None
        found.append(one)
    return CompiledSolutions.joined(found)


def _history(found: CompiledSolutions, limits: Limits) -> tuple[int, tuple[float, ...]]:
    """How many updates accepted systems have needed, and their largest errors before, between and after."""
    numbers = found.numbers
    if numbers.shape[1] > 1:
        accepted = limits.accept(found.evidence)
        numbers = numbers[:, accepted].max(1, keepdims=True, initial=0.0)
    updates, *errors = numbers[found.places["updates"] :, 0].tolist()
    return int(updates), (*errors[: int(updates)], errors[-1])
