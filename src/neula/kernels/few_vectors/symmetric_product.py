"""Products of a symmetric matrix with one or two vectors, and sizes of its rows: a GPU reads half of it.

``4 n^2`` bytes in double precision, half of those of a matrix. CUDA rather than Triton: sums of rows and of
columns of the same numbers stay in registers until there are enough of them.
"""

from __future__ import annotations

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import ceil_div
from neula.kernels.magnitudes import magnitudes

VECTORS = 2
"""Up to how many vectors the kernel takes: four multiply-adds for each number that is read."""


@trial("The kernel of products with symmetric matrices", "all of them is read instead of half")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, dtype=torch.float64, device=device)
    symmetric_product.kernel(one, one)
    symmetric_sizes.kernel(one)


def _is_read(a: torch.Tensor) -> bool:
    return a.dtype == torch.float64 and 1 in a.stride() and len(a) > 0


def _takes(a: torch.Tensor, x: torch.Tensor) -> bool:
    return _is_read(a) and x.dtype == a.dtype and 0 < x.shape[1] <= VECTORS


@kernel("symmetric_product_cuda", trial=_tried, when=_takes)
def symmetric_product(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``A X`` for a symmetric A (n, n); where it is not, each element may stand for its mirror as well.

    Examples
    --------
    >>> a = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    >>> symmetric_product(a, torch.ones(2, 1)).flatten()
    tensor([3., 4.])
    """
    return a @ x


@kernel("symmetric_sizes_cuda", trial=_tried, when=_is_read)
def symmetric_sizes(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of magnitudes, and 2-norms, of the rows of a symmetric A; where it is not, as for products.

    Examples
    --------
    >>> sums, norms = symmetric_sizes(torch.tensor([[0.0, -4.0], [-4.0, 3.0]]))
    >>> sums.tolist(), norms.tolist()
    ([4.0, 7.0], [4.0, 5.0])
    """
    found = magnitudes(a[None])
    return found.sums[0], found.norms[0, :, 0]


TILE, ROWS, THREADS = 256, 4, 256
"""Order of the square that a thread block reads, rows that a warp has at a time, and threads."""

MACROS = "".join(
    f"#define {name} {value}\n"
    for name, value in [("V", VECTORS), ("TILE", TILE), ("ROWS", ROWS), ("THREADS", THREADS)]
)


def symmetric_product_cuda(a, x):
    n, k = x.shape
    return _summed("symmetric_product", a, [x], [k], [*x.stride()])[:n, :k]


def symmetric_sizes_cuda(a):
    sums, squares = _summed("symmetric_sizes", a, [], [], [])[: len(a)].unbind(1)
    return sums, squares.sqrt()


def _summed(
    name: str, a: torch.Tensor, vectors: list[torch.Tensor], counts: list[int], strides: list[int]
) -> torch.Tensor:
    """Launch a kernel for A and some vectors, and sum its partial results."""
    n, tiles = len(a), ceil_div(len(a), TILE)
    a = a if a.stride(1) == 1 else a.mT  # whose tiles are those of A, turned over
    shares = a.new_empty(tiles, tiles * TILE, VECTORS)
    kernel = compiled("symmetric_product", name, a.device, MACROS)
    arguments = [a, *vectors, shares, n, *counts, tiles, a.stride(0), *strides]
    kernel((tiles * (tiles + 1) // 2, 1, 1), (THREADS, 1, 1), arguments)
    return shares.sum(0)
