"""``A X`` for many vectors in twice the precision of float64, on the matrix units of a GPU.

Products of slices are exact (Ozaki; ``doubled``), and the units add them in float64: six multiply-adds there
for each element and vector in place of eleven operations, and units do twice as many. Slices are in
registers: A is read once for 24 vectors, which are sliced beforehand.
"""

from __future__ import annotations

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.doubled.doubled_cuda import ELEMENTS, THREADS, place
from neula.kernels.launch import ceil_div, multiprocessors

CHUNK = 32
"""Columns that are cut at the same places, and whose products are added without rounding errors."""

ROWS = THREADS // 32 * 16
"""Rows of a thread block."""

TILES = 3
"""Most tiles of eight vectors for which an element is read once."""

BLOCKS = {1: 3, 2: 2, 3: 2}
"""Thread blocks of a multiprocessor, by the number of tiles: as many as their registers allow."""

WAVES = 2
"""Waves of thread blocks into which the work is divided."""

LEAST = 16 * CHUNK
"""Elements of a row that are not divided any further."""


def tiles_of(k: int) -> int:
    """How many at a time are fewest for so many vectors."""
    tiles = ceil_div(k, 8)
    return ceil_div(tiles, ceil_div(tiles, TILES))


def sliced_product_cuda(
    a: torch.Tensor,
    x: torch.Tensor,
    x_low: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
    *,
    least: int = LEAST,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``A (x + x_low)``, or ``b - A (x + x_low)`` where b is given, queued on the current stream.

    Parameters and results are those of :func:`neula.kernels.doubled.doubled_cuda.doubled_product_cuda`, and
    ``columns`` : Tensor, shape (batch, n, 1), optional
        Sizes of the columns, where they differ much.
    """
    (batch, m, n), k = a.shape, x.shape[2]
    result = torch.empty(2, batch, k, m, dtype=a.dtype, device=a.device)
    high, low = result.mT.unbind(0)
    if result.numel() == 0:
        return high, low
    tiles = tiles_of(k)
    groups = ceil_div(k, 8 * tiles)
    macros = f"#define TILES {tiles}\n#define BLOCKS {BLOCKS[tiles]}\n"
    tasks = ceil_div(m, ROWS) * groups * batch
    wanted = round(WAVES * BLOCKS[tiles] * multiprocessors(a.device) / tasks)
    chunks = ceil_div(max(n, 1), CHUNK)
    piece = CHUNK * ceil_div(chunks, max(1, min(wanted, n // least)))
    pieces = ceil_div(chunks * CHUNK, piece)
    sums = result if pieces == 1 else result.new_empty(2, pieces, batch, k, m)
    task = (*sum(map(place, (a, x, x_low, b)), ()), sums, m, n, k, batch * k * m, pieces, piece)
    warps = batch * chunks * groups * tiles
    slices = result.new_empty(warps * 3 * 8 * CHUNK)
    sizes = 0 if columns is None else columns.contiguous()
    with torch.cuda.device_of(a):
        threads = (THREADS, 1, 1)
        cut = compiled("sliced", "cut_vectors", a.device, macros)
        cut((ceil_div(warps * 32, THREADS), 1, 1), threads, [task, slices, sizes])
        kernel = compiled("sliced", "sliced_product", a.device, macros)
        kernel((tasks * pieces, 1, 1), threads, [task, slices, sizes])
        if pieces > 1:
            grid = (ceil_div(result[0].numel(), ELEMENTS), 1, 1)
            compiled("sliced", "sum_of_pieces", a.device, macros)(grid, threads, [task, result])
    return high, low
