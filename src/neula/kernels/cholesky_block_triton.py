"""Kernels of :func:`neula.kernels.cholesky_block.factor_lower`.

*Chain* of n x n: ``n / 128`` leaves one after the other, 22 us each on an H200, and between two of them two
launches of some microseconds: ``2/3 n^3`` flops, half of them for the inverse, in tiles for a hundred
multiprocessors, n = 1024 takes 0.6 Gflop. The bytes are in the cache.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from neula.kernels.cholesky import cholesky_lower
from neula.kernels.cholesky_block import LEAF, BlockFactors

TILE = 64
"""Rows and columns that a thread block computes; a leaf has a multiple of that."""

PRECISION = "tf32x3"
"""Three products of parts, about as accurate as single precision."""

WARPS = 8


def factor_lower_triton(a: torch.Tensor, low: torch.dtype | None) -> BlockFactors:
    """:func:`neula.kernels.cholesky_block.factor_lower` by the kernels, queued on the current stream."""
    batch, n, _ = a.shape
    inverse, orders = torch.zeros_like(a), []
    tiles = triton.cdiv(n, TILE)
    # The interpreter has no CUDA.
    factor = cholesky_lower.kernel if a.is_cuda else cholesky_lower.reference
    with torch.cuda.device_of(a):
        for start in range(0, n, LEAF):
            k = slice(start, start + LEAF)
            leaf, order = factor(a[:, k, k])
            orders.append(order)
            arguments = (a, *a.stride(), inverse, *inverse.stride())
            _columns_kernel[(tiles, batch)](
                *(*arguments, leaf, *leaf.stride(), start, n, TILE, LEAF, _rounds_to(low), PRECISION),
                num_warps=WARPS,
            )
            if k.stop < n:
                _subtract_kernel[(tiles, triton.cdiv(n - k.stop, TILE), batch)](
                    *(*arguments, start, n, TILE, LEAF, PRECISION), num_warps=WARPS
                )
    return BlockFactors(inverse, torch.stack(orders))


def _rounds_to(low: torch.dtype | None) -> object:
    """The format in Triton's words."""
    return {None: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[low]


@triton.jit
def _columns_kernel(
    a, a_batch, a_row, a_column, x, x_batch, x_row, x_column, leaf, leaf_batch, leaf_row, leaf_column, start,
    n,
    TILE: tl.constexpr, LEAF: tl.constexpr, LOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of L below a leaf, or of its inverse above it and beside it."""
    first = tl.program_id(0) * TILE
    member = tl.program_id(1).to(tl.int64)
    i = first + tl.arange(0, TILE).to(tl.int64)
    w = tl.arange(0, LEAF)
    j = start + w.to(tl.int64)
    inside = (i < n)[:, None] & (j < n)[None, :]
    inverse = x + member * x_batch + i[:, None] * x_row + j[None, :] * x_column
    lower = a + member * a_batch + i[:, None] * a_row + j[None, :] * a_column
    leaf += member * leaf_batch
    if (first >= start) & (first < start + LEAF):
        beside = leaf + (i - start)[:, None] * leaf_row + w[None, :] * leaf_column
        tl.store(inverse, tl.load(beside, mask=inside), mask=inside)
    else:
        known = (j < n)[:, None] & (j < n)[None, :]
        triangle = tl.load(leaf + w[:, None] * leaf_row + w[None, :] * leaf_column, mask=known, other=0.0)
        if first < start:
            rows = tl.load(inverse, mask=inside, other=0.0)
            tl.store(inverse, tl.dot(rows, triangle, input_precision=PRECISION), mask=inside)
        else:
            rows = tl.load(lower, mask=inside, other=0.0)
            rows = tl.dot(rows, triangle, input_precision=PRECISION)
            tl.store(lower, rows.to(LOW).to(tl.float32), mask=inside)


@triton.jit
def _subtract_kernel(
    a, a_batch, a_row, a_column, x, x_batch, x_row, x_column, start, n,
    TILE: tl.constexpr, LEAF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the columns of a leaf contribute to a tile to their right, of what will be L or its inverse."""
    first, left = tl.program_id(0) * TILE, start + LEAF + tl.program_id(1) * TILE
    member = tl.program_id(2).to(tl.int64)
    if first >= left:
        _subtract_tile(
            a + member * a_batch, a_row, a_column, a + member * a_batch, a_row, a_column, first, left, start,
            n, TILE, LEAF, PRECISION,
        )  # fmt: skip
    elif first < start + LEAF:
        _subtract_tile(
            x + member * x_batch, x_row, x_column, a + member * a_batch, a_row, a_column, first, left, start,
            n, TILE, LEAF, PRECISION,
        )  # fmt: skip


@triton.jit
def _subtract_tile(
    x, x_row, x_column, a, a_row, a_column, first, left, start, n,
    TILE: tl.constexpr, LEAF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i, j = first + tl.arange(0, TILE).to(tl.int64), left + tl.arange(0, TILE).to(tl.int64)
    k = start + tl.arange(0, LEAF).to(tl.int64)
    rows = tl.load(x + i[:, None] * x_row + k[None, :] * x_column, mask=(i < n)[:, None], other=0.0)
    columns = tl.load(a + k[:, None] * a_column + j[None, :] * a_row, mask=(j < n)[None, :], other=0.0)
    place = x + i[:, None] * x_row + j[None, :] * x_column
    inside = (i < n)[:, None] & (j < n)[None, :]
    rest = tl.load(place, mask=inside, other=0.0) - tl.dot(rows, columns, input_precision=PRECISION)
    tl.store(place, rest, mask=inside)
