"""``A X`` for a few columns of X: A is read once, converted in registers, and summed in the precision of X.

``4 m n`` bytes in float32, and 4 or 8 multiply-adds for each element, for which even float64 is fast enough.
A tile is long in the direction in which A is contiguous; every thread adds up its own elements, and those of
a row are added to each other at the end. Where rows are few, the columns are divided as well, and sums of
pieces are added by torch, in an order that does not depend on what finishes first.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
from torch.nn import functional

from neula.kernels.few_vectors.vectors_triton import add_rows_times, load_vectors
from neula.kernels.launch import ceil_div, elements_at_a_time, multiprocessors, share
from neula.kernels.triton_source import jit, tl

BY_COLUMNS, BY_ROWS = (512, 2), (8, 128)
"""Rows and columns of a tile, where A is contiguous in columns (8192 x 8192 in half precision, eight vectors:
0.14 ms, and 0.20 in tiles of 256 x 4), and where it is in rows, which share what is read of the vectors
(50000 x 4000: 0.40 ms, and 0.47 in tiles of 4 x 256)."""

BLOCKS = 12
"""Thread blocks for each multiprocessor, so that enough loads are in flight."""

MIN_PIECE = 64
"""Columns of A that are not divided any further: a thread block reads its piece one tile after the other."""

STAGES = 3
"""Loads in flight."""


def thin_product_triton(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """:func:`neula.kernels.few_vectors.thin.thin_product` by the kernel, queued on the current stream."""
    m, n = a.shape
    vectors = x.shape[1]
    k = 4 if vectors <= 4 else 8
    # By columns: rows of eight vectors are lines of the cache, of which each load would take a part.
    x = (x.mT if vectors == k else functional.pad(x.mT, (0, 0, 0, k - vectors))).contiguous().mT
    rows, columns = BY_COLUMNS if a.stride(0) == 1 else BY_ROWS
    down = ceil_div(m, rows)
    pieces = max(1, min(BLOCKS * multiprocessors(a.device) // down, n // MIN_PIECE))
    piece = share(n, pieces, columns)
    sums = torch.empty(pieces, k, m, dtype=x.dtype, device=a.device)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    vector = elements_at_a_time(a)
    with torch.cuda.device_of(a):
        _thin_product[(down, pieces)](
            *(a, x, sums, m, n, piece, *a.stride(), *x.stride()),
            *(rows, columns, k, wide, a.stride(0) == 1, vector, STAGES if vector > 1 else 1),
            num_warps=4,
        )
    return (sums[0] if pieces == 1 else sums.sum(0)).mT[:, :vectors]


@jit(do_not_specialize=["m", "n", "piece", "x_column"])
def _thin_product(
    a, x, sums, m, n, piece, a_row, a_column, x_row, x_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTORS: tl.constexpr, WIDE: tl.constexpr,
    BY_COLUMNS: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block of rows of the product of a piece of the columns."""
    m, x_column = m.to(tl.int64), x_column.to(tl.int64)  # offsets may exceed 2^31
    # Multiples of VECTOR, as the compiler has to see to move so many elements at a time.
    piece = piece // COLUMNS * COLUMNS
    if BY_COLUMNS:
        m, a_column = m // VECTOR * VECTOR, a_column // VECTOR * VECTOR
    elif VECTOR > 1:
        n, a_row = n // VECTOR * VECTOR, a_row // VECTOR * VECTOR
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * piece
    last = tl.minimum(first + piece, n)
    rows = a + i.to(tl.int64)[:, None] * a_row
    totals = (tl.zeros((ROWS, COLUMNS), WIDE),) * VECTORS
    for start in tl.range(first, last, COLUMNS, num_stages=STAGES):
        j = start + tl.arange(0, COLUMNS)
        inside = (i[:, None] < m) & (j[None, :] < last)
        block = tl.load(rows + j.to(tl.int64)[None, :] * a_column, mask=inside, other=0.0).to(WIDE)
        vectors = load_vectors(x + j.to(tl.int64) * x_row, x_column, j < last, VECTORS, WIDE)
        totals = add_rows_times(totals, block, vectors, VECTORS)
    sums += tl.program_id(1).to(tl.int64) * VECTORS * m + i
    for v in tl.static_range(VECTORS):
        tl.store(sums + v * m, tl.sum(totals[v], axis=1), mask=i < m)
