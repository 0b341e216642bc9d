"""QR of batches of small matrices against cuSOLVER or LAPACK (through torch)."""

from __future__ import annotations

from functools import partial

import torch

import neula
from benchmarks.harness import Results
from neula.papers.measuring import median_seconds

GPU_SHAPES = [(8192, 32, 32), (4096, 256, 32), (1024, 256, 128), (64, 4096, 128), (64, 1024, 1024)]
CPU_SHAPES = [(1024, 32, 32), (256, 256, 32), (64, 256, 128)]


def run(device: torch.device, repeats: int = 15) -> Results:
    """Time ``neula.qr`` of a batch of float32 matrices beside ``torch.linalg.qr``, with the errors of both.

    Errors are those of the worst matrix, computed from the factors in float64:
    ``||A - Q R||_F / ||A||_F`` and ``||I - Q^T Q||_F / sqrt(n)``.
    """
    results = Results("batched_qr", device)
    for batch, m, n in GPU_SHAPES if device.type == "cuda" else CPU_SHAPES:
        generator = torch.Generator(device).manual_seed(n)
        a = torch.randn(batch, m, n, device=device, generator=generator)
        seconds = median_seconds(partial(neula.qr, a), repeats, warmup=3)
        peer = median_seconds(partial(torch.linalg.qr, a), 3)
        factors = neula.qr(a)
        residual, orthogonality = _errors(a, *factors)
        torch_residual, torch_orthogonality = _errors(a, *torch.linalg.qr(a))
        results.add(
            batch=batch,
            m=m,
            n=n,
            ms=1e3 * seconds,
            torch_ms=1e3 * peer,
            speedup=peer / seconds,
            residual=residual,
            orthogonality=orthogonality,
            torch_residual=torch_residual,
            torch_orthogonality=torch_orthogonality,
            method=factors.attempts[-1].method,
            certified=factors.converged,
        )
    return results


def _errors(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> tuple[float, float]:
    """Residual and orthogonality of the worst matrix, some at a time."""
    norm = torch.linalg.matrix_norm
    identity = torch.eye(a.shape[2], dtype=torch.float64, device=a.device)
    residual = orthogonality = 0.0
    for x, y, z in zip(*(t.split(64) for t in (a, q, r)), strict=True):
        x, y, z = x.double(), y.double(), z.double()
        residual = max(residual, float((norm(x - y @ z) / norm(x)).max()))
        orthogonality = max(orthogonality, float(norm(identity - y.mT @ y).max()) / a.shape[2] ** 0.5)
    return residual, orthogonality
