"""Sizes of the rows and the columns of a large matrix by one pass.

Each thread block has a strip of rows and a piece of the columns: what it finds of its columns it stores
beside what the strips above and below find, 1/64 of what is read, and torch puts the parts together, in an
order that does not depend on what finishes first.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from neula.kernels.launch import ceil_div
from neula.kernels.magnitudes import Ends, Magnitudes
from neula.kernels.small_problems.tiles_triton import least_of, most_of
from neula.kernels.triton_source import jit, tl

ROWS, COLUMNS, WARPS = 128, 64, 8
"""A tile."""

TILES, FEW_TILES = 16, 2
"""Tiles that a thread block goes through, the second where columns are few: so there are many of them."""

SHORT = 2048
"""Columns up to which they are."""

BLOCK = 128
"""Rows and columns for which a thread block puts parts together."""

TOGETHER = 1024
"""Sizes that one thread block compares at a time."""


def magnitudes_triton(a: torch.Tensor) -> Magnitudes:
    """:func:`neula.kernels.magnitudes.magnitudes` by the kernel, queued on the current stream."""
    _, m, n = a.shape
    tiles = FEW_TILES if n <= SHORT else TILES
    strips, pieces = ceil_div(m, ROWS), ceil_div(n, COLUMNS * tiles)
    parts = a.new_empty(2 * pieces * m + 2 * strips * n)
    found = a.new_empty(2 * (m + n))
    with torch.cuda.device_of(a):
        _sizes_kernel[(strips, pieces)](
            *(a, *a.stride()[1:], parts, m, n, strips, pieces),
            *(ROWS, COLUMNS, tiles),
            num_warps=WARPS,
        )
        _gathered[(ceil_div(max(m, n), BLOCK),)](
            *(parts, found, m, n, strips, pieces, BLOCK), num_warps=BLOCK // 32
        )
    rows, sums, columns, norms = found.split([m, m, n, n])
    return Magnitudes(rows[None, :, None], columns[None, None], sums[None], norms[None, :, None])


def ends_of_triton(sizes: Magnitudes, b: torch.Tensor) -> Ends:
    """:func:`neula.kernels.magnitudes.ends_of` by the kernel, queued on the current stream."""
    _, n, k = b.shape
    found = b.new_empty(8 + k)
    with torch.cuda.device_of(b):
        _ends_kernel[(1,)](
            *(x.contiguous() for x in (sizes.rows, sizes.columns, sizes.sums, sizes.norms)),
            *(b, *b.stride()[1:], found, n, k, TOGETHER),
            num_warps=WARPS,
        )
    return Ends(found[6:7, None], found[None, 8:], found[7:8], found[:6])


@jit(do_not_specialize=["parts", "m", "n", "strips", "pieces"])
def _sizes_kernel(
    a, a_row, a_column, parts, m, n, strips, pieces,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A strip of rows and a piece of the columns."""
    strip, piece = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    rows, sums = parts, parts + pieces.to(tl.int64) * m
    columns = sums + pieces.to(tl.int64) * m
    squares = columns + strips.to(tl.int64) * n
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


@jit(do_not_specialize=["parts", "found", "m", "n", "strips", "pieces"])
def _gathered(parts, found, m, n, strips, pieces, BLOCK: tl.constexpr):
    """Parts of some rows, and of as many columns."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sums = pieces.to(tl.int64) * m
    columns = 2 * sums
    squares = columns + strips.to(tl.int64) * n
    largest, total = _together(parts + i, parts + sums + i, pieces, m, i < m, BLOCK)
    tl.store(found + i, largest, mask=i < m)
    tl.store(found + m + i, total, mask=i < m)
    largest, total = _together(parts + columns + i, parts + squares + i, strips, n, i < n, BLOCK)
    tl.store(found + 2 * m + i, largest, mask=i < n)
    tl.store(found + 2 * m + n + i, tl.sqrt(total), mask=i < n)


@jit
def _together(most, sums, count, width, inside, BLOCK: tl.constexpr):
    """The largest of some numbers, and the sum of others."""
    largest, total = tl.zeros((BLOCK,), most.dtype.element_ty), tl.zeros((BLOCK,), most.dtype.element_ty)
    for _ in range(count):
        largest = tl.maximum(largest, tl.load(most, mask=inside, other=0.0))
        total += tl.load(sums, mask=inside, other=0.0)
        most += width
        sums += width
    # The largest of numbers and NaN is a number here, but no sum is.
    return tl.where(total != total, total, largest), total


@jit(do_not_specialize=["rows", "columns", "sums", "norms", "b", "found", "b_row", "b_column", "n", "k"])
def _ends_kernel(rows, columns, sums, norms, b, b_row, b_column, found, n, k, BLOCK: tl.constexpr):
    """Combine the sums of all blocks in one thread block."""
    infinite = tl.full((BLOCK,), float("inf"), tl.float64)
    zero = tl.zeros((BLOCK,), tl.float64)
    least, most, of_a, squares, lost = infinite, zero, zero, zero, zero
    least_column, most_column = infinite, zero
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        inside = j < n
        row, column = tl.load(rows + j, mask=inside, other=0.0), tl.load(columns + j, mask=inside, other=0.0)
        norm = tl.load(norms + j, mask=inside, other=0.0)
        total = tl.load(sums + j, mask=inside, other=0.0)
        least = tl.minimum(least, tl.where(inside, row, float("inf")))
        least_column = tl.minimum(least_column, tl.where(inside, column, float("inf")))
        most, most_column = tl.maximum(most, row), tl.maximum(most_column, column)
        of_a = tl.maximum(of_a, total)
        squares += norm * norm
        lost += total * 0.0
    # The largest of numbers and NaN is a number here, but no sum is.
    nothing = tl.sum(lost, axis=0)
    tl.store(found, tl.min(least, axis=0) + nothing)
    tl.store(found + 1, tl.min(least_column, axis=0) + nothing)
    tl.store(found + 2, tl.max(most, axis=0) + nothing)
    tl.store(found + 3, tl.max(most_column, axis=0) + nothing)
    tl.store(found + 6, tl.max(of_a, axis=0) + nothing)
    tl.store(found + 7, tl.sqrt(tl.sum(squares, axis=0)))
    least_b, most_b = tl.full((), float("inf"), tl.float64), tl.full((), 0.0, tl.float64)
    for column in range(k):
        size, lost = zero, zero
        for start in range(0, n, BLOCK):
            j = (start + tl.arange(0, BLOCK)).to(tl.int64)
            x = tl.abs(tl.load(b + j * b_row + column * b_column, mask=j < n, other=0.0))
            size = tl.maximum(size, x)
            lost += x * 0.0
        of_b = tl.max(size, axis=0) + tl.sum(lost, axis=0)
        tl.store(found + 8 + column, of_b)
        of_b = tl.where(of_b == 0.0, 1.0, of_b)
        least_b, most_b = least_of(least_b, of_b), most_of(most_b, of_b)
    tl.store(found + 4, least_b)
    tl.store(found + 5, most_b)
