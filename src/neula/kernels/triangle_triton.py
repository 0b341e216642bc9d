"""Products of triangles with four vectors: half of each matrix is read, once, and converted in registers.

``2 n^2`` bytes of each matrix in float32, and 4 multiply-adds in float64 for an element. A symmetric
matrix is read twice, by rows and by columns of its lower triangle. A program makes a block of rows of the
result, from square tiles, so that it does not matter in which direction a matrix is contiguous.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from neula.kernels.triangle import VECTORS, Kind

TILE = 32

WIDTH = 2048
"""Elements of a row that a program adds up: with whole rows of one large matrix programs would be too few to
fill a GPU."""


def triangle_product_triton(t: torch.Tensor, x: torch.Tensor, kind: Kind) -> torch.Tensor:
    """:func:`neula.kernels.triangle.triangle_product` by the kernel, queued on the current stream."""
    count, n, _ = t.shape
    x = x.expand(count, n, VECTORS)
    parts = triton.cdiv(n, WIDTH)
    found = torch.empty(parts, count, VECTORS, n, dtype=torch.float64, device=t.device)
    with torch.cuda.device_of(t):
        _triangle_product[(triton.cdiv(n, TILE) * count, parts)](
            *(t, x, found, n, *t.stride(), *x.stride(), found.stride(0)),
            *(kind != "transposed", kind != "lower", TILE, WIDTH),
            num_warps=4,
        )
    return (found[0] if parts == 1 else found.sum(0)).mT


@triton.jit(do_not_specialize=["n", "t_batch", "x_batch", "x_column", "part"])
def _triangle_product(
    t, x, found, n, t_batch, t_row, t_column, x_batch, x_row, x_column, part,
    BELOW: tl.constexpr, ABOVE: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A part of a block of rows: what is below the diagonal there, and in the columns of the same numbers."""
    begin = tl.program_id(1) * WIDTH
    end = tl.minimum(begin + WIDTH, n)
    found += tl.program_id(1) * tl.cast(part, tl.int64)
    blocks = tl.cdiv(n, TILE)
    member = (tl.program_id(0) // blocks).to(tl.int64)
    start = tl.program_id(0) % blocks * TILE
    i = start + tl.arange(0, TILE)
    t += member * t_batch
    x += member * x_batch
    s0 = tl.zeros((TILE, TILE), tl.float64)
    s1 = tl.zeros((TILE, TILE), tl.float64)
    s2 = tl.zeros((TILE, TILE), tl.float64)
    s3 = tl.zeros((TILE, TILE), tl.float64)
    if BELOW:
        for first in range(begin, tl.minimum(start + TILE, end), TILE):
            j = first + tl.arange(0, TILE)
            inside = (i[:, None] < n) & (j[None, :] <= i[:, None])
            place = t + i.to(tl.int64)[:, None] * t_row + j.to(tl.int64)[None, :] * t_column
            block = tl.load(place, mask=inside, other=0.0).to(tl.float64)
            s0, s1, s2, s3 = _add(s0, s1, s2, s3, block, x + j.to(tl.int64) * x_row, x_column, j < n)
    if ABOVE:
        for first in range(tl.maximum(start, begin), end, TILE):
            j = first + tl.arange(0, TILE)
            inside = j[None, :] < n
            if BELOW:  # which has had the diagonal
                inside &= j[None, :] > i[:, None]
            else:
                inside &= j[None, :] >= i[:, None]
            place = t + j.to(tl.int64)[None, :] * t_row + i.to(tl.int64)[:, None] * t_column
            block = tl.load(place, mask=inside, other=0.0).to(tl.float64)
            s0, s1, s2, s3 = _add(s0, s1, s2, s3, block, x + j.to(tl.int64) * x_row, x_column, j < n)
    found += member * 4 * n + i
    tl.store(found, tl.sum(s0, axis=1), mask=i < n)
    tl.store(found + n, tl.sum(s1, axis=1), mask=i < n)
    tl.store(found + 2 * n, tl.sum(s2, axis=1), mask=i < n)
    tl.store(found + 3 * n, tl.sum(s3, axis=1), mask=i < n)


@triton.jit
def _add(s0, s1, s2, s3, block, place, x_column, mask):
    """A tile times four vectors."""
    s0 += block * tl.load(place, mask=mask, other=0.0)[None, :]
    s1 += block * tl.load(place + x_column, mask=mask, other=0.0)[None, :]
    s2 += block * tl.load(place + 2 * x_column, mask=mask, other=0.0)[None, :]
    s3 += block * tl.load(place + 3 * x_column, mask=mask, other=0.0)[None, :]
    return s0, s1, s2, s3
