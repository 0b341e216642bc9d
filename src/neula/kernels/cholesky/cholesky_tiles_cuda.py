"""The kernel of ``cholesky_tiles`` and of batches, compiled by NVRTC at the first call.

*Chain* of n columns: for each 64 a diagonal tile, a tile below it that is solved with that, and what this
contributes to the next diagonal tile. *Products*: ``n^3 / 3`` flops, and as many for the inverse of all of L.
*Bytes*: a tile is made of up to ``n / 64`` pairs of others, in the cache for matrices of middle size.
"""

from __future__ import annotations

import torch

from neula.kernels.cholesky.cholesky import MAX_COLUMNS, cholesky_apart
from neula.kernels.cholesky.cholesky_batch import BatchFactors
from neula.kernels.cholesky.cholesky_tiles import TILE, InvertedFactor
from neula.kernels.cuda_source import compiled
from neula.kernels.launch import multiprocessors

THREADS = 256

SIDE = 8
"""Side of the diagonal blocks of a tile, whose inverses are kept."""

FEW = 64
"""Tiles on the diagonals of all matrices up to which a multiprocessor has one thread block, with registers
enough, and not two: then it is the chain that takes time (order 3000: 0.81 ms and 1.01; 6000: 3.2 and 2.5),
and tiles that it waits for are solved twice (four matrices of order 1024: 0.16 ms and 0.20).
"""

AHEAD = 6
"""Tasks of a column of tiles for each thread block, so that none is idle while columns end."""


def shared_bytes(itemsize: int) -> int:
    """For three parts of two rows of tiles, a tile of L, inverses on its diagonal and counters."""
    stages, tile = 3 * 2 * TILE * (128 // itemsize + 4), TILE * (TILE + 4)
    return itemsize * (stages + tile + TILE * SIDE) + 32


def factor_inverted_cuda(a: torch.Tensor, width: int) -> InvertedFactor:
    """``cholesky_tiles.factor_inverted`` by the kernel, queued on the current stream.

    Raises
    ------
    ImportError
        Without a torch that compiles CUDA.
    """
    per_block = -(-min(width, a.shape[-1]) // TILE)
    lower, order, inverses = _factor(a, per_block)
    return InvertedFactor(lower, inverses.mT[:, None], order)


def factor_batch_cuda(a: torch.Tensor) -> BatchFactors:
    """:func:`neula.kernels.cholesky.cholesky_batch.factor_batch` by kernels, queued on the current stream.

    Raises
    ------
    ImportError
        Without a torch that compiles CUDA.
    """
    a = a.float()
    if a.shape[-1] <= MAX_COLUMNS and cholesky_apart.takes(a):
        return BatchFactors(*cholesky_apart.kernel(a))
    lower, order, _ = _factor(a)
    return BatchFactors(lower.contiguous(), order)


def _factor(a: torch.Tensor, per_block: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """L, what is not positive, and ``L^-T`` of blocks of so many tiles."""
    (count, n, _), size = a.shape, a.element_size()
    tiles = -(-n // TILE)
    rows, width = tiles * TILE, per_block * TILE
    lower, diagonal = a.new_empty(count, rows, rows), a.new_empty(count, rows, SIDE)
    inverses = a.new_empty(-(-tiles // max(1, per_block)), width, width)
    # The next task; for each matrix its order, how far its rows of tiles are, what is offered.
    rows_of_tiles = 2 * tiles if per_block else tiles
    state = torch.zeros(1 + count * (1 + rows_of_tiles + tiles), dtype=torch.int32, device=a.device)
    running = 1 if count * tiles <= FEW else 2
    unsolved = a.new_empty(count, rows, TILE) if running == 1 else 0
    tasks = count * sum(tiles - j + (j % per_block + 1 if per_block else 0) for j in range(tiles))
    blocks = min(tasks, running * multiprocessors(a.device))
    together = -(-AHEAD * blocks // tiles)
    macros = f"#define REAL {'double' if size == 8 else 'float'}\n#define BLOCKS {running}\n"
    with torch.cuda.device_of(a):
        kernel = compiled(
            "cholesky_tiles", "cholesky_tiles", a.device, macros, shared_bytes=shared_bytes(size)
        )
        sizes = (n, tiles, per_block, count, together)
        arguments = [a, lower, inverses, diagonal, unsolved, state, *a.stride(), *sizes]
        kernel((blocks, 1, 1), (THREADS, 1, 1), arguments, shared_bytes(size))
    return lower[:, :n, :n], state[1 : 1 + count], inverses
