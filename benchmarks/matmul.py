"""Matrix products in every mode beside torch's float32 product (cuBLAS on a GPU, without TF32)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import neula
from benchmarks.harness import Results
from neula.kernels.precision import exact_matmul
from neula.papers.measuring import median_seconds

UNIFORM, POSITIVE, WIDE = "uniform(-1, 1)", "uniform(0, 1)", "1e-8 to 1e8"
"""Entries: the last ones have a uniform logarithm and both signs."""

GPU_MODES = ("fp16", "bf16", "tf32", "fp16_cor", "tf32_cor", "bf16_cor", "fp32")
LARGE = (2048, 4096, 8192, 16384)
GPU_CASES = [
    *((UNIFORM, n, n, n) for n in (1024, *LARGE)),
    *((WIDE, n, n, n) for n in LARGE),
    (UNIFORM, 524288, 128, 128),
    (UNIFORM, 128, 128, 524288),
    *((POSITIVE, 2048, 2048, k) for k in (128, 1024, 8192, 65536)),
    *((UNIFORM, *shape) for shape in ((16384, 16384, 512), (1000, 1000, 100000), (12288, 256, 12288))),
]
CPU_CASES = [(UNIFORM, n, n, n) for n in (512, 2048)] + [(WIDE, 2048, 2048, 2048)]

ROWS = 512
"""Of C, that are compared with the product in float64."""


def run(device: torch.device, repeats: int = 5) -> Results:
    """Time ``neula.matmul`` of float32 matrices in each mode, and measure its error against float64.

    ``error`` is ``||C - A B||_F / ||A B||_F``, ``componentwise`` the largest ``|C - A B| / (|A| |B|)``. The
    mode ``default`` is the one without ``compute=``.
    """
    gpu = device.type == "cuda"
    modes = GPU_MODES if gpu else ("fp32",)
    results = Results("matmul", device)
    for entries, m, n, k in GPU_CASES if gpu else CPU_CASES:
        a, b = _random(entries, m, k, device, 1), _random(entries, k, n, device, 2)
        reference = _Reference(a, b)
        peer = median_seconds(partial(exact_matmul, a, b), repeats)
        peer_errors = reference.errors(exact_matmul(a, b))
        for mode in ("default", *modes):
            compute = None if mode == "default" else mode
            multiply = partial(neula.matmul, a, b, compute=compute)
            seconds = median_seconds(multiply, repeats)
            error, componentwise = reference.errors(multiply())
            row: dict[str, Any] = {"entries": entries, "m": m, "n": n, "k": k, "compute": mode}
            row |= {"ms": 1e3 * seconds, "tflops": 2e-12 * m * n * k / seconds}
            row |= {"torch_ms": 1e3 * peer, "speedup": peer / seconds}
            row |= {"error": error, "torch_error": peer_errors[0]}
            row |= {"componentwise": componentwise, "torch_componentwise": peer_errors[1]}
            results.add(**row)
    return results


class _Reference:
    """The first rows of A B in float64, and those of |A| |B|."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        some, b = a[:ROWS].double(), b.double()
        self.product = some @ b
        self.size = some.abs() @ b.abs()

    def errors(self, c: torch.Tensor) -> tuple[float, float]:
        difference = c[:ROWS].double() - self.product
        return (
            float(difference.norm() / self.product.norm()),
            float((difference.abs() / self.size).max()),
        )


def _random(entries: str, m: int, n: int, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.rand(m, n, generator=generator, device=device)
    if entries == POSITIVE:
        return x
    if entries == UNIFORM:
        return 2 * x - 1
    sign = torch.rand(m, n, generator=generator, device=device) - 0.5
    return (10 ** (16 * x - 8)).copysign(sign)
