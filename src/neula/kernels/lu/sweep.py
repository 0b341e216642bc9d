"""Triangular systems with inverted diagonal blocks and a few right-hand sides, solved in one launch.

Block by block a solve is two launches a block, dozens in all, each of which takes longer to begin and to end
than to read what it multiplies. CUDA rather than Triton: on a matrix unit the few sums of so narrow a product
are formed one after the other, a chain several times as long, and here the matrix comes to the L2 cache
during the waits.
"""

from __future__ import annotations

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.dispatch import kernel, trial
from neula.kernels.few_vectors.thin import VECTORS
from neula.kernels.launch import multiprocessors
from neula.kernels.precision import exact_matmul

PIECE = 512
"""Columns that a thread block multiplies; widths of blocks are multiples of it."""

ALIGNED = 4
"""Elements that are loaded at a time: at multiples of so many begin the columns, or rows, of a matrix."""


@trial("The kernel of triangular solves", "a launch for each block takes its place")
def _tried(device: torch.device) -> None:
    t = torch.eye(3 * PIECE, device=device, dtype=torch.float16)
    inverses = torch.eye(PIECE, dtype=torch.float32, device=device).repeat(3, 1, 1)
    sweep.kernel(t, inverses, torch.ones(len(t), 1, dtype=torch.float32, device=device), upper=False)
    torch.cuda.synchronize(device)


def _takes(t: torch.Tensor, inverses: torch.Tensor, b: torch.Tensor, *, upper: bool) -> bool:
    single = t.ndim == 2 and t.dtype.itemsize == 2 and inverses.dtype == b.dtype == torch.float32
    if not single or inverses.shape[-1] % PIECE or not 0 < b.shape[1] <= VECTORS:
        return False
    along, across = sorted(t.stride())
    return along == 1 and across % ALIGNED == 0 and t.data_ptr() % (2 * ALIGNED) == 0


@kernel("sweep_cuda", trial=_tried, when=_takes)
def sweep(t: torch.Tensor, inverses: torch.Tensor, b: torch.Tensor, *, upper: bool) -> torch.Tensor:
    """``T^-1 B``, in the precision of B, for a triangular T (n, n) of a low format.

    Blocks on its diagonal are not read, but their inverses (blocks, width, width), the last one bordered by
    an identity where it is smaller.
    """
    width, x = inverses.shape[-1], torch.empty_like(b)
    rest, starts = b.clone(), range(0, len(t), width)
    for index in reversed(range(len(starts))) if upper else range(len(starts)):
        k = slice(starts[index], min(starts[index] + width, len(t)))
        size = k.stop - k.start
        x[k] = exact_matmul(inverses[index, :size, :size], rest[k])
        beside = slice(0, k.start) if upper else slice(k.stop, None)
        rest[beside] -= exact_matmul(t[beside, k].to(x.dtype), x[k])
    return x


ROWS, FEW, THREADS = 64, 16, 256
"""Rows of a tile, of an inverse that are multiplied at a time, and threads of a block."""

BLOCKS = 2
"""Thread blocks for each multiprocessor: while one waits, the other multiplies."""


def sweep_cuda(t, inverses, b, *, upper):
    arguments, x = prepared(t, inverses, b, upper=upper)
    shared_bytes = 4 * (VECTORS * PIECE + THREADS // 32 * ROWS * VECTORS + 4)
    bfloat = "#define BFLOAT16\n" if t.dtype == torch.bfloat16 else ""
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
