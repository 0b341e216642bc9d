"""A triangular solve by programs that take tiles of rows from one list, in order.

For each block of unknowns first its own tiles are multiplied by the inverse of the diagonal block, then what
its columns contribute is subtracted from all tiles that are still to come. A program waits until what its
tile needs is there. That comes from tiles further up in the list, which some program has taken before: so the
first one that is not done never waits, however few programs run at a time, and all come to an end. A tile is
updated in the order of the blocks, so sums do not depend on what finishes first.

``2 n^2 / 2`` bytes in half precision, for up to eight right-hand sides, and a chain of two waits a block.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from neula.kernels.launch import multiprocessors
from neula.kernels.mixed_product import VECTORS
from neula.kernels.parts_triton import round_to_bits
from neula.kernels.sweep import ROWS

COLUMNS = 64
"""Columns that are multiplied at a time."""

PROGRAMS, WARPS, STAGES = 3, 4, 4
"""Programs for each multiprocessor: while some wait, others read."""


def sweep_triton(t: torch.Tensor, inverses: torch.Tensor, b: torch.Tensor, *, upper: bool) -> torch.Tensor:
    """:func:`neula.kernels.sweep.sweep` by the kernel, queued on the current stream."""
    n, width = len(t), inverses.shape[-1]
    rest, x = b.clone(memory_format=torch.contiguous_format), b.new_empty(b.shape)
    tiles, blocks = triton.cdiv(n, ROWS), triton.cdiv(n, width)
    per_block = width // ROWS
    first = tiles - (blocks - 1) * per_block if upper else min(per_block, tiles)
    state = torch.zeros(1 + 2 * blocks + tiles, dtype=torch.int32, device=t.device)
    programs = min(tiles, PROGRAMS * multiprocessors(t.device))
    with torch.cuda.device_of(t):
        _sweep[(programs,)](
            *(t, inverses, rest, x, state, n, b.shape[1], tiles, blocks, per_block, first),
            *(*t.stride(), *inverses.stride()),
            *(upper, ROWS, COLUMNS, VECTORS, STAGES),
            num_warps=WARPS,
        )
    return x


@triton.jit
def _wait(place, count):
    """Until a counter has come so far; what was stored before it was counted is seen afterwards."""
    seen = tl.atomic_add(place, 0, sem="acquire", scope="gpu")
    while seen < count:
        seen = tl.atomic_add(place, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def _count(place):
    """That something is done, after it was stored by all threads."""
    tl.debug_barrier()
    tl.atomic_add(place, 1, sem="release", scope="gpu")


@triton.jit
def _first_tile(step, first, per_block):
    """Of a block, counted in the order in which they are solved for."""
    return tl.where(step == 0, 0, first + (step - 1) * per_block)


@triton.jit
def _right(x, first, j, size, v, vectors):
    """Rows of right-hand sides that other programs may have written: not from a cache of their own."""
    mask = (j[:, None] < size) & (v[None, :] < vectors)
    place = x + (first + j)[:, None] * vectors + v[None, :]
    return tl.load(place, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def _by_inverse(
    diagonal, rest, left, size, i, v, n, vectors, column, begin, end,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some rows of an inverted diagonal block times what is on the right of its equations."""
    total = tl.zeros((i.shape[0], v.shape[0]), tl.float32)
    for k in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        j = k + tl.arange(0, COLUMNS)
        inside = (i[:, None] < n) & (j[None, :] < size)
        part = tl.load(diagonal + j[None, :] * column, mask=inside, other=0.0)
        total = tl.dot(part, _right(rest, left, j, size, v, vectors), total, input_precision="tf32x3")
    return total


@triton.jit
def _by_panel(
    rows, x, left, size, i, v, n, vectors, column, COLUMNS: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """What unknowns contribute to some rows; 11 bits are exact in TF32, X is a sum of two such numbers."""
    total = tl.zeros((i.shape[0], v.shape[0]), tl.float32)
    for k in tl.range(0, size, COLUMNS, num_stages=STAGES):
        j = k + tl.arange(0, COLUMNS)
        inside = (i[:, None] < n) & (j[None, :] < size)
        part = tl.load(rows + (left + j).to(tl.int64)[None, :] * column, mask=inside, other=0.0)
        known = _right(x, left, j, size, v, vectors)
        wide, high = part.to(tl.float32), round_to_bits(known, 11)
        low = round_to_bits(known - high, 11)
        total = tl.dot(wide, low, total, input_precision="tf32")
        total = tl.dot(wide, high, total, input_precision="tf32")
    return total


@triton.jit
def _sweep(
    t, inverses, rest, x, state, n, vectors, tiles, blocks, per_block, first,
    t_row, t_column, next_inverse, inverse_row, inverse_column,
    UPPER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTORS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles of rows, one after the other, until none is left."""
    solved, ready, updated = state + 1, state + 1 + blocks, state + 1 + 2 * blocks
    width = per_block * ROWS
    v = tl.arange(0, VECTORS)
    step, before = 0, 0
    task = tl.atomic_add(state, 1)
    while step < blocks:
        while (step < blocks) & (task - before >= tiles - _first_tile(step, first, per_block)):
            before += tiles - _first_tile(step, first, per_block)
            step += 1
        if step < blocks:
            start = _first_tile(step, first, per_block)
            own = tl.minimum(_first_tile(step + 1, first, per_block), tiles) - start
            block = blocks - 1 - step if UPPER else step
            left = block * width
            size = tl.minimum(width, n - left)
            place = start + task - before
            # Of which block the tile is, and where.
            other = tl.where(place < first, 0, 1 + (place - first) // per_block)
            within = tl.where(place < first, place, (place - first) % per_block)
            top = ((blocks - 1 - other if UPPER else other) * per_block + within) * ROWS
            i = top + tl.arange(0, ROWS)
            mask = (i[:, None] < n) & (v[None, :] < vectors)
            here = i[:, None] * vectors + v[None, :]
            if other == step:
                _wait(ready + step, step * own)
                diagonal = inverses + block * next_inverse + (i - left)[:, None] * inverse_row
                begin = (top - left) // COLUMNS * COLUMNS if UPPER else 0
                end = size if UPPER else tl.minimum(size, top - left + ROWS)
                found = _by_inverse(
                    diagonal, rest, left, size, i, v, n, vectors, inverse_column, begin, end, COLUMNS, STAGES
                )
                tl.store(x + here, found, mask=mask)
                _count(solved + step)
            else:
                _wait(solved + step, own)
                _wait(updated + place, step)
                rows = t + i.to(tl.int64)[:, None] * t_row
                product = _by_panel(rows, x, left, size, i, v, n, vectors, t_column, COLUMNS, STAGES)
                was = tl.load(rest + here, mask=mask, other=0.0, cache_modifier=".cg")
                tl.store(rest + here, was - product, mask=mask)
                _count(updated + place)
                tl.atomic_add(ready + other, 1, sem="release", scope="gpu")
            task = tl.atomic_add(state, 1)
