"""LU factorization in half precision, without and with pivoting, against that of the library in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import neula
from benchmarks.harness import Results
from neula.io.matrices import hpl_ai_matrix
from neula.papers.measuring import median_seconds
from neula.pipeline.result import LUFactors

SIZES = {"cpu": (1024, 4096), "cuda": (8192, 16384, 32768, 65536, 131072)}

SLOW = 30000
"""Order beyond which a run takes long, and peers run once."""

WITH_PEERS = 100000
"""Order beyond which there is no room for a float32 matrix and its factors."""

LARGEST = 2.0**15
"""Diagonal of A, scaled from n by a power of two where n is larger: fp16 ends at 65504."""


def run(device: torch.device, sizes: tuple[int, ...] | None = None, repeats: int = 3) -> Results:
    """Time ``neula.lu_factor`` of HPL-AI matrices beside cuSOLVER or LAPACK, without and with pivoting.

    With pivoting of standard normal matrices (``pivot_ms`` beside ``torch_ms``), which need it.

    The matrix is float32 for both, and float16 for neula alone where that does not fit. ``peak`` is the
    memory that was taken beside A, the factors included; the error is that of a solution with the factors in
    float32, ``||b - A x|| / (||A|| ||x||)`` in the infinity norm.
    """
    results = Results("lu", device)
    on_gpu = device.type == "cuda"
    for n in sizes or SIZES[device.type]:
        a = _matrix(n, device)
        mine: Callable[[], LUFactors] = partial(neula.lu_factor, a, pivot="none", keep_a=False)
        seconds = median_seconds(mine, repeats)
        factors, peak = _measured(mine, on_gpu)
        row: dict[str, Any] = {
            "n": n,
            "dtype": str(a.dtype).removeprefix("torch."),
            "ms": 1e3 * seconds,
            "tflops": 2e-12 / 3 * n**3 / seconds,
            "storage_gb": factors.storage_bytes / 1e9,
            "panel": factors.panel,
            "error": _error(a, partial(neula.lu_solve, factors)),
        }
        if on_gpu:
            row["peak_gb"] = peak
        del factors
        if n < WITH_PEERS:
            row |= _peers(a, seconds, on_gpu, repeats if n < SLOW else 1)
            del a
            seconds = _pivoted_seconds(n, device, repeats)
            row |= {"pivot_ms": 1e3 * seconds, "speedup_of_pivoted": row["torch_ms"] / 1e3 / seconds}
        results.add(**row)
    return results


def _pivoted_seconds(n: int, device: torch.device, repeats: int) -> float:
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(n, n, generator=generator, device=device)
    neula.lu_factor(a, keep_a=False)  # records its panels at the second call
    return median_seconds(partial(neula.lu_factor, a, keep_a=False), repeats)


def _matrix(n: int, device: torch.device) -> torch.Tensor:
    if n < WITH_PEERS:
        a = hpl_ai_matrix(n, dtype=torch.float32, device=device)
    else:
        a = torch.empty(n, n, dtype=torch.float16, device=device)
        generator = torch.Generator(device).manual_seed(0)
        for rows in a.split(4096):
            rows.copy_(torch.rand(rows.shape, generator=generator, device=device))
        a.mul_(LARGEST / n).fill_diagonal_(LARGEST)
        return a
    return a.mul_(LARGEST / n) if n > LARGEST else a


def _peers(a: torch.Tensor, seconds: float, on_gpu: bool, repeats: int) -> dict[str, Any]:
    unpivoted = partial(torch.linalg.lu_factor_ex, a, pivot=False) if on_gpu else None
    pivoted = partial(torch.linalg.lu_factor_ex, a)
    row: dict[str, Any] = {}
    if unpivoted is not None:
        peer = median_seconds(unpivoted, repeats, warmup=repeats > 1)
        row |= {"unpivoted_ms": 1e3 * peer, "speedup": peer / seconds}
    peer = median_seconds(pivoted, repeats, warmup=repeats > 1)
    row |= {"torch_ms": 1e3 * peer, "speedup_pivoted": peer / seconds}
    factors, peak = _measured(pivoted, on_gpu)
    if on_gpu:
        row["torch_peak_gb"] = peak
    row["torch_error"] = _error(a, lambda b: torch.linalg.lu_solve(*factors[:2], b))
    return row


def _measured(function: Callable[[], Any], on_gpu: bool) -> tuple[Any, float]:
    """The result of a call, and the memory of the GPU that it took, in GB."""
    if not on_gpu:
        return function(), 0.0
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    return result, (torch.cuda.max_memory_allocated() - before) / 1e9


def _error(a: torch.Tensor, solve: Callable[[torch.Tensor], torch.Tensor]) -> float:
    ones = torch.ones(a.shape[1], 1, dtype=torch.float64, device=a.device)
    blocks = a.split(2048)
    b = torch.cat([block.double() @ ones for block in blocks])
    x = solve(b.float()).double()
    residual = torch.cat([block.double() @ x for block in blocks]).sub_(b).abs().max()
    norm = torch.stack([block.double().abs().sum(1).max() for block in blocks]).max()
    return float(residual / (norm * x.abs().max()))
