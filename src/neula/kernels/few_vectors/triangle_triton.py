"""Products of triangles with four vectors: half of each matrix is read, once, and converted in registers.

``2 n^2`` bytes of each matrix in float32, and 4 multiply-adds in float64 for an element, which matrix units
do: what takes time otherwise are instructions. A symmetric matrix is read twice, by rows and by columns of
its lower triangle. A program makes a block of rows of the result, from square tiles, so that it does not
matter in which direction a matrix is contiguous.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from neula.kernels.few_vectors.triangle import VECTORS, Kind
from neula.kernels.launch import ceil_div
from neula.kernels.triton_source import jit, tl

TILE, SMALL, STAGES = 64, 32, 3

ROOM = 8
"""Vectors that a matrix unit multiplies at a time."""

WIDTH = 2048
"""Elements of a row that a program adds up: with whole rows of one large matrix programs would be too few to
fill a GPU."""


def triangle_product_triton(t: torch.Tensor, x: torch.Tensor, kind: Kind) -> torch.Tensor:
    """``triangle.triangle_product`` by the kernel, queued on the current stream."""
    count, n, _ = t.shape
    # Triton 3.6 does not compile products in double precision of 16 bits that become 64.
    t = t.float() if t.dtype.itemsize < 4 else t
    x = x.expand(count, n, VECTORS)
    parts, tile = ceil_div(n, WIDTH), SMALL if n <= SMALL else TILE
    found = torch.empty(parts, count, VECTORS, n, dtype=torch.float64, device=t.device)
    with torch.cuda.device_of(t):
        _triangle_product[(ceil_div(n, tile) * count, parts)](
            *(t, x, found, n, *t.stride(), *x.stride(), found.stride(0)),
            *(kind != "transposed", kind != "lower", tile, WIDTH, ROOM, STAGES),
            num_warps=4,
        )
    return (found[0] if parts == 1 else found.sum(0)).mT


@jit(do_not_specialize=["n", "part"])
def _triangle_product(
    t, x, found, n, t_batch, t_row, t_column, x_batch, x_row, x_column, part,
    BELOW: tl.constexpr, ABOVE: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Product of one block of rows: below the diagonal, and transposed in the same columns."""
    begin = tl.program_id(1) * WIDTH
    end = tl.minimum(begin + WIDTH, n)
    found += tl.program_id(1) * tl.cast(part, tl.int64)
    blocks = tl.cdiv(n, TILE)
    member = (tl.program_id(0) // blocks).to(tl.int64)
    start = tl.program_id(0) % blocks * TILE
    i, v = start + tl.arange(0, TILE), tl.arange(0, ROOM)
    t += member * t_batch
    x += member * x_batch + v[None, :] * x_column
    few = (v < 4)[None, :]
    total = tl.zeros((TILE, ROOM), tl.float64)
    rows = t + i.to(tl.int64)[:, None] * t_row
    columns = t + i.to(tl.int64)[:, None] * t_column
    # Between the diagonal and a part's ends no mask varies along what is contiguous.
    if BELOW:
        for first in tl.range(begin, tl.minimum(start, end), TILE, num_stages=STAGES):
            j = (first + tl.arange(0, TILE)).to(tl.int64)
            block = tl.load(rows + j[None, :] * t_column, mask=(i < n)[:, None], other=0.0)
            total = _add(total, block, x + j[:, None] * x_row, few)
    if ABOVE:
        for first in tl.range(tl.maximum(start + TILE, begin), end, TILE, num_stages=STAGES):
            j = (first + tl.arange(0, TILE)).to(tl.int64)
            block = tl.load(columns + j[None, :] * t_row, mask=(j < n)[None, :], other=0.0)
            total = _add(total, block, x + j[:, None] * x_row, (j < n)[:, None] & few)
    if (begin <= start) & (start < end):
        j = i.to(tl.int64)
        inside = (i[:, None] < n) & (i[None, :] < n)
        if BELOW:
            below = inside & (i[None, :] <= i[:, None])
            block = tl.load(rows + j[None, :] * t_column, mask=below, other=0.0)
            total = _add(total, block, x + j[:, None] * x_row, (i < n)[:, None] & few)
        if ABOVE:
            # The diagonal counts once.
            above = inside & ((i[None, :] > i[:, None]) if BELOW else (i[None, :] >= i[:, None]))
            block = tl.load(columns + j[None, :] * t_row, mask=above, other=0.0)
            total = _add(total, block, x + j[:, None] * x_row, (i < n)[:, None] & few)
    place = found + member * 4 * n + v[None, :] * n + i[:, None]
    tl.store(place, total, mask=(i < n)[:, None] & few)


@jit
def _add(total, block, place, mask):
    """A tile times some vectors, which matrix units multiply in double precision."""
    return tl.dot(block.to(tl.float64), tl.load(place, mask=mask, other=0.0), total, out_dtype=tl.float64)
