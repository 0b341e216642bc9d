"""Kernels of :func:`neula.kernels.cholesky_batch.factor_batch`.

*Chain* of n columns: ``n / 128`` leaves one after the other, 22 us each on an H200, and two launches between
two of them. *Products*: ``n^3`` flops of parts, ``n^3 / 3`` of them needed in any case. *Bytes*: each leaf of
columns reads all rows of L to its left, ``n^3 / 192`` numbers, in the cache for all but the largest batches.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from neula.kernels.cholesky import cholesky_apart, cholesky_lower
from neula.kernels.cholesky_batch import LEAF, BatchFactors, Beside, first_order, one_after_the_other
from neula.kernels.launch import multiprocessors

ROWS = 32
"""Rows that a thread block updates, or multiplies by the inverse of a leaf (640 of order 512: 2.1 ms, and 2.2
with 64)."""

COLUMNS = 64
"""Columns that it updates."""

FEW = 8
"""Tiles of a leaf of columns for each multiprocessor up to which some have nothing to do beside a leaf (2 of
order 2048: 1.12 ms, and 1.32 one after the other)."""

DEPTH, STAGES, WARPS = 32, 3, 4

PRECISION = "tf32x3"
"""Three products of parts, about as accurate as single precision."""


def factor_batch_triton(a: torch.Tensor, beside: Beside = one_after_the_other) -> BatchFactors:
    """:func:`neula.kernels.cholesky_batch.factor_batch` by the kernels, queued on the current stream."""
    count, n, _ = a.shape
    if n <= LEAF and cholesky_apart.takes(a):
        return BatchFactors(*cholesky_apart.kernel(a))
    lower = torch.zeros(a.shape, device=a.device)
    few = count * triton.cdiv(n, ROWS) <= FEW * multiprocessors(a.device)
    orders, following = [], 0
    _update(a, lower, 0, 0, 0)
    for start in range(0, n, LEAF):
        following = start + LEAF
        if few and start > 0 and following < n:
            # What is done before this leaf need not wait for it.
            order = beside(partial(_update, a, lower, following, 0, start), partial(_leaf, lower, start))
            _update(lower, lower, following, start, following)
        else:
            order = _leaf(lower, start)
            if following < n:
                _update(a, lower, following, 0, following)
        orders.append(order)
    return BatchFactors(lower, first_order(torch.stack(orders)))


def _leaf(lower: torch.Tensor, start: int) -> torch.Tensor:
    """A diagonal block, and what is below it."""
    (count, n, _), k = lower.shape, slice(start, start + LEAF)
    # The interpreter has no CUDA.
    factor = cholesky_lower.kernel if lower.is_cuda else cholesky_lower.reference
    inverse, order = factor(lower[:, k, k])
    if k.stop < n:
        tiles = triton.cdiv(n - k.stop, ROWS)
        with torch.cuda.device_of(lower):
            _solve_kernel[(tiles * count,)](
                *(lower, lower.stride(0), inverse, n, tiles, start // LEAF),
                *(ROWS, LEAF, DEPTH, STAGES, PRECISION),
                num_warps=WARPS,
            )
    return order


def _update(source: torch.Tensor, lower: torch.Tensor, start: int, begin: int, end: int) -> None:
    """A leaf of columns of L, without what others contribute, from those of a matrix, which may be L."""
    count, n, _ = lower.shape
    tiles, across = triton.cdiv(n - start, ROWS), triton.cdiv(min(LEAF, n - start), COLUMNS)
    with torch.cuda.device_of(lower):
        _update_kernel[(tiles * count, across)](
            *(
                source,
                *source.stride(),
                lower,
                lower.stride(0),
                n,
                tiles,
                start // LEAF,
                begin // LEAF,
                end // LEAF,
            ),
            *(ROWS, COLUMNS, LEAF, DEPTH, STAGES, PRECISION),
            num_warps=WARPS,
        )


@triton.jit(do_not_specialize=["tiles", "start", "begin", "end"])
def _update_kernel(
    a, a_batch, a_row, a_column, lower, l_batch, n, tiles, start, begin, end,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LEAF: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of a leaf of columns, without what some columns to the left contribute."""
    member = (tl.program_id(0) // tiles).to(tl.int64)
    # In leaves, so that the compiler sees what numbers are multiples of, and loads several at a time.
    start, begin, end = start * LEAF, begin * LEAF, end * LEAF
    first = start + tl.program_id(0) % tiles * ROWS
    left = start + tl.program_id(1) * COLUMNS
    if first + ROWS <= left:
        return
    i, j = first + tl.arange(0, ROWS), left + tl.arange(0, COLUMNS)
    lower += member * l_batch
    rows = lower + i.to(tl.int64)[:, None] * n
    columns = lower + j.to(tl.int64)[None, :] * n
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for done in tl.range(0, end - begin, DEPTH, num_stages=STAGES):
        k = begin + done + tl.arange(0, DEPTH)
        x = tl.load(rows + k[None, :], mask=i[:, None] < n, other=0.0)
        y = tl.load(columns + k[:, None], mask=j[None, :] < n, other=0.0)
        total = tl.dot(x, y, total, input_precision=PRECISION)
    inside = (i[:, None] < n) & (j[None, :] <= i[:, None])
    place = a + member * a_batch + i.to(tl.int64)[:, None] * a_row + j.to(tl.int64)[None, :] * a_column
    given = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    tl.store(rows + j[None, :], given - total, mask=inside & (j[None, :] < start + LEAF))


@triton.jit(do_not_specialize=["tiles", "start"])
def _solve_kernel(
    lower, l_batch, inverse, n, tiles, start,
    ROWS: tl.constexpr, LEAF: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of L below a leaf."""
    member = (tl.program_id(0) // tiles).to(tl.int64)
    start *= LEAF
    i = start + LEAF + tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    w = tl.arange(0, LEAF)
    rows = lower + member * l_batch + i.to(tl.int64)[:, None] * n + start
    inverse += member * LEAF * LEAF
    total = tl.zeros((ROWS, LEAF), tl.float32)
    for done in tl.range(0, LEAF, DEPTH, num_stages=STAGES):
        k = done + tl.arange(0, DEPTH)
        x = tl.load(rows + k[None, :], mask=i[:, None] < n, other=0.0)
        y = tl.load(inverse + k[:, None] * LEAF + w[None, :])
        total = tl.dot(x, y, total, input_precision=PRECISION)
    # All threads have read what is overwritten now.
    tl.debug_barrier()
    tl.store(rows + w[None, :], total, mask=i[:, None] < n)
