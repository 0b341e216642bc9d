"""A problem written in its border on a GPU in one launch, in CUDA C++."""

from __future__ import annotations

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.launch import ceil_div

THREADS, TILE = 256, 32


def bordered_cuda(a: torch.Tensor, b: torch.Tensor, to_a: torch.Tensor, to_b: torch.Tensor) -> None:
    """:func:`neula.kernels.small_problems.bordered.bordered` by the kernel, queued on the current stream."""
    (_, m, n), (_, rows, columns), k = a.shape, to_a.shape, b.shape[2]
    real = "double" if a.dtype == torch.float64 else "float"
    tiles = ceil_div(rows, TILE) * ceil_div(columns, TILE)
    arguments = [a, b, to_a, to_b, m, n, k, rows, columns, *a.stride()[1:], *b.stride()[1:]]
    with torch.cuda.device_of(a):
        kernel = compiled("bordered", "bordered", a.device, f"#define REAL {real}\n")
        kernel((tiles, 1, 1), (THREADS, 1, 1), arguments)
