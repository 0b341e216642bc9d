"""The kernel of :mod:`neula.kernels.lu.sweep`, in CUDA C++, compiled by NVRTC at the first call.

``n^2`` bytes for each triangle in half precision, for up to eight right-hand sides in float32, and a chain of
two waits a block. CUDA rather than Triton: on a matrix unit the few sums of so narrow a product are formed
one after the other, a chain several times as long, and here the matrix comes to the L2 cache during the
waits.
"""

from __future__ import annotations

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.few_vectors.mixed_product import VECTORS
from neula.kernels.launch import multiprocessors
from neula.kernels.lu.sweep import PIECE

ROWS, FEW, THREADS = 64, 16, 256
"""Rows of a tile, of an inverse that are multiplied at a time, and threads of a block."""

BLOCKS = 2
"""Thread blocks for each multiprocessor: while one waits, the other multiplies."""


def sweep_cuda(t: torch.Tensor, inverses: torch.Tensor, b: torch.Tensor, *, upper: bool) -> torch.Tensor:
    """:func:`neula.kernels.lu.sweep.sweep` by the kernel, queued on the current stream.

    Raises
    ------
    ImportError
        Without a torch that compiles CUDA.
    """
    arguments, x = prepared(t, inverses, b, upper=upper)
    shared_bytes = 4 * (VECTORS * PIECE + THREADS // 32 * ROWS * VECTORS + 4)
    bfloat = "#define BFLOAT16\n" if t.dtype == torch.bfloat16 else ""
    with torch.cuda.device_of(t):
        kernel = compiled("sweep", "sweep", t.device, MACROS + bfloat, shared_bytes=shared_bytes)
        kernel((BLOCKS * multiprocessors(t.device), 1, 1), (THREADS, 1, 1), arguments, shared_bytes)
    return x


def prepared(
    t: torch.Tensor, inverses: torch.Tensor, b: torch.Tensor, *, upper: bool
) -> tuple[list[torch.Tensor | int], torch.Tensor]:
    """Arguments of the kernel, and the tensor that receives the solutions."""
    (n, k), (blocks, width) = b.shape, inverses.shape[:2]
    if inverses.stride(2) != 1:
        inverses = inverses.contiguous()
    pieces, order = width // PIECE, blocks * width
    rest, x = b.new_zeros(pieces, order, VECTORS), b.new_empty(order, VECTORS)
    rest[0, :n, :k] = b
    flags = rest.new_zeros(1 + blocks * (width // FEW + width // ROWS * pieces), dtype=torch.int32)
    sizes = [n, blocks, width, int(upper), *t.stride(), *inverses.stride()[:2]]
    return [t, inverses, rest, x, flags, *sizes], x[:n, :k]


MACROS = "".join(
    f"#define {name} {value}\n"
    for name, value in [("V", VECTORS), ("ROWS", ROWS), ("FEW", FEW), ("PIECE", PIECE), ("THREADS", THREADS)]
)
