"""Sums of matrix units, emulated on a GPU: products stay in registers, where plain torch stores each one.

A thread block has a tile of C and goes through the products that are added at a time: twice where they are
truncated, first for the largest exponent, then for the sum.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from neula.kernels.launch import ceil_div
from neula.kernels.products.block_fma import SMALLEST
from neula.kernels.triton_source import jit, tl

ROWS, COLUMNS, WARPS = 32, 64, 4
"""Tile of a thread block: 16 elements a thread, whose sums take 100 of its registers."""

DROPPED = {torch.float16: 0, torch.bfloat16: 16, torch.float32: 13}
"""Bits of fp32 that rounding to a format drops; fp16, which has fewer exponents, is a conversion."""


def truncated_sums_triton(
    a: torch.Tensor, b: torch.Tensor, block: int, ulp: float, min_exponent: int
) -> torch.Tensor:
    """:func:`neula.kernels.products.block_fma.truncated_sums` by the kernel."""
    start = a.new_zeros((*a.shape[:-1], b.shape[-1]), dtype=torch.float64)
    return _launch(_truncated, start, a, b, block, ulp, 2.0**min_exponent, SMALLEST[a.dtype])


def narrowed_sums_triton(
    start: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    block: int,
    dtype: torch.dtype,
    narrow: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """:func:`neula.kernels.products.block_fma.narrowed_sums` by the kernel, which rounds by itself."""
    return _launch(_narrowed, start.to(torch.float64, copy=True), a, b, block, DROPPED[dtype])


def _launch(
    run: Any, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, block: int, *options: float
) -> torch.Tensor:
    """Run a kernel on each matrix of a batch; C in float64 is overwritten."""
    (*_, m, n), k = c.shape, a.shape[-1]
    if not c.numel() * k:
        return c
    total = c.contiguous()
    many, x, y = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (total, a, b))
    grid = (ceil_div(m, ROWS), ceil_div(n, COLUMNS), len(many))
    with torch.cuda.device_of(c):
        strides = (*x.stride(), *y.stride())
        run[grid](x, y, many, m, n, k, block, *strides, *options, ROWS, COLUMNS, num_warps=WARPS)
    return total


@jit
def _powers(x, LEAST: tl.constexpr):
    """Largest power of two in each number, at least that of the smallest exponent; 0 for 0."""
    if x.dtype == tl.float64:
        power = (x.to(tl.int64, bitcast=True) & 0x7FF0000000000000).to(tl.float64, bitcast=True)
    else:
        power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(x == 0.0, 0.0, tl.maximum(power, LEAST))


@jit
def _whole(x):
    """The integer part, toward zero, which is below ``2^31`` for single precision."""
    if x.dtype == tl.float64:
        return x.to(tl.int64)
    return x.to(tl.int32).to(tl.int64)


@jit(do_not_specialize=["m", "n", "k", "block"])
def _truncated(
    a, b, c, m, n, k, block,
    a_batch, a_row, a_column, b_batch, b_row, b_column,
    ULP: tl.constexpr, LEAST: tl.constexpr, SMALLEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Align the products of a block and the sum, add what is left of them, truncate."""
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    j = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    left, right = a + batch * a_batch + i * a_row, b + batch * b_batch + j * b_column
    total = tl.zeros((ROWS, COLUMNS), tl.float64)
    for first in range(0, k, block):
        last = tl.minimum(first + block, k)
        largest = tl.zeros((ROWS, COLUMNS), a.dtype.element_ty)
        for term in range(first, last):
            x = _powers(tl.load(left + term * a_column, mask=i < m, other=0.0), LEAST)
            y = _powers(tl.load(right + term * b_row, mask=j < n, other=0.0), LEAST)
            largest = tl.maximum(largest, x[:, None] * y[None, :])
        power = (total.to(tl.int64, bitcast=True) & 0x7FF0000000000000).to(tl.float64, bitcast=True)
        quantum = tl.maximum(tl.maximum(largest.to(tl.float64), power) * ULP, SMALLEST)
        # 2^-e of 2^e, by its bits: a division takes longer than a block of products.
        inverse = (0x7FE0000000000000 - quantum.to(tl.int64, bitcast=True)).to(tl.float64, bitcast=True)
        scale = inverse.to(a.dtype.element_ty)
        whole = _whole(total * inverse)
        for term in range(first, last):
            x = tl.load(left + term * a_column, mask=i < m, other=0.0)
            y = tl.load(right + term * b_row, mask=j < n, other=0.0)
            whole += _whole(x[:, None] * y[None, :] * scale)
        total = whole.to(tl.float64) * quantum
        total = (total.to(tl.int64, bitcast=True) & -536870912).to(tl.float64, bitcast=True)
    place = c + (batch * m + i[:, None]) * n + j[None, :]
    tl.store(place, total, mask=(i < m)[:, None] & (j < n)[None, :])


@jit(do_not_specialize=["m", "n", "k", "block"])
def _narrowed(
    a, b, c, m, n, k, block,
    a_batch, a_row, a_column, b_batch, b_row, b_column, DROPPED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the products of a block to the sum in double precision, and round it to the format."""
    i = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    j = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    left, right = a + batch * a_batch + i * a_row, b + batch * b_batch + j * b_column
    place = c + (batch * m + i[:, None]) * n + j[None, :]
    inside = (i < m)[:, None] & (j < n)[None, :]
    total = tl.load(place, mask=inside, other=0.0)
    for first in range(0, k, block):
        part = tl.zeros((ROWS, COLUMNS), tl.float64)
        for term in range(first, tl.minimum(first + block, k)):
            x = tl.load(left + term * a_column, mask=i < m, other=0.0).to(tl.float64)
            y = tl.load(right + term * b_row, mask=j < n, other=0.0).to(tl.float64)
            part += x[:, None] * y[None, :]
        total = _rounded(total + part, DROPPED)
    tl.store(place, total, mask=inside)


@jit
def _rounded(x, DROPPED: tl.constexpr):
    """To nearest, by way of fp32 rounded to odd: :func:`neula.engines.formats.round_to`."""
    nearest = x.to(tl.float32)
    bits = nearest.to(tl.int32, bitcast=True) - (tl.abs(nearest.to(tl.float64)) > tl.abs(x)).to(tl.int32)
    bits = bits | (bits.to(tl.float32, bitcast=True).to(tl.float64) != x).to(tl.int32)
    odd = bits.to(tl.float32, bitcast=True)
    if DROPPED == 0:
        rounded = odd.to(tl.float16).to(tl.float32)
    else:
        half = (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)
        rounded = ((bits + half) & -(1 << DROPPED)).to(tl.float32, bitcast=True)
    # Infinite numbers and NaN stay what they are.
    return tl.where(tl.abs(nearest) < float("inf"), rounded.to(tl.float64), nearest.to(tl.float64))
