"""QR of tall and skinny matrices against cuSOLVER or LAPACK (through torch)."""

from __future__ import annotations

from functools import partial

import torch

import neula
from benchmarks.harness import Results
from neula.papers.errors import backward_error, orthogonality_defect
from neula.papers.measuring import median_seconds

GPU_SHAPES = [(4194304, 128), (1048576, 256), (1048576, 64), (32768, 128)]
CPU_SHAPES = [(262144, 64), (32768, 128)]


def run(device: torch.device, repeats: int = 15) -> Results:
    """Time ``neula.tsqr`` of float32 matrices, uniform in (-1, 1), beside ``geqrf`` alone and with Q.

    Errors are computed from the factors in float64: ``||A - Q R||_F / ||A||_F`` and
    ``||I - Q^T Q||_F / sqrt(n)``. ``copy_ms`` is what reading A and writing Q takes.
    """
    results = Results("tsqr", device)
    for m, n in GPU_SHAPES if device.type == "cuda" else CPU_SHAPES:
        a = torch.rand(m, n, device=device, generator=torch.Generator(device).manual_seed(n)) * 2 - 1
        geqrf = median_seconds(partial(torch.geqrf, a), 3)
        peer = median_seconds(partial(torch.linalg.qr, a), 3)
        torch_residual, torch_orthogonality = _errors(a, *torch.linalg.qr(a))
        copy = median_seconds(partial(torch.empty_like(a).copy_, a), 5)
        for compute in ("auto", "fp16_cor", "tf32_cor") if device.type == "cuda" else ("auto",):
            seconds = median_seconds(partial(neula.tsqr, a, compute=compute), repeats, warmup=3)
            factors = neula.tsqr(a, compute=compute)
            residual, orthogonality = _errors(a, *factors)
            method, certified = factors.attempts[-1].method, factors.converged
            del factors
            results.add(
                m=m,
                n=n,
                compute=compute,
                ms=1e3 * seconds,
                copy_ms=1e3 * copy,
                geqrf_ms=1e3 * geqrf,
                torch_ms=1e3 * peer,
                speedup=geqrf / seconds,
                speedup_with_q=peer / seconds,
                residual=residual,
                orthogonality=orthogonality,
                torch_residual=torch_residual,
                torch_orthogonality=torch_orthogonality,
                method=method,
                certified=certified,
            )
        del a
    return results


def _errors(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> tuple[float, float]:
    loss = float(torch.linalg.matrix_norm(orthogonality_defect(q))) / a.shape[1] ** 0.5
    return backward_error(a, q, r), loss
