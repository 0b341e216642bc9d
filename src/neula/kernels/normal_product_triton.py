"""``Y = A X`` (or ``B - A X``) and ``Z = A^T Y`` while each row of A is in registers.

``8 m n`` bytes and ``4 m n k`` flops in float64, k being 1 or 2: an H200 does 14 flops in the time of a byte
without matrix units, so memory decides, and reading A once instead of twice is the gain. A thread block goes
through every so many blocks of whole rows. A row of Y is a sum over all its threads; Z is summed in the
registers of the thread that holds the column, and what thread blocks found is added by torch, in an order
that does not depend on what finishes first.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from neula.kernels.launch import multiprocessors

TILE = 8192
"""Elements of A at a time, 64 KB: three of them fit in shared memory, two on their way, one in use."""

WARPS = 8
STAGES = 3
BLOCKS = 1
"""Thread blocks for each multiprocessor."""


def normal_product_triton(
    a: torch.Tensor,
    x: torch.Tensor,
    b: torch.Tensor | None = None,
    *,
    tile: int = TILE,
    warps: int = WARPS,
    stages: int = STAGES,
    blocks: int = BLOCKS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`neula.kernels.normal_product.normal_product` by the kernel, queued on the current stream.

    Parameters
    ----------
    a : Tensor, shape (m, n)
        float64, rows contiguous.
    x : Tensor, shape (n, k)
        float64, k at most 2.
    b : Tensor, shape (m, k), optional
    """
    (m, n), k = a.shape, x.shape[1]
    width = max(32, triton.next_power_of_2(n))
    rows = max(1, tile // width)
    programs = min(blocks * multiprocessors(a.device), triton.cdiv(m, rows))
    x = x.T.contiguous()
    y = torch.empty(k, m, dtype=a.dtype, device=a.device)
    sums = torch.empty(programs, k, n, dtype=a.dtype, device=a.device)
    b_strides = (0, 0) if b is None else b.stride()
    with torch.cuda.device_of(a):
        _normal_product[(programs,)](
            *(a, x, y if b is None else b, y, sums, m, n, a.stride(0), *b_strides),
            *(rows, width, k, b is not None, stages, n == width),
            num_warps=warps,
        )
    return y.T, sums.sum(0).T


@triton.jit(do_not_specialize=["m", "n", "b_row", "b_column"])
def _normal_product(
    a, x, b, y, sums, m, n, a_row, b_row, b_column,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, VECTORS: tl.constexpr, FROM_B: tl.constexpr,
    STAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """What every so many blocks of rows contribute."""
    m, b_column = m.to(tl.int64), b_column.to(tl.int64)  # offsets may exceed 2^31
    j = tl.arange(0, WIDTH)
    x0 = tl.load(x + j, mask=j < n, other=0.0)
    z0 = tl.zeros((WIDTH,), tl.float64)
    if VECTORS == 2:
        x1 = tl.load(x + n + j, mask=j < n, other=0.0)
        z1 = tl.zeros((WIDTH,), tl.float64)
    first = tl.program_id(0).to(tl.int64) * ROWS
    step = tl.num_programs(0).to(tl.int64) * ROWS
    for start in tl.range(first, m, step, num_stages=STAGES):
        i = start + tl.arange(0, ROWS)
        place = a + i[:, None] * a_row + j[None, :]
        if WHOLE:
            block = tl.load(place, mask=(i < m)[:, None], other=0.0)
        else:
            block = tl.load(place, mask=(i < m)[:, None] & (j < n)[None, :], other=0.0)
        y0 = tl.sum(block * x0[None, :], axis=1)
        if FROM_B:
            y0 = tl.load(b + i * b_row, mask=i < m, other=0.0) - y0
        tl.store(y + i, y0, mask=i < m)
        z0 += tl.sum(block * y0[:, None], axis=0)
        if VECTORS == 2:
            y1 = tl.sum(block * x1[None, :], axis=1)
            if FROM_B:
                y1 = tl.load(b + i * b_row + b_column, mask=i < m, other=0.0) - y1
            tl.store(y + m + i, y1, mask=i < m)
            z1 += tl.sum(block * y1[:, None], axis=0)
    sums += tl.program_id(0).to(tl.int64) * VECTORS * n
    tl.store(sums + j, z0, mask=j < n)
    if VECTORS == 2:
        tl.store(sums + n + j, z1, mask=j < n)
