"""The kernel of :mod:`neula.kernels.few_vectors.symmetric_product`, in CUDA C++.

``4 n^2`` bytes in double precision, half of those of a matrix. CUDA rather than Triton: sums of rows and of
columns of the same numbers stay in registers until there are enough of them.
"""

from __future__ import annotations

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.few_vectors.symmetric_product import VECTORS
from neula.kernels.launch import ceil_div

TILE, ROWS, THREADS = 256, 4, 256
"""Order of the square that a thread block reads, rows that a warp has at a time, and threads."""

MACROS = "".join(
    f"#define {name} {value}\n"
    for name, value in [("V", VECTORS), ("TILE", TILE), ("ROWS", ROWS), ("THREADS", THREADS)]
)


def symmetric_product_cuda(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``symmetric_product.symmetric_product`` by the kernel, queued on the current stream.

    Raises
    ------
    ImportError
        Without a torch that compiles CUDA.
    """
    n, k = x.shape
    return _summed("symmetric_product", a, [x], [k], [*x.stride()])[:n, :k]


def symmetric_sizes_cuda(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``symmetric_product.symmetric_sizes`` by the kernel, queued on the current stream."""
    sums, squares = _summed("symmetric_sizes", a, [], [], [])[: len(a)].unbind(1)
    return sums, squares.sqrt()


def _summed(
    name: str, a: torch.Tensor, vectors: list[torch.Tensor], counts: list[int], strides: list[int]
) -> torch.Tensor:
    """Launch a kernel for A and some vectors, and sum its partial results."""
    n, tiles = len(a), ceil_div(len(a), TILE)
    a = a if a.stride(1) == 1 else a.mT  # whose tiles are those of A, turned over
    shares = a.new_empty(tiles, tiles * TILE, VECTORS)
    with torch.cuda.device_of(a):
        kernel = compiled("symmetric_product", name, a.device, MACROS)
        arguments = [a, *vectors, shares, n, *counts, tiles, a.stride(0), *strides]
        kernel((tiles * (tiles + 1) // 2, 1, 1), (THREADS, 1, 1), arguments)
    return shares.sum(0)
