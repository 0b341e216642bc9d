"""Products of a symmetric matrix with one or two vectors: a GPU reads half of it.

``4 n^2`` bytes in double precision, half of those of a matrix. CUDA rather than Triton: sums of rows and of
columns of the same numbers stay in registers until there are enough of them.
"""

from __future__ import annotations

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import ceil_div

VECTORS = 2
"""Up to how many vectors the kernel takes: four multiply-adds for each number that is read."""


@trial("The kernel of products with symmetric matrices", "all of them is read instead of half")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, dtype=torch.float64, device=device)
    symmetric_product.kernel(one, one)


def _takes(a: torch.Tensor, x: torch.Tensor) -> bool:
    read = a.dtype == torch.float64 and 1 in a.stride() and len(a) > 0
    return read and x.dtype == a.dtype and 0 < x.shape[1] <= VECTORS


@kernel("symmetric_product_cuda", trial=_tried, when=_takes)
def symmetric_product(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``A X`` for a symmetric A (n, n); where it is not, each element may stand for its mirror as well."""
    return a @ x


TILE, ROWS, THREADS = 256, 4, 256
"""Order of the square that a thread block reads, rows that a warp has at a time, and threads."""

MACROS = "".join(
    f"#define {name} {value}\n"
    for name, value in [("V", VECTORS), ("TILE", TILE), ("ROWS", ROWS), ("THREADS", THREADS)]
)


def symmetric_product_cuda(a, x):
    (n, k), tiles = x.shape, ceil_div(len(a), TILE)
    a = a if a.stride(1) == 1 else a.mT  # whose tiles are those of A, turned over
    shares = a.new_empty(tiles, tiles * TILE, VECTORS)
    kernel = compiled("symmetric_product", "symmetric_product", a.device, MACROS)
    arguments = [a, x, shares, n, k, tiles, a.stride(0), *x.stride()]
    kernel((tiles * (tiles + 1) // 2, 1, 1), (THREADS, 1, 1), arguments)
    return shares.sum(0)[:n, :k]
