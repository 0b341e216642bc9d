"""The panels of :mod:`neula.kernels.cholesky_panel`, in three launches for a batch.

The first sums Gram matrices of blocks of rows. In the second each thread block adds up those of its panel,
finds R and its inverse by itself, which takes less than to wait for one that does, multiplies its rows, and
sums their Gram matrix; so does the third, but for that.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from neula.kernels.cholesky_panel import LOST, MAX_COLUMNS
from neula.kernels.launch import multiprocessors, share

ROWS, WARPS = 64, 4
"""Rows that are multiplied at a time, and warps of a thread block."""

EACH = 4
"""Thread blocks for each multiprocessor: while one follows the chain of pivots, others multiply."""

PARTS = 16
"""Gram matrices that are added up, at most."""


def cholesky_panel_triton(a: torch.Tensor, r: torch.Tensor, narrow: torch.Tensor | None = None) -> None:
    """:func:`neula.kernels.cholesky_panel.cholesky_panel` by the kernels, queued on the current stream."""
    count, m, n = a.shape
    among = min(PARTS, max(1, EACH * multiprocessors(a.device) // count))
    chunk = share(m, among, ROWS)
    blocks = triton.cdiv(m, chunk)
    room = a.new_empty(2 * count * blocks + count, MAX_COLUMNS, MAX_COLUMNS)
    first, second, r1 = room.split([count * blocks, count * blocks, count])
    sizes = (m, n, chunk, blocks)
    rounds, kept = narrow is not None, a if narrow is None else narrow
    constants = (LOST, ROWS, MAX_COLUMNS)
    with torch.cuda.device_of(a):
        grid = (count * blocks,)
        _gram[grid](a, first, *sizes, *a.stride(), ROWS, MAX_COLUMNS, num_warps=WARPS)
        arguments = (*sizes, *a.stride(), *r.stride(), *kept.stride())
        _multiply[grid](
            *(a, first, second, r1, r, kept, *arguments, True, False, *constants), num_warps=WARPS
        )
        _multiply[grid](
            *(a, second, first, r1, r, kept, *arguments, False, rounds, *constants), num_warps=WARPS
        )


@triton.jit(do_not_specialize=["m", "n", "chunk", "blocks"])
def _gram(
    a, parts, m, n, chunk, blocks, a_batch, a_row, a_column,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Gram matrix of the rows of this program."""
    matrix, part = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, SIZE)[None, :]
    place = a + matrix * a_batch + j.to(tl.int64) * a_column
    last = tl.minimum(part * chunk + chunk, m)
    gram = tl.zeros((SIZE, SIZE), tl.float64)
    for start in range(part * chunk, last, ROWS):
        row = start + i
        x = tl.load(place + row.to(tl.int64) * a_row, mask=(row < last) & (j < n), other=0.0)
        gram = tl.dot(tl.trans(x), x, gram, input_precision="ieee", out_dtype=tl.float64)
    k = tl.arange(0, SIZE)[:, None]
    tl.store(parts + tl.program_id(0).to(tl.int64) * SIZE * SIZE + k * SIZE + j, gram)


@triton.jit(do_not_specialize=["m", "n", "chunk", "blocks"])
def _multiply(
    a, parts, next_parts, r1, r, narrow, m, n, chunk, blocks, a_batch, a_row, a_column, r_batch, r_row,
    r_column, narrow_batch, narrow_row, narrow_column,
    FIRST: tl.constexpr, ROUNDS: tl.constexpr, LOST: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The rows of this program times the inverse of R; the first program of a matrix keeps R."""
    matrix, part = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, SIZE)[None, :]
    k = tl.arange(0, SIZE)[:, None]
    here = k * SIZE + j
    gram = tl.zeros((SIZE, SIZE), tl.float64)
    for block in range(blocks):
        gram += tl.load(parts + (matrix * blocks + block) * SIZE * SIZE + here)
    upper, inverse = _factors(gram, k, j, LOST, SIZE)
    if part == 0:
        if FIRST:
            tl.store(r1 + matrix * SIZE * SIZE + here, upper)
        else:
            before = tl.load(r1 + matrix * SIZE * SIZE + here)
            whole = tl.dot(upper, before, input_precision="ieee", out_dtype=tl.float64)
            whole = tl.where(k <= j, whole, 0.0)
            place = r + matrix * r_batch + k.to(tl.int64) * r_row + j.to(tl.int64) * r_column
            tl.store(place, whole, mask=(k < n) & (j < n))
    place = a + matrix * a_batch + j.to(tl.int64) * a_column
    narrow_place = narrow + matrix * narrow_batch + j.to(tl.int64) * narrow_column
    last = tl.minimum(part * chunk + chunk, m)
    gram = tl.zeros((SIZE, SIZE), tl.float64)
    for start in range(part * chunk, last, ROWS):
        row = start + i
        inside = (row < last) & (j < n)
        x = tl.load(place + row.to(tl.int64) * a_row, mask=inside, other=0.0)
        x = tl.dot(x, inverse, input_precision="ieee", out_dtype=tl.float64)
        tl.store(place + row.to(tl.int64) * a_row, x, mask=inside)
        if ROUNDS:
            tl.store(narrow_place + row.to(tl.int64) * narrow_row, x.to(tl.float32), mask=inside)
        if FIRST:
            gram = tl.dot(tl.trans(x), x, gram, input_precision="ieee", out_dtype=tl.float64)
    if FIRST:
        tl.store(next_parts + tl.program_id(0).to(tl.int64) * SIZE * SIZE + here, gram)


@triton.jit
def _factors(gram, k, j, LOST: tl.constexpr, SIZE: tl.constexpr):
    """R and its inverse, by operations on columns that are the same for both, without square roots."""
    diagonal = tl.where(k == j, gram, 0.0)
    least = LOST * tl.sum(diagonal, axis=0, keep_dims=True)
    inverse = tl.where(k == j, 1.0, tl.zeros((SIZE, SIZE), tl.float64))
    across = tl.zeros((1, SIZE), tl.float64)
    down = tl.zeros((SIZE, 1), tl.float64)
    for step in range(SIZE):
        row = tl.sum(tl.where(k == step, gram, 0.0), axis=0, keep_dims=True)
        # What is negative says that a pivot is lost; NaN stays NaN.
        pivots = tl.where(row < least, -least, row)
        pivot = tl.sum(tl.where(j == step, pivots, 0.0), axis=1, keep_dims=True)
        column = tl.sum(tl.where((j == step) & (k > step), gram, 0.0), axis=1, keep_dims=True)
        beside = tl.sum(tl.where(j == step, inverse, 0.0), axis=1, keep_dims=True)
        across = tl.where(j == step, pivot, across)
        down = tl.where(k == step, pivot, down)
        multipliers = tl.where((j > step) & ~(pivot <= 0.0), row / pivot, 0.0)
        gram -= column * multipliers
        inverse -= beside * multipliers
    upper = tl.where((j > k) & ~(down <= 0.0), gram, 0.0)
    upper = tl.where(k == j, tl.abs(down), upper) * _inverse_root(down)
    return upper, inverse * _inverse_root(across)


@triton.jit
def _inverse_root(pivot):
    """Zero where a column vanishes."""
    return tl.where(pivot == 0.0, 0.0, 1.0 / tl.sqrt(tl.abs(pivot)))
