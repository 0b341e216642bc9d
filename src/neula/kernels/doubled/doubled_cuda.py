"""``A X`` in twice the precision of float64 on a GPU, for few vectors and for many.

For each element and vector eleven operations in float64: two for a product and its rounding error (a fused
multiply-add), six for a sum and its rounding error, the rest to add up errors (T. Ogita, S. M. Rump and S.
Oishi, "Accurate sum and dot product", SIAM J. Sci. Comput. 26, 2005, algorithm Dot2). An H200 does some
twenty in the time of an element, so for one or two vectors memory decides.

For many vectors products of slices are exact (Ozaki; ``doubled``), and matrix units add them in float64: six
multiply-adds in place of eleven operations, and units do twice as many. Slices are in registers: A is read
once for 24 vectors, which are sliced beforehand.
"""

from __future__ import annotations

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.launch import ceil_div, multiprocessors, share

THREADS = 128

LANES = (8, 32)
"""Threads that have some rows together, where those are contiguous: few if they are short."""

HEIGHTS = (8, 32, THREADS)
"""Threads that have some rows together, where columns are contiguous: each has some rows, and others have
other columns."""

ROWS, ACROSS = 4, 2
"""Rows that a thread adds up, where they are contiguous and where columns are."""

ELEMENTS = 16
"""Elements of the result for which a thread block adds pieces."""

VECTORS = 4
"""For how many vectors at most an element is read once."""

BLOCKS = 12
"""Thread blocks for each multiprocessor, so that enough loads are in flight."""

LEAST = (1024, 16)
"""Elements of a row that are not divided any further, where rows are contiguous and where columns are."""


def doubled_product_cuda(a, x, x_low=None, b=None, *, least=None):
    """Rows are not divided into pieces of fewer than ``least`` elements, :data:`LEAST` by default."""
    (batch, m, n), k = a.shape, x.shape[2]
    result = torch.empty(2, batch, k, m, dtype=a.dtype, device=a.device)
    high, low = result.mT.unbind(0)
    if result.numel() == 0:
        return high, low
    by_columns = a.stride(1) == 1 and a.stride(2) != 1
    sizes, length = (HEIGHTS, m) if by_columns else (LANES, n)
    along = next((size for size in sizes if size >= length), sizes[-1])
    rows = along * ACROSS if by_columns else THREADS // along * ROWS
    vectors = min(VECTORS, 1 << (k - 1).bit_length())
    tasks = -(-m // rows) * -(-k // vectors) * batch
    least = LEAST[by_columns] if least is None else least
    pieces = max(1, min(BLOCKS * multiprocessors(a.device) // tasks, n // least))
    piece = share(n, pieces, 1)
    sums = result if pieces == 1 else result.new_empty(2, pieces, batch, k, m)
    where = [place(y) for y in (a, x, x_low, b)]
    task = (*sum(where, ()), sums, m, n, k, batch * k * m, pieces, piece)
    name, macros = "column_product" if by_columns else "row_product", f"#define VECTORS {vectors}\n"
    compiled("doubled", name, a.device, macros)((tasks * pieces, 1, 1), (THREADS, 1, 1), [task, along])
    _sum_of_pieces("doubled", macros, task, result, pieces)
    return high, low


def _sum_of_pieces(source: str, macros: str, task: tuple, result: torch.Tensor, pieces: int) -> None:
    if pieces > 1:
        grid = (ceil_div(result[0].numel(), ELEMENTS), 1, 1)
        compiled(source, "sum_of_pieces", result.device, macros)(grid, (THREADS, 1, 1), [task, result])


def place(x: torch.Tensor | None) -> tuple[torch.Tensor | int, ...]:
    """Address of a matrix, and its strides between members of a batch, rows and columns."""
    return (0, 0, 0, 0) if x is None else (x, *x.stride())


CHUNK = 32
"""Columns that are cut at the same places, and whose products are added without rounding errors."""

SLICED_ROWS = THREADS // 32 * 16
"""Rows of a thread block."""

TILES = 3
"""Most tiles of eight vectors for which an element is read once."""

SLICED_BLOCKS = {1: 3, 2: 2, 3: 2}
"""Thread blocks of a multiprocessor, by the number of tiles: as many as their registers allow."""

WAVES = 2
"""Waves of thread blocks into which the work is divided."""

SLICED_LEAST = 16 * CHUNK
"""Elements of a row that are not divided any further."""


def tiles_of(k: int) -> int:
    """How many at a time are fewest for so many vectors."""
    tiles = ceil_div(k, 8)
    return ceil_div(tiles, ceil_div(tiles, TILES))


def sliced_product_cuda(a, x, x_low=None, b=None, columns=None, *, least=SLICED_LEAST):
    (batch, m, n), k = a.shape, x.shape[2]
    result = torch.empty(2, batch, k, m, dtype=a.dtype, device=a.device)
    high, low = result.mT.unbind(0)
    if result.numel() == 0:
        return high, low
    tiles = tiles_of(k)
    groups = ceil_div(k, 8 * tiles)
    macros = f"#define TILES {tiles}\n#define BLOCKS {SLICED_BLOCKS[tiles]}\n"
    tasks = ceil_div(m, SLICED_ROWS) * groups * batch
    wanted = round(WAVES * SLICED_BLOCKS[tiles] * multiprocessors(a.device) / tasks)
    chunks = ceil_div(max(n, 1), CHUNK)
    piece = CHUNK * ceil_div(chunks, max(1, min(wanted, n // least)))
    pieces = ceil_div(chunks * CHUNK, piece)
    sums = result if pieces == 1 else result.new_empty(2, pieces, batch, k, m)
    task = (*sum(map(place, (a, x, x_low, b)), ()), sums, m, n, k, batch * k * m, pieces, piece)
    warps = batch * chunks * groups * tiles
    slices = result.new_empty(warps * 3 * 8 * CHUNK)
    sizes = 0 if columns is None else columns.contiguous()
    threads = (THREADS, 1, 1)
    cut = compiled("sliced", "cut_vectors", a.device, macros)
    cut((ceil_div(warps * 32, THREADS), 1, 1), threads, [task, slices, sizes])
    kernel = compiled("sliced", "sliced_product", a.device, macros)
    kernel((tasks * pieces, 1, 1), threads, [task, slices, sizes])
    _sum_of_pieces("sliced", macros, task, result, pieces)
    return high, low
