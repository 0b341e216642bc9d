"""QR against cuSOLVER or LAPACK (through torch), over the shapes of the paper."""

from __future__ import annotations

from functools import partial

import torch

import neula
from benchmarks.harness import Results
from neula.algorithms.rgsqrf import rgsqrf
from neula.engines import select_engine
from neula.experiments.measuring import median_seconds

GPU_SHAPES = [
    (32768, 32768),
    (32768, 16384),
    (16384, 16384),
    (131072, 4096),
    (524288, 1024),
    (4194304, 128),
    (8192, 8192),
    (4096, 4096),
    (16384, 1024),
    (1024, 1024),
]
CPU_SHAPES = [(16384, 2048), (65536, 512), (4096, 4096), (262144, 64)]


def run(device: torch.device, accuracies: tuple[str, ...] | None = None, repeats: int = 5) -> Results:
    """Time ``neula.qr`` of float32 matrices at each accuracy beside ``torch.linalg.qr``.

    ``rgsqrf_ms`` is one pass of the algorithm alone, in place and in the cheapest format: without the checks,
    the scaled copy and the certificate that ``neula.qr`` adds, and without a second pass.
    """
    gpu = device.type == "cuda"
    results = Results("qr", device)
    for m, n in GPU_SHAPES if gpu else CPU_SHAPES:
        a = torch.randn(m, n, device=device)
        bare = _bare_rgsqrf(a, "fp16" if gpu else "fp32", repeats)
        peer = median_seconds(partial(torch.linalg.qr, a), 3 if m * n < 2**28 else 1)
        for accuracy in accuracies or (("fp16", "fp32") if gpu else ("fp32",)):
            seconds = median_seconds(partial(neula.qr, a, accuracy=accuracy), repeats)
            factors = neula.qr(a, accuracy=accuracy)
            results.add(
                m=m,
                n=n,
                accuracy=accuracy,
                ms=1e3 * seconds,
                rgsqrf_ms=1e3 * bare,
                tflops=(2 * m * n * n - 2 * n**3 / 3) / seconds / 1e12,
                torch_ms=1e3 * peer,
                speedup=peer / seconds,
                residual=factors.certificate.residual,
                orthogonality=factors.certificate.orthogonality,
                method=factors.attempts[-1].method,
                certified=factors.converged,
            )
            del factors
        del a
    return results


def _bare_rgsqrf(a: torch.Tensor, format: str, repeats: int) -> float:
    engine = select_engine("auto", a.device).using(format)
    work = engine.empty(*a.shape)

    def copy() -> None:
        work.copy_(a)

    def copy_and_factorize() -> None:
        work.copy_(a)
        rgsqrf(work, engine, overwrite_a=True)

    return median_seconds(copy_and_factorize, repeats, warmup=2) - median_seconds(copy, repeats)
