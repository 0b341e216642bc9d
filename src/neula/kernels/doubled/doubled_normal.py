"""Residual and gradient of a least-squares problem in twice the working precision, in one pass over A.

``8 m n`` bytes, and some 25 operations an element: an H200 does twenty in the time that memory takes for it.
A thread block goes through every so many blocks of whole rows, kept in registers; each thread sums what its
elements contribute to the gradient, and rounding errors. Partial sums are added at the end in a fixed order.
"""

from __future__ import annotations

import torch

from neula.kernels.core import core, empty
from neula.kernels.dispatch import kernel, trial
from neula.kernels.doubled.doubled import (
    Doubled,
    Pair,
    as_complex,
    as_real,
    doubled_product,
    of_adjoint,
    real_vectors,
)
from neula.kernels.doubled.doubled import two_sum as renormalized
from neula.kernels.doubled.doubled_triton import add_pairs, product_error, two_sum
from neula.kernels.few_vectors.normal_product import ONE_WARP, ROWS, fits
from neula.kernels.few_vectors.one_pass_host import EACH
from neula.kernels.launch import ceil_div, multiprocessors, next_power_of_2
from neula.kernels.triton_source import jit, tl

# 1000000 rows of 200 columns take 0.72 ms on an H200, and 1.7 ms by two doubled products.
COLUMNS = 2048
"""Up to how many columns rows fit in the registers of a multiprocessor, with sums and their errors."""


@trial("The kernel of doubled gradients", "A is read twice in its place")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, device=device, dtype=torch.float64)
    doubled_normal.kernel(one, one, one, one)


def _in_one_pass(a: torch.Tensor, x: torch.Tensor, x_low: torch.Tensor, b: torch.Tensor) -> bool:
    m, n = a.shape
    return m >= max(n, ROWS) and fits(n) and n <= COLUMNS and x.shape[1] == 1 and a.stride(1) == 1


@kernel("doubled_normal_triton", trial=_tried, when=_in_one_pass)
def doubled_normal(
    a: torch.Tensor, x: torch.Tensor, x_low: torch.Tensor | None, b: torch.Tensor
) -> tuple[Pair, Pair]:
    """``r = b - A (x + x_low)`` and ``A^H r``, each as a sum of two numbers, for A (m, n) in double
    precision.

    On a CPU the compiled core takes a tenth of the time of sliced products.
    """
    if a.is_complex():
        beside = None if x_low is None else real_vectors(x_low)
        (r, rest), of_r = doubled_normal(as_real(a), real_vectors(x), beside, as_real(b))
        return (as_complex(r), as_complex(rest)), renormalized(*of_adjoint(*of_r))
    if a.is_cpu and a.numel() and core() is not None:
        return _by_core(a, x, x_low, b)
    doubled = Doubled.from_matrix(a[None])
    high, low = doubled.residual(x[None], b[None], None if x_low is None else x_low[None])
    gradient, rest = doubled.transposed_pair(high, low)
    return (high[0], low[0]), (gradient[0], rest[0])


def _by_core(
    a: torch.Tensor, x: torch.Tensor, x_low: torch.Tensor | None, b: torch.Tensor
) -> tuple[Pair, Pair]:
    compiled, (m, n), k = core(), a.shape, x.shape[1]
    assert compiled is not None
    residual, gradient = empty(2, k, m), empty(2, k, n)
    low = None if x_low is None else x_low.mT.contiguous().numpy()
    threads = min(torch.get_num_threads(), a.numel() // EACH) or 1
    right = b.mT.contiguous().numpy()
    written = residual.numpy(), gradient.numpy()
    compiled.doubled_normal(a.numpy(), x.mT.contiguous().numpy(), low, right, *written, threads)
    return (residual[0].mT, residual[1].mT), (gradient[0].mT, gradient[1].mT)


def config(width: int) -> tuple[int, int, int, int]:
    """Elements of A at a time, warps, loads in flight, and thread blocks for each multiprocessor.

    Several thread blocks hide one another's waits for sums of rows: 262144 rows of 1024 columns take 0.78 ms
    on an H200, and 0.98 by one of 8 warps. One warp needs no such waits, where rows fit in its registers:
    1000000 rows of 200 columns take 0.72 ms, and 3.3.
    """
    if width <= ONE_WARP:
        return 512, 1, 4, 16
    return (2048, 4, 3, 3) if width == 1024 else (4096, 8, 3, 1)


def doubled_normal_triton(a, x, x_low, b, *, given=None):
    m, n = a.shape
    width = max(32, next_power_of_2(n))
    tile, warps, stages, blocks = given or config(width)
    rows = max(1, tile // width)
    programs = min(blocks * multiprocessors(a.device), ceil_div(m, rows))
    residual = torch.empty(2, m, 1, dtype=a.dtype, device=a.device)
    sums = torch.empty(2, programs, n, dtype=a.dtype, device=a.device)
    # Contracted to a multiply-add, a sum that is to be made of rounded products has another rounding error.
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
