"""Sizes of the rows and the columns of a large matrix by one pass.

Each thread block has a strip of rows and a piece of the columns: what it finds of its columns it stores
beside what the strips above and below find, 1/64 of what is read, and torch puts the parts together, in an
order that does not depend on what finishes first.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from neula.kernels.magnitudes import Magnitudes

ROWS, COLUMNS, WARPS = 128, 64, 8
"""A tile."""

TILES = 16
"""Tiles that a thread block goes through."""


def magnitudes_triton(a: torch.Tensor) -> Magnitudes:
    """:func:`neula.kernels.magnitudes.magnitudes` by the kernel, queued on the current stream."""
    _, m, n = a.shape
    strips, pieces = triton.cdiv(m, ROWS), triton.cdiv(n, COLUMNS * TILES)
    rows, sums = a.new_empty(2, pieces, m)
    columns, squares = a.new_empty(2, strips, n)
    with torch.cuda.device_of(a):
        _sizes_kernel[(strips, pieces)](
            *(a, *a.stride()[1:], rows, sums, columns, squares, m, n),
            *(ROWS, COLUMNS, TILES),
            num_warps=WARPS,
        )
    sums, squares = sums.sum(0), squares.sum(0)
    # The largest of numbers and NaN is a number here, but no sum is.
    rows = torch.where(sums.isnan(), sums, rows.amax(0))
    columns = torch.where(squares.isnan(), squares, columns.amax(0))
    return Magnitudes(rows[None, :, None], columns[None, None], sums[None], squares.sqrt()[None, :, None])


@triton.jit
def _sizes_kernel(
    a, a_row, a_column, rows, sums, columns, squares, m, n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A strip of rows and a piece of the columns."""
    strip, piece = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i = strip * ROWS + tl.arange(0, ROWS)
    largest = tl.zeros((ROWS, COLUMNS), a.dtype.element_ty)
    total = tl.zeros((ROWS, COLUMNS), a.dtype.element_ty)
    for tile in range(TILES):
        j = (piece * TILES + tile) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (i < m)[:, None] & (j < n)[None, :]
        x = tl.abs(tl.load(a + i[:, None] * a_row + j[None, :] * a_column, mask=inside, other=0.0))
        largest = tl.maximum(largest, x)
        total += x
        tl.store(columns + strip * n + j, tl.max(x, axis=0), mask=j < n)
        tl.store(squares + strip * n + j, tl.sum(x * x, axis=0), mask=j < n)
    tl.store(rows + piece * m + i, tl.max(largest, axis=1), mask=i < m)
    tl.store(sums + piece * m + i, tl.sum(total, axis=1), mask=i < m)
