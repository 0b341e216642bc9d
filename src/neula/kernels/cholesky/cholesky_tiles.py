"""Cholesky factors by tiles, all in one launch: with inverses of diagonal blocks, or of a batch.

A library factorizes some columns, solves for what is below them, and updates the rest, each after the one
before: with a matrix of middle size most of a GPU is idle meanwhile. Here what can be done of later columns
is done concurrently with the chain of square roots: for each 64 columns a diagonal tile, a tile below it that
is solved with that, and what this contributes to the next diagonal tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.kernels.cholesky.cholesky import MAX_COLUMNS, cholesky_apart
from neula.kernels.cuda_source import compiled
from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import multiprocessors
from neula.kernels.triangular_inverse import triangular_inverse

TILE = 64
"""Rows and columns that a thread block has at a time."""


ORDERS = range(768, 8193)
"""Of single matrices of which only a factor is wanted (1500: 0.54 ms on an H200, 0.74 by the library;
2048: 0.68 and 1.0). With smaller ones little is gained, and this has to be compiled first."""


class InvertedFactor(NamedTuple):
    """``A = L L^T`` of one matrix."""

    lower: torch.Tensor  # shape (1, n, n): L, zero above the diagonal
    # Shape (blocks, 1, width, width): L_kk^-1 for blocks on the diagonal; of the last one only the part that
    # L has counts.
    inverses: torch.Tensor
    # Shape (1,): int32: 0, or the order of the first leading minor that is not positive; then L means
    # nothing.
    order: torch.Tensor


@trial("The kernel of Cholesky factors with inverses", "library calls take its place")
def _tried(device: torch.device) -> None:
    factor_inverted.kernel(torch.ones(1, 1, 1, dtype=torch.float64, device=device), 1)


@kernel(
    "factor_inverted_cuda",
    trial=_tried,
    when=lambda a, width: a.dtype in (torch.float32, torch.float64) and len(a) == 1 and a.numel() > 0,
)
def factor_inverted(a: torch.Tensor, width: int) -> InvertedFactor:
    """A Cholesky factor of one matrix (1, n, n), of which only the lower triangle is read, and inverses of
    the blocks on its diagonal, without synchronizing.

    On a GPU the width of the blocks is a multiple of :data:`TILE`, or at least n.
    """
    n = a.shape[-1]
    lower, order = torch.linalg.cholesky_ex(a)
    inverses = lower.new_zeros(-(-n // width), 1, width, width)
    for inverse, start in zip(inverses, range(0, n, width), strict=True):
        k = slice(start, min(start + width, n))
        size = k.stop - k.start
        inverse[:, :size, :size] = triangular_inverse(lower[:, k, k], upper=False)
    return InvertedFactor(lower, inverses, order)


def lower_factor(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cholesky factors as :func:`torch.linalg.cholesky_ex` returns them, of one matrix of middle size by
    tiles; only the lower triangles are read.
    """
    if a.ndim == 3 and a.shape[-1] in ORDERS and factor_inverted.takes(a, TILE):
        lower, _, order = factor_inverted(a, TILE)
        return lower, order
    lower, order = torch.linalg.cholesky_ex(a)
    return lower, order


class BatchFactors(NamedTuple):
    """Cholesky factors of symmetric matrices ``A = L L^T``."""

    lower: torch.Tensor  # shape (batch, n, n): L, float32, row-major, zero above the diagonal
    # Shape (batch,): int32: 0, or the order of the first leading minor that is not positive, or may not be
    # for all that rounding errors say; then L means nothing.
    order: torch.Tensor


@trial("The kernels of Cholesky factors of batches", "library calls take their place, several times slower")
def _tried_on_batch(device: torch.device) -> None:
    factor_batch.kernel(torch.eye(MAX_COLUMNS + 1, dtype=torch.float32, device=device)[None])


@kernel(
    "factor_batch_cuda", trial=_tried_on_batch, when=lambda a: a.dtype != torch.float64 and 0 not in a.shape
)
def factor_batch(a: torch.Tensor) -> BatchFactors:
    """Cholesky factors of a batch of any floating dtype, in products as accurate as float32, without
    synchronizing; only the lower triangles are read.

    On a GPU by the kernel of tiles, or by that of matrices of up to 128 columns.
    """
    lower, order = torch.linalg.cholesky_ex(a.float())
    return BatchFactors(lower.contiguous(), order)


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


def factor_inverted_cuda(a, width):
    per_block = -(-min(width, a.shape[-1]) // TILE)
    lower, order, inverses = _factor(a, per_block)
    return InvertedFactor(lower, inverses.mT[:, None], order)


def factor_batch_cuda(a):
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
    kernel = compiled("cholesky_tiles", "cholesky_tiles", a.device, macros, shared_bytes=shared_bytes(size))
    sizes = (n, tiles, per_block, count, together)
    arguments = [a, lower, inverses, diagonal, unsolved, state, *a.stride(), *sizes]
    kernel((blocks, 1, 1), (THREADS, 1, 1), arguments, shared_bytes(size))
    return lower[:, :n, :n], state[1 : 1 + count], inverses
