"""Problems of the sizes that people have, hard ones among them, beside the library call that they replace."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from benchmarks.floor import DTYPES, Machine
from benchmarks.harness import Results
from benchmarks.size_cases import Call, Case, cases
from neula.papers.measuring import seconds_of

ENOUGH = 0.3
"""Seconds of repetitions, of which there are ``FEWEST`` to ``MOST``."""

FEWEST, MOST = 3, 41


def run(device: torch.device) -> Results:
    """Time each function beside torch's.

    The forward error is the bound in neula's result; ``difference`` is that of the two solutions, relative to
    torch's. A peer that does not decide the rank, or iterates without an end that is measured, is no equal.
    The floor is what operations and bytes allow at the rates of large products and copies in the same run;
    ``memory`` is what the call takes beside A, in units of A.
    """
    results = Results("sizes", device)
    on_gpu = device.type == "cuda"
    machine = Machine.measured(device, tuple(DTYPES)) if on_gpu else None
    for case in cases(device, small=not on_gpu):
        seconds, peer = (_seconds(call, case.first_calls) for call in (case.call, case.peer))
        result, memory = _memory(case) if on_gpu and not case.first_calls else (case.call(), None)
        row: dict[str, Any] = {
            "problem": case.problem,
            "matrix": case.matrix,
            "shape": case.shape,
            "ms": 1e3 * seconds,
            "torch_ms": 1e3 * peer,
            "speedup": peer / seconds,
            "gflop": 1e-9 * case.work.flops,
            "gb": 1e-9 * case.work.size,
        }
        if machine is not None:
            floor, _ = machine.floor(case.work.flops, case.work.size, case.work.format)
            row |= {"floor_ms": 1e3 * floor, "memory": memory}
        results.add(
            **row,
            forward_error=_number(getattr(result, "forward_error", None)),
            difference=None if case.first_calls else _difference(result, case.peer()),
            methods=" / ".join(attempt.method for attempt in getattr(result, "attempts", ())),
            certified=getattr(result, "converged", None),
        )
        del case, result
    return results


def _seconds(call: Call, first_calls: bool) -> float:
    """Median, after calls that compile and record."""
    if first_calls:
        return seconds_of(call)
    warm = min(seconds_of(call) for _ in range(2))
    repeats = round(min(max(ENOUGH / warm, FEWEST), MOST))
    return statistics.median(seconds_of(call) for _ in range(repeats))


def _memory(case: Case) -> tuple[Any, float]:
    """The result of a call, and the most additional memory that it took, relative to the matrix."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = case.call()
    torch.cuda.synchronize()
    return result, (torch.cuda.max_memory_allocated() - before) / case.matrix_bytes


def _number(bound: Any) -> float | None:
    """The largest of a batch."""
    return None if bound is None else float(torch.as_tensor(bound).max())


def _difference(result: Any, expected: Any) -> float | None:
    found = getattr(result, "x", None)
    if found is None:
        return None
    expected = getattr(expected, "solution", expected).reshape(found.shape)
    return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))
