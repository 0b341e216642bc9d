"""Least squares in double precision against the direct solvers of torch and SciPy."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import scipy.linalg
import torch

import neula
from benchmarks.harness import Results
from neula.io.matrices import random_matrix
from neula.papers.errors import optimality
from neula.papers.measuring import median_seconds

CASES = [
    ("uniform01", 0.0),
    ("uniform", 0.0),
    ("normal", 0.0),
    ("geometric", 1e3),
    ("arithmetic", 1e5),
    ("cluster_small", 1e5),
    ("cluster_large", 1e5),
    ("geometric", 1e4),
]
CPU_CASES = [("normal", 0.0), ("arithmetic", 1e3), ("geometric", 1e4)]


def run(device: torch.device, shape: tuple[int, int] | None = None, repeats: int = 3) -> Results:
    """Time ``neula.lstsq`` on the papers' matrices beside ``torch.linalg.lstsq`` (and SciPy on a CPU)."""
    gpu = device.type == "cuda"
    m, n = shape or ((32768, 16384) if gpu else (16384, 2048))
    results = Results("lstsq", device)
    for kind, cond in CASES if gpu else CPU_CASES:
        a = random_matrix(kind, m, n, cond=max(cond, 1.0), device=device, seed=7)
        generator = torch.Generator(device).manual_seed(8)
        b = torch.randn(m, 1, dtype=a.dtype, device=device, generator=generator)
        seconds = median_seconds(partial(neula.lstsq, a, b), repeats)
        result = neula.lstsq(a, b)
        peer = median_seconds(partial(torch.linalg.lstsq, a, b, driver="gels"), 1 if gpu else repeats)
        direct = torch.linalg.lstsq(a, b, driver="gels").solution
        row: dict[str, Any] = {
            "matrix": kind,
            "cond": cond or "",
            "m": m,
            "n": n,
            "ms": 1e3 * seconds,
            "torch_ms": 1e3 * peer,
            "speedup": peer / seconds,
            "optimality": optimality(a, b, result.x),
            "torch_optimality": optimality(a, b, direct),
        }
        if not gpu:
            solve = partial(scipy.linalg.lstsq, a.numpy(), b.numpy())
            row["scipy_ms"] = 1e3 * median_seconds(solve, 1, warmup=0)
            row["speedup_scipy"] = row["scipy_ms"] / row["ms"]
            row["scipy_optimality"] = optimality(a, b, torch.from_numpy(np.asarray(solve()[0])))
        row |= {"iterations": result.iterations, "method": result.factorization}
        row |= {"certified": result.converged, "attempts": [a.reason for a in result.attempts]}
        results.add(**row)
        del a, b, direct, result
    return results
