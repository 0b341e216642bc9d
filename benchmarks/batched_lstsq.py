"""Least squares of batches of small problems against torch: its batched call, and a loop."""

from __future__ import annotations

from functools import partial

import torch

import neula
from benchmarks.harness import Results
from neula.papers.measuring import median_seconds

GPU_SHAPES = [(4096, 64, 16), (1024, 256, 32), (256, 512, 128), (64, 4096, 128), (1024, 32, 256)]
CPU_SHAPES = [(1000, 64, 8), (100, 256, 32), (16, 512, 128)]
DTYPES = (torch.float32, torch.float64)

LOOPED = 64
"""Problems of the loop that are timed; the others would take as long each."""


def run(device: torch.device, repeats: int = 15) -> Results:
    """Time ``neula.lstsq`` of a batch beside ``torch.linalg.lstsq``, with the backward errors of both.

    The errors are those of the worst problem, computed in float64:
    the smaller one of ``||A^T r|| / (||A|| ||r||)`` and ``||r|| / (||A|| ||x|| + ||b||)``.
    """
    results = Results("batched_lstsq", device)
    shapes = GPU_SHAPES if device.type == "cuda" else CPU_SHAPES
    for batch, m, n in shapes:
        for dtype in DTYPES:
            generator = torch.Generator(device).manual_seed(n)
            a = torch.randn(batch, m, n, device=device, dtype=dtype, generator=generator)
            b = torch.randn(batch, m, 1, device=device, dtype=dtype, generator=generator)
            seconds = median_seconds(partial(neula.lstsq, a, b), repeats, warmup=3)
            peer = median_seconds(partial(torch.linalg.lstsq, a, b), 5)
            looped = min(LOOPED, batch)
            loop = median_seconds(partial(_loop, a[:looped], b[:looped]), 3) * batch / looped
            result = neula.lstsq(a, b)
            results.add(
                batch=batch,
                m=m,
                n=n,
                dtype=str(dtype).removeprefix("torch."),
                ms=1e3 * seconds,
                torch_ms=1e3 * peer,
                loop_ms=1e3 * loop,
                speedup=peer / seconds,
                speedup_loop=loop / seconds,
                error=_backward_error(a, b, result.x),
                torch_error=_backward_error(a, b, torch.linalg.lstsq(a, b).solution),
                method=result.factorization,
                iterations=result.iterations,
                certified=result.converged,
            )
    return results


def _loop(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """One call for each problem, as in code without batches."""
    return [torch.linalg.lstsq(*pair).solution for pair in zip(a, b, strict=True)]


def _backward_error(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> float:
    """Backward error of the worst problem, computed for 64 problems at a time."""
    worst = 0.0
    norm = torch.linalg.matrix_norm
    for group in zip(*(t.split(64) for t in (a, b, x)), strict=True):
        ai, bi, xi = (t.double() for t in group)
        residual, size = bi - ai @ xi, norm(ai, 2)
        optimality = norm(ai.mT @ residual) / (size * norm(residual))
        consistent = norm(residual) / (size * norm(xi) + norm(bi))
        worst = max(worst, float(torch.minimum(optimality, consistent).max()))
    return worst
