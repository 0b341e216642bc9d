"""Kernels of :func:`neula.kernels.cholesky.cholesky_block.factor_lower`.

*Chain* of n x n: ``n / 128`` leaves one after the other, 22 us each on an H200, and between two of them two
launches of some microseconds: ``2/3 n^3`` flops, half of them for the inverse, in tiles for a hundred
multiprocessors, n = 1024 takes 0.6 Gflop. The bytes are in the cache.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from neula.kernels.cholesky.cholesky import cholesky_lower
from neula.kernels.cholesky.cholesky_block import LEAF, BlockFactors
from neula.kernels.cholesky.cholesky_tiles import factor_inverted
from neula.kernels.launch import ceil_div
from neula.kernels.transposed_copy import transposed_copy
from neula.kernels.triton_source import jit, tl

ROWS = 16
"""Rows that a thread block multiplies by the inverse of a leaf: few, so that the next leaf waits not long."""

TILE = 32
"""Rows and columns from which a thread block subtracts."""

DEPTH = 32
"""Products that are summed at a time."""

PRECISION = "tf32x3"
"""Three products of parts, about as accurate as single precision."""

WARPS = 4


def factor_lower_triton(a: torch.Tensor) -> BlockFactors:
    """``cholesky_block.factor_lower`` by the kernels, queued on the current stream."""
    n = len(a)
    if factor_inverted.takes(a[None], n):
        return _by_tiles(a)
    inverse, orders = torch.zeros_like(a), []
    # The interpreter has no CUDA.
    factor = cholesky_lower.kernel if a.is_cuda else cholesky_lower.reference
    with torch.cuda.device_of(a):
        for start in range(0, n, LEAF):
            k = slice(start, start + LEAF)
            leaf, order = factor(a[None, k, k])
            orders.append(order)
            arguments = (a, *a.stride(), inverse, *inverse.stride())
            _columns_kernel[(ceil_div(n, ROWS),)](
                *(*arguments, leaf, *leaf.stride()[1:], start, n, ROWS, LEAF, DEPTH, PRECISION),
                num_warps=WARPS,
            )
            if k.stop < n:
                _subtract_kernel[(ceil_div(n, TILE), ceil_div(n - k.stop, TILE))](
                    *(*arguments, start, n, TILE, LEAF, DEPTH, PRECISION), num_warps=WARPS
                )
    return BlockFactors(inverse, torch.stack(orders))


def _by_tiles(a: torch.Tensor) -> BlockFactors:
    """All of it in one launch, which takes half of the time."""
    (lower,), ((inverse,),), (order,) = factor_inverted(a[None], len(a))
    transposed_copy(a, lower)
    orders = torch.zeros(ceil_div(len(a), LEAF), 1, dtype=order.dtype, device=order.device)
    orders[0] = order  # counted from the first leaf on
    return BlockFactors(inverse.mT[: len(a), : len(a)], orders)


@jit
def _columns_kernel(
    a, a_row, a_column, x, x_row, x_column, leaf, leaf_row, leaf_column, start, n,
    ROWS: tl.constexpr, LEAF: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of L below a leaf, or of its inverse above it and beside it."""
    first = tl.program_id(0) * ROWS
    i = first + tl.arange(0, ROWS).to(tl.int64)
    w = tl.arange(0, LEAF)
    j = start + w.to(tl.int64)
    inside = (i < n)[:, None] & (j < n)[None, :]
    inverse = x + i[:, None] * x_row + j[None, :] * x_column
    if first < start:
        rows = _product(
            x, x_row, x_column, leaf, leaf_row, leaf_column, i, w, n, n - start, start, 0, ROWS, LEAF, LEAF,
            DEPTH, PRECISION,
        )  # fmt: skip
        tl.store(inverse, rows, mask=inside)
    elif first < start + LEAF:
        beside = leaf + (i - start)[:, None] * leaf_row + w[None, :] * leaf_column
        tl.store(inverse, tl.load(beside, mask=inside), mask=inside)
    else:
        rows = _product(
            a, a_row, a_column, leaf, leaf_row, leaf_column, i, w, n, n - start, start, 0, ROWS, LEAF, LEAF,
            DEPTH, PRECISION,
        )  # fmt: skip
        tl.store(a + i[:, None] * a_row + j[None, :] * a_column, rows, mask=inside)


@jit
def _subtract_kernel(
    a, a_row, a_column, x, x_row, x_column, start, n,
    TILE: tl.constexpr, LEAF: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the columns of a leaf contribute to a tile to their right, of what will be L or its inverse."""
    first, left = tl.program_id(0) * TILE, start + LEAF + tl.program_id(1) * TILE
    if first >= left:
        _subtract_tile(
            a, a_row, a_column, a, a_row, a_column, first, left, start, n, TILE, LEAF, DEPTH, PRECISION
        )
    elif first < start + LEAF:
        _subtract_tile(
            x, x_row, x_column, a, a_row, a_column, first, left, start, n, TILE, LEAF, DEPTH, PRECISION
        )


@jit
def _subtract_tile(
    x, x_row, x_column, a, a_row, a_column, first, left, start, n,
    TILE: tl.constexpr, LEAF: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i, j = first + tl.arange(0, TILE).to(tl.int64), left + tl.arange(0, TILE).to(tl.int64)
    place = x + i[:, None] * x_row + j[None, :] * x_column
    inside = (i < n)[:, None] & (j < n)[None, :]
    known = _product(
        x, x_row, x_column, a, a_column, a_row, i, j, n, n, start, start, TILE, TILE, LEAF, DEPTH, PRECISION
    )
    tl.store(place, tl.load(place, mask=inside, other=0.0) - known, mask=inside)


@jit
def _product(
    x, x_row, x_column, y, y_row, y_column, i, j, rows, columns, x_start, y_start,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LEAF: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows i of X times columns j of Y, of both of which a leaf counts; of Y as many rows as columns."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, LEAF, DEPTH):
        k = first + tl.arange(0, DEPTH).to(tl.int64)
        more = (y_start + k) < columns
        left = tl.load(
            x + i[:, None] * x_row + (x_start + k)[None, :] * x_column,
            mask=(i < rows)[:, None] & more[None, :],
            other=0.0,
        )
        right = tl.load(
            y + (y_start + k)[:, None] * y_row + j[None, :] * y_column,
            mask=more[:, None] & (j < columns)[None, :],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total
