"""Least squares larger than memory: ``python -m benchmarks stream [--rows M --columns N]``.

On a GPU A lies in the memory of the host, pinned and not, beside copying it to the GPU once a pass. On a CPU
it lies in a ``.npy`` file, beside reading that once and what LAPACK takes for the same numbers in memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import neula
from benchmarks.harness import Results
from neula.io.sources import row_blocks
from neula.papers.measuring import median_seconds, timed

SIZES = {"cuda": (2_000_000, 3_750), "cpu": (200_000, 200)}
PAGEABLE = 4
"""By so much smaller is the problem in pageable memory, which is copied several times as slowly."""

BLOCK = 1 << 28
"""Bytes that are copied, or made, at a time."""


def run(device: torch.device, rows: int | None = None, columns: int | None = None) -> Results:
    """Time one problem."""
    m, n = SIZES[device.type]
    m, n = rows or m, columns or n
    results = Results("stream", device)
    if device.type == "cuda":
        results.add(**_on_gpu(m // PAGEABLE, n, device, pinned=False))
        results.add(**_on_gpu(m, n, device, pinned=True))
    else:
        with tempfile.TemporaryDirectory() as folder:
            results.add(**_on_cpu(m, n, Path(folder) / "a.npy"))
    return results


def _on_gpu(m: int, n: int, device: torch.device, *, pinned: bool) -> dict[str, Any]:
    a = torch.empty(m, n, dtype=torch.float64, pin_memory=pinned)
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(n, dtype=torch.float64, device=device, generator=generator)
    b, step = torch.empty(m, dtype=torch.float64, device=device), BLOCK // (8 * n)
    for part in a.split(step):
        block = torch.randn(len(part), n, dtype=torch.float64, device=device, generator=generator)
        start = part.storage_offset() // n
        noise = torch.randn(len(part), dtype=torch.float64, device=device, generator=generator)
        b[start : start + len(part)] = block @ x + noise
        part.copy_(block)
    source = row_blocks(a)
    room = [torch.empty(step, n, dtype=torch.float64, device=device) for _ in range(2)]

    def copy() -> None:
        for place, part in enumerate(a.split(step)):
            room[place % 2][: len(part)].copy_(part, non_blocking=pinned)

    copying = median_seconds(copy, 3)
    room.clear()
    return _row(m, n, "pinned" if pinned else "pageable", copying, lambda: neula.lstsq(source, b))


def _on_cpu(m: int, n: int, path: Path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    a = np.lib.format.open_memmap(path, "w+", np.float64, (m, n))
    step = max(1, (1 << 26) // (8 * n))
    for start in range(0, m, step):
        a[start : start + step] = rng.standard_normal((min(step, m - start), n))
    a.flush()
    b, room = a[:, 0] + rng.standard_normal(m), np.empty((step, n))

    def read() -> None:
        mapped = np.load(path, mmap_mode="r")
        for start in range(0, m, step):
            np.copyto(room[: min(step, m - start)], mapped[start : start + step])

    reading = median_seconds(read, 3)
    lapack = _lapack(torch.from_numpy(np.array(a)), torch.from_numpy(b))
    row = _row(m, n, ".npy", reading, lambda: neula.lstsq(row_blocks(path), b))
    return {**row, "lapack_ms": 1e3 * lapack, "ratio_to_lapack": row["ms"] / 1e3 / (reading + lapack)}


def _lapack(a: torch.Tensor, b: torch.Tensor) -> float:
    return median_seconds(lambda: torch.linalg.lstsq(a, b[:, None], driver="gels"), 1, warmup=1)


def _row(m: int, n: int, where: str, pass_seconds: float, solve: Callable[[], Any]) -> dict[str, Any]:
    solve()
    result, seconds = timed(solve)
    return {
        "A in": where,
        "m": m,
        "n": n,
        "gb": 8e-9 * m * n,
        "ms": 1e3 * seconds,
        "passes": result.passes,
        "pass_ms": 1e3 * pass_seconds,
        "ratio": seconds / (result.passes * pass_seconds),
        "gb_per_s": 8e-9 * m * n / pass_seconds,
        "backward_error": result.backward_error,
        "forward_error": result.forward_error,
        "certified": result.converged,
        "method": result.factorization,
    }
