"""Least squares with bounds against SciPy, which takes one right-hand side after the other on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import scipy.optimize
import torch

import neula
from benchmarks.harness import Results
from neula.papers.measuring import median_seconds

GPU_CASES = [("nnls", 4000, 500, 1), ("nnls", 2000, 200, 100_000), ("lsq_linear", 4000, 500, 1)]
CPU_CASES = [
    ("nnls", 4000, 500, 1),
    ("nnls", 2000, 200, 1),
    ("nnls", 2000, 200, 200),
    ("lsq_linear", 4000, 500, 1),
    ("lsq_linear", 2000, 200, 1),
]

LOOPED = 20
"""Right-hand sides of the loop that are timed; the others would take as long each."""


def run(device: torch.device, repeats: int = 5) -> Results:
    """Time ``neula.nnls`` and ``neula.lsq_linear`` beside SciPy's, with the violations of both.

    A violation is how far a step along the gradient, cut off at the bounds, leads at most, for columns of
    norm 1, relative to the norm of b.
    """
    results = Results("bounded", device)
    for problem, m, n, k in GPU_CASES if device.type == "cuda" else CPU_CASES:
        a, b = _problem(m, n, k, device)
        bounds = (0.0, np.inf) if problem == "nnls" else (0.0, 0.7)
        solve: Callable[[], Any] = partial(neula.lsq_linear, a, b, bounds)
        if problem == "nnls":
            solve = partial(neula.nnls, a, b)
        seconds = median_seconds(solve, repeats)
        result = solve()
        looped = min(LOOPED, k)
        host, columns = a.cpu().numpy(), b[:, :looped].cpu().numpy()
        begun = perf_counter()
        found = np.stack([_by_scipy(problem, host, column, bounds) for column in columns.T], 1)
        peer = (perf_counter() - begun) * k / looped
        ours = result.x[:, :looped].cpu().numpy()
        results.add(
            problem=problem,
            m=m,
            n=n,
            k=k,
            ms=1e3 * seconds,
            scipy_ms=1e3 * peer,
            speedup=peer / seconds,
            violation=_violation(host, columns, ours, bounds),
            scipy_violation=_violation(host, columns, found, bounds),
            at_bounds=float((result.active_mask != 0).double().mean()),
            method=result.attempts[-1].method,
            certified=result.converged,
        )
    return results


def _problem(m: int, n: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Random A, and b whose solution without bounds has about as many negative as positive elements."""
    generator = torch.Generator(device).manual_seed(n)
    normal = partial(torch.randn, device=device, dtype=torch.float64, generator=generator)
    a = normal(m, n)
    return a, a @ normal(n, k) + normal(m, k)


def _by_scipy(problem: str, a: np.ndarray, b: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    if problem == "nnls":
        return scipy.optimize.nnls(a, b)[0]
    return scipy.optimize.lsq_linear(a, b, bounds).x


def _violation(a: np.ndarray, b: np.ndarray, x: np.ndarray, bounds: tuple[float, float]) -> float:
    norms = np.linalg.norm(a, axis=0)[:, None]
    scaled, gradient = norms * x, a.T @ (b - a @ x) / norms
    step = np.clip(scaled + gradient, norms * bounds[0], norms * bounds[1]) - scaled
    return float((np.abs(step).max(axis=0) / np.linalg.norm(b, axis=0)).max())
