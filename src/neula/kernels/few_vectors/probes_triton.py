"""Residual and orthogonality along four vectors, in one pass over A and Q.

Two launches. The first computes ``R D G``, a matrix of four columns for each factorization. In the second a
block of rows of A and Q is read, ``A D G``, ``Q (R D G)`` and ``Q H`` are formed in registers, and the block
of Q, still in the cache, gives its part of ``Q^T (Q H)``. The parts are added by torch: the sum does not
depend on the order in which blocks finish.

That takes 16 multiply-adds for each pair of elements of A and Q, which are 8 bytes in float32: few enough for
memory to be the bound in float32 (on an H200 67 TFLOP/s at 4.8 TB/s), but not in float64.

Where a matrix has many rows, a thread block goes through a share of them and keeps the vectors and its part
of ``Q^T (Q H)`` in registers: A and Q are read once, and there are few parts. A thread then adds T numbers
one after the other, with an error of about ``sqrt(T) u / 5`` of its sum. But N sums of different threads,
thousands, add up to an element of the result, and their errors are independent: ``sqrt(T / N) u / 5``
remains, less than ``u / 5`` for 4194304 rows.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from neula.kernels.few_vectors.probes import norms, spectral_norms
from neula.kernels.launch import VECTOR, ceil_div, elements_at_a_time, multiprocessors, next_power_of_2, share
from neula.kernels.triton_source import jit, tl

MAX_ROWS = 32
COLUMNS = 32
"""Blocks of one warp, which adds up without shared memory: on an H200 4096 of 256 x 32 take 0.14 ms,
with blocks of 64 rows 0.21, of 256 rows 0.27."""

TALL, TALL_COLUMNS = 1 << 17, 256
"""From how many rows, and up to how many columns, a thread block goes through many blocks of rows: on an H200
4194304 x 128 take 1.0 ms instead of 1.7, 131072 x 32 0.035 instead of 0.040, but 32768 x 128 0.048 instead of
0.041."""

TALL_BLOCK, TALL_WARPS = 4096, 8
"""Elements of such a block, 16 a thread, and warps of a thread block, of which a multiprocessor has room for
one: 4194304 x 128 take 1.0 ms, with blocks of half the size 1.2."""


def probe_errors_triton(
    a: torch.Tensor,
    q: torch.Tensor,
    r: torch.Tensor,
    scales: torch.Tensor,
    g: torch.Tensor,
    h: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`neula.kernels.few_vectors.probes.probe_errors` by the kernel, queued on the current stream."""
    count, m, n = a.shape
    k = q.shape[2]
    precision = torch.float64 if torch.float64 in (a.dtype, q.dtype, r.dtype) else torch.float32
    wide = torch.float64 if precision == torch.float64 else torch.float32
    rows, rows_of_r = _block_rows(m), _block_rows(k)
    tall = precision == torch.float32 and m >= TALL and _four_at_a_time(a) and _four_at_a_time(q)
    half = max(8, next_power_of_2(max(n, k)) // 2)
    rows_of_tall = TALL_BLOCK // (2 * half)
    chunk = share(m, ceil_div(multiprocessors(a.device), count), rows_of_tall) if tall else rows
    blocks = ceil_div(m, chunk)
    rg = torch.empty(count, 4, k, dtype=precision, device=a.device)
    parts = torch.empty(count, blocks, 4, k, dtype=precision, device=a.device)
    sums = torch.empty(count, blocks, 2, dtype=precision, device=a.device)
    with torch.cuda.device_of(a):
        strides = (*r.stride(), *scales.stride(), *g.stride())
        launch = _scaled_product[(count * ceil_div(k, rows_of_r),)]
        launch(r, scales, g, rg, k, n, *strides, rows_of_r, COLUMNS, wide, num_warps=_warps(rows_of_r))
        strides = (*a.stride(), *q.stride(), *scales.stride(), *g.stride(), *h.stride())
        arguments = (a, q, scales, g, h, rg, parts, sums, m, n, k, blocks, *strides)
        if tall:
            launch = _tall_errors[(count * blocks,)]
            launch(*arguments, chunk, rows_of_tall, half, _stages(half), num_warps=TALL_WARPS)
        else:
            launch = _errors[(count * blocks,)]
            launch(*arguments, rows, COLUMNS, wide, num_warps=_warps(rows))
    whole, products = (sums[:, 0], parts[:, 0]) if blocks == 1 else (sums.sum(1), parts.sum(1))
    residual, size = whole.sqrt_().unbind(-1)
    return residual, size, norms(products), spectral_norms(products.mT)


def _four_at_a_time(x: torch.Tensor) -> bool:
    """Whether a matrix is one for :func:`_tall_errors`, which is slow where rows cannot be read so."""
    return x.shape[2] <= TALL_COLUMNS and x.stride(2) == 1 and elements_at_a_time(x) == VECTOR


def _stages(half: int) -> int:
    """Loads in flight: 4194304 x 128 take 1.5 ms with two. Vectors of 256 elements leave no registers."""
    return 4 if half <= 64 else 1


def _block_rows(m: int) -> int:
    return min(MAX_ROWS, max(16, next_power_of_2(m)))


def _warps(rows: int) -> int:
    """32 elements for each thread."""
    return max(1, rows * COLUMNS // 1024)


@jit
def _scaled_product(
    r, scales, g, rg, k, n, r_batch, r_row, r_column, scales_batch, scales_column, g_row, g_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A block of rows of ``R D G``."""
    blocks = tl.cdiv(k, ROWS)
    matrix = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    rows = r + matrix * r_batch + i.to(tl.int64)[:, None] * r_row
    p0, p1, p2, p3 = _times_scaled(
        rows,
        r_column,
        i < k,
        n,
        scales + matrix * scales_batch,
        scales_column,
        g,
        g_row,
        g_column,
        ROWS,
        COLUMNS,
        WIDE,
    )
    _store(rg + matrix * 4 * k + i, k, i < k, p0, p1, p2, p3)


@jit
def _errors(
    a, q, scales, g, h, rg, parts, sums, m, n, k, blocks, a_batch, a_row, a_column, q_batch, q_row, q_column,
    scales_batch, scales_column, g_row, g_column, h_row, h_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """What a block of rows of A and Q adds to the squares of the norms and to ``Q^T (Q H) - H``."""
    matrix, part = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    i = part * ROWS + tl.arange(0, ROWS)
    a_rows = a + matrix * a_batch + i.to(tl.int64)[:, None] * a_row
    q_rows = q + matrix * q_batch + i.to(tl.int64)[:, None] * q_row
    x0, x1, x2, x3 = _times_scaled(
        a_rows,
        a_column,
        i < m,
        n,
        scales + matrix * scales_batch,
        scales_column,
        g,
        g_row,
        g_column,
        ROWS,
        COLUMNS,
        WIDE,
    )
    size = tl.sum(x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3, axis=0)

    y0, y1, y2, y3 = _zeros(ROWS, WIDE)
    for start in range(0, k, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        inside = (i[:, None] < m) & (j[None, :] < k)
        block = tl.load(q_rows + j.to(tl.int64)[None, :] * q_column, mask=inside, other=0.0).to(WIDE)
        r0, r1, r2, r3 = _vectors(rg + matrix * 4 * k + j, k, j < k, WIDE)
        x0 -= tl.sum(block * r0[None, :], axis=1)
        x1 -= tl.sum(block * r1[None, :], axis=1)
        x2 -= tl.sum(block * r2[None, :], axis=1)
        x3 -= tl.sum(block * r3[None, :], axis=1)
        h0, h1, h2, h3 = _vectors(h + j * h_row, h_column, j < k, WIDE)
        y0 += tl.sum(block * h0[None, :], axis=1)
        y1 += tl.sum(block * h1[None, :], axis=1)
        y2 += tl.sum(block * h2[None, :], axis=1)
        y3 += tl.sum(block * h3[None, :], axis=1)
    gap = tl.sum(x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3, axis=0)
    place = sums + tl.program_id(0).to(tl.int64) * 2
    tl.store(place, gap)
    tl.store(place + 1, size)

    for start in range(0, k, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        inside = (i[:, None] < m) & (j[None, :] < k)
        block = tl.load(q_rows + j.to(tl.int64)[None, :] * q_column, mask=inside, other=0.0).to(WIDE)
        # H is subtracted once, by the first block.
        h0, h1, h2, h3 = _vectors(h + j * h_row, h_column, j < tl.where(part == 0, k, 0), WIDE)
        p0 = tl.sum(block * y0[:, None], axis=0) - h0
        p1 = tl.sum(block * y1[:, None], axis=0) - h1
        p2 = tl.sum(block * y2[:, None], axis=0) - h2
        p3 = tl.sum(block * y3[:, None], axis=0) - h3
        _store(parts + tl.program_id(0).to(tl.int64) * 4 * k + j, k, j < k, p0, p1, p2, p3)


@jit(do_not_specialize=["m", "n", "k", "blocks", "chunk"])
def _tall_errors(
    a, q, scales, g, h, rg, parts, sums, m, n, k, blocks, a_batch, a_row, a_column, q_batch, q_row, q_column,
    scales_batch, scales_column, g_row, g_column, h_row, h_column, chunk,
    ROWS: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """:func:`_errors` for a share of the rows, in float32, of matrices read four elements at a time."""
    # Multiples of four, as the compiler has to see to move four elements at a time.
    n, a_batch, a_row = n // 4 * 4, a_batch // 4 * 4, a_row // 4 * 4
    k, q_batch, q_row = k // 4 * 4, q_batch // 4 * 4, q_row // 4 * 4
    matrix, part = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    first = part.to(tl.int64) * chunk
    last = tl.minimum(first + chunk, m)
    i = tl.arange(0, ROWS)[:, None, None]
    j = tl.arange(0, 2)[None, :, None] * HALF + tl.arange(0, HALF)[None, None, :]
    a_place = a + matrix * a_batch + j.to(tl.int64) * a_column
    q_place = q + matrix * q_batch + j.to(tl.int64) * q_column
    d = tl.load(scales + matrix * scales_batch + j * scales_column, mask=j < n, other=0.0).to(tl.float32)
    g0, g1, g2, g3 = _vectors(g + j * g_row, g_column, j < n, tl.float32)
    g0, g1, g2, g3 = d * g0, d * g1, d * g2, d * g3
    r0, r1, r2, r3 = _vectors(rg + matrix * 4 * k + j, k, j < k, tl.float32)
    h0, h1, h2, h3 = _vectors(h + j * h_row, h_column, j < k, tl.float32)
    size = tl.zeros((ROWS,), tl.float32)
    gap = tl.zeros((ROWS,), tl.float32)
    p0 = tl.zeros((ROWS, 2, HALF), tl.float32)
    p1 = tl.zeros((ROWS, 2, HALF), tl.float32)
    p2 = tl.zeros((ROWS, 2, HALF), tl.float32)
    p3 = tl.zeros((ROWS, 2, HALF), tl.float32)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + i
        x = tl.load(a_place + row * a_row, mask=(row < last) & (j < n), other=0.0).to(tl.float32)
        y = tl.load(q_place + row * q_row, mask=(row < last) & (j < k), other=0.0).to(tl.float32)
        x0, x1, x2, x3 = _along(x, g0), _along(x, g1), _along(x, g2), _along(x, g3)
        size += x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3
        x0 -= _along(y, r0)
        x1 -= _along(y, r1)
        x2 -= _along(y, r2)
        x3 -= _along(y, r3)
        gap += x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3
        p0 += y * _along(y, h0)[:, None, None]
        p1 += y * _along(y, h1)[:, None, None]
        p2 += y * _along(y, h2)[:, None, None]
        p3 += y * _along(y, h3)[:, None, None]
    place = sums + tl.program_id(0).to(tl.int64) * 2
    tl.store(place, tl.sum(gap, axis=0))
    tl.store(place + 1, tl.sum(size, axis=0))
    p0 = tl.sum(p0, axis=0)[None, :, :]
    p1 = tl.sum(p1, axis=0)[None, :, :]
    p2 = tl.sum(p2, axis=0)[None, :, :]
    p3 = tl.sum(p3, axis=0)[None, :, :]
    if part == 0:  # H is subtracted once
        p0, p1, p2, p3 = p0 - h0, p1 - h1, p2 - h2, p3 - h3
    _store(parts + tl.program_id(0).to(tl.int64) * 4 * k + j, k, j < k, p0, p1, p2, p3)


@jit
def _along(x, vector):
    """Rows times a vector."""
    return tl.sum(tl.sum(x * vector, axis=1), axis=1)


@jit
def _times_scaled(
    rows, column, exists, n, scales, scales_column, g, g_row, g_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A block of rows, which start at ``rows`` where they exist, times ``D G``."""
    p0, p1, p2, p3 = _zeros(ROWS, WIDE)
    for start in range(0, n, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        inside = exists[:, None] & (j[None, :] < n)
        block = tl.load(rows + j.to(tl.int64)[None, :] * column, mask=inside, other=0.0).to(WIDE)
        d = tl.load(scales + j * scales_column, mask=j < n, other=0.0).to(WIDE)
        g0, g1, g2, g3 = _vectors(g + j * g_row, g_column, j < n, WIDE)
        p0 += tl.sum(block * (d * g0)[None, :], axis=1)
        p1 += tl.sum(block * (d * g1)[None, :], axis=1)
        p2 += tl.sum(block * (d * g2)[None, :], axis=1)
        p3 += tl.sum(block * (d * g3)[None, :], axis=1)
    return p0, p1, p2, p3


@jit
def _zeros(SIZE: tl.constexpr, WIDE: tl.constexpr):
    zero = tl.zeros((SIZE,), WIDE)
    return zero, zero, zero, zero


@jit
def _vectors(start, stride, mask, WIDE: tl.constexpr):
    """A piece of each of the four vectors."""
    return (
        tl.load(start, mask=mask, other=0.0).to(WIDE),
        tl.load(start + stride, mask=mask, other=0.0).to(WIDE),
        tl.load(start + 2 * stride, mask=mask, other=0.0).to(WIDE),
        tl.load(start + 3 * stride, mask=mask, other=0.0).to(WIDE),
    )


@jit
def _store(start, stride, mask, x0, x1, x2, x3):
    """A piece of each of four vectors."""
    tl.store(start, x0, mask=mask)
    tl.store(start + stride, x1, mask=mask)
    tl.store(start + 2 * stride, x2, mask=mask)
    tl.store(start + 3 * stride, x3, mask=mask)
