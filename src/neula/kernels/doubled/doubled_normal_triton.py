"""``r = b - A x`` and ``A^T r`` in twice the precision of float64 while each row of A is in registers.

``8 m n`` bytes, and some 25 operations an element: an H200 does twenty in the time that memory takes for it.
Products and sums are those of ``doubled_triton``. A thread block goes through every so many blocks of whole
rows; each thread sums what its elements contribute to the gradient, and errors beside. Partial sums are added
at the end in a fixed order.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from neula.kernels.doubled.doubled import Pair, doubled_product
from neula.kernels.doubled.doubled_triton import add_pairs, product_error, two_sum
from neula.kernels.few_vectors.normal_product import ONE_WARP
from neula.kernels.launch import ceil_div, multiprocessors, next_power_of_2
from neula.kernels.triton_source import jit, tl


def config(width: int) -> tuple[int, int, int, int]:
    """Elements of A at a time, warps, loads in flight, and thread blocks for each multiprocessor.

    Several thread blocks hide one another's waits for sums of rows: 262144 rows of 1024 columns take 0.78 ms
    on an H200, and 0.98 by one of 8 warps. One warp needs no such waits, where rows fit in its registers:
    1000000 rows of 200 columns take 0.72 ms, and 3.3.
    """
    if width <= ONE_WARP:
        return 512, 1, 4, 16
    return (2048, 4, 3, 3) if width == 1024 else (4096, 8, 3, 1)


def doubled_normal_triton(
    a: torch.Tensor,
    x: torch.Tensor,
    x_low: torch.Tensor,
    b: torch.Tensor,
    *,
    given: tuple[int, int, int, int] | None = None,
) -> tuple[Pair, Pair]:
    """``doubled_normal.doubled_normal`` by the kernel, queued on the current stream.

    Parameters
    ----------
    a : Tensor, shape (m, n)
        float64, rows contiguous.
    x, x_low : Tensor, shape (n, 1)
    b : Tensor, shape (m, 1)
    given : (int, int, int, int), optional
        In place of :func:`config`.
    """
    m, n = a.shape
    width = max(32, next_power_of_2(n))
    tile, warps, stages, blocks = given or config(width)
    rows = max(1, tile // width)
    programs = min(blocks * multiprocessors(a.device), ceil_div(m, rows))
    residual = torch.empty(2, m, 1, dtype=a.dtype, device=a.device)
    sums = torch.empty(2, programs, n, dtype=a.dtype, device=a.device)
    # Contracted to a multiply-add, a sum that is to be made of rounded products has another rounding error.
    with torch.cuda.device_of(a):
        _doubled_normal[(programs,)](
            *(a, x.contiguous(), x_low.contiguous(), b, *residual, *sums, m, n, a.stride(0), b.stride(0)),
            *(rows, width, stages, n == width, a.is_cuda),
            num_warps=warps,
            enable_fp_fusion=False,
        )
    high, low = doubled_product(sums[0].T[None], sums.new_ones(1, programs, 1))
    return (residual[0], residual[1]), (high[0], low[0] + sums[1].sum(0)[:, None])


@jit(do_not_specialize=["m", "n", "b_row"])
def _doubled_normal(
    a, x, x_low, b, to_high, to_low, high, low, m, n, a_row, b_row,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """Partial sums of the gradient over every so many blocks of rows, and the residual of these rows."""
    m = m.to(tl.int64)  # offsets may exceed 2^31
    j = tl.arange(0, WIDTH)
    x = tl.load(x + j, mask=j < n, other=0.0)[None, :]
    x_low = tl.load(x_low + j, mask=j < n, other=0.0)[None, :]
    sums = tl.zeros((ROWS, WIDTH), tl.float64)
    errors = tl.zeros((ROWS, WIDTH), tl.float64)
    first = tl.program_id(0).to(tl.int64) * ROWS
    step = tl.num_programs(0).to(tl.int64) * ROWS
    for start in tl.range(first, m, step, num_stages=STAGES):
        i = start + tl.arange(0, ROWS)
        place = a + i[:, None] * a_row + j[None, :]
        if WHOLE:
            block = tl.load(place, mask=(i < m)[:, None], other=0.0)
        else:
            block = tl.load(place, mask=(i < m)[:, None] & (j < n)[None, :], other=0.0)
        product = block * x
        error = product_error(block, x, product, FUSED) + block * x_low
        image, rest = tl.reduce((product, error), 1, add_pairs)
        r, error = two_sum(tl.load(b + i * b_row, mask=i < m, other=0.0), -image)
        r, r_low = two_sum(r, error - rest)
        tl.store(to_high + i, r, mask=i < m)
        tl.store(to_low + i, r_low, mask=i < m)
        r, r_low = r[:, None], r_low[:, None]
        product = block * r
        sums, error = two_sum(sums, product)
        errors += error + product_error(block, r, product, FUSED) + block * r_low
    total, rest = tl.reduce((sums, errors), 0, add_pairs)
    place = tl.program_id(0).to(tl.int64) * n + j
    tl.store(high + place, total, mask=j < n)
    tl.store(low + place, rest, mask=j < n)
