"""Kernels of :mod:`neula.kernels.symmetric_residual`.

Small matrices are measured by a thread block each, which reads L twice and A once, from the cache: a launch
takes longer than the bytes do. Of larger ones the products are :mod:`neula.kernels.triangle_triton`'s, and
their norms one launch.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from neula.kernels.symmetric_residual import SMALL, images
from neula.kernels.triangle import VECTORS

ROWS = 16
"""Of a small matrix that a thread block has at a time."""

SPAN = 1024
"""Diagonal elements, and rows of products, that a thread block has at a time."""


def diagonal_scales_triton(a: torch.Tensor) -> torch.Tensor:
    """:func:`neula.kernels.symmetric_residual.diagonal_scales` by the kernel."""
    count, n, _ = a.shape
    scales = torch.empty(count, n, dtype=torch.float64, device=a.device)
    span = min(SPAN, triton.next_power_of_2(n))
    with torch.cuda.device_of(a):
        _scales_kernel[(count * triton.cdiv(n, span),)](
            a, a.stride(0), a.stride(1) + a.stride(2), scales, n, span
        )
    return scales


def factor_residuals_triton(
    a: torch.Tensor, lower: torch.Tensor, order: torch.Tensor, probes: torch.Tensor
) -> torch.Tensor:
    """:func:`neula.kernels.symmetric_residual.factor_residuals` by the kernels."""
    count, n, _ = a.shape
    found = torch.empty(2, count, dtype=torch.float64, device=a.device)
    probes = probes.expand(n, VECTORS).contiguous()
    if n <= SMALL:
        block = max(16, triton.next_power_of_2(n))
        with torch.cuda.device_of(a):
            _small_kernel[(count,)](
                *(a, *a.stride(), lower, *lower.stride(), probes, order, found, n, count),
                *(VECTORS, ROWS, block),
                num_warps=4 if block > 32 else 1,
            )
        return found
    scales = diagonal_scales_triton(a)
    image, product = images(a, lower, probes * scales[..., None])
    with torch.cuda.device_of(a):
        _norms_kernel[(count,)](
            *(image, *image.stride(), product, *product.stride(), scales, order, found, n, count),
            *(VECTORS, SPAN),
            num_warps=8,
        )
    return found


@triton.jit(do_not_specialize=["n", "a_batch", "apart"])
def _scales_kernel(a, a_batch, apart, scales, n, SPAN: tl.constexpr):
    parts = tl.cdiv(n, SPAN)
    member = (tl.program_id(0) // parts).to(tl.int64)
    i = tl.program_id(0) % parts * SPAN + tl.arange(0, SPAN)
    tl.store(scales + member * n + i, _scales(a + member * a_batch, apart, i, n), mask=i < n)


@triton.jit
def _scales(a, apart, i, n):
    """Of some rows, by their diagonal elements; of others 1."""
    x = tl.load(a + i.to(tl.int64) * apart, mask=i < n, other=1.0).to(tl.float64)
    # Of what is not double precision no number is subnormal in it: 2^e times one in [1/2, 1).
    exponent = ((x.to(tl.int64, bitcast=True) >> 52) & 0x7FF) - 1022
    scale = ((1023 - (exponent >> 1)) << 52).to(tl.float64, bitcast=True)
    return tl.where(x > 0, scale, 1.0)


@triton.jit
def _put(found, order, member, count, lost, whole):
    """What is said of a matrix."""
    which = tl.load(order + member)
    residual = tl.sqrt(lost) / tl.where(whole == 0, 1.0, tl.sqrt(whole))
    tl.store(found + member, tl.where(which == 0, residual, float("nan")))
    tl.store(found + count + member, which.to(tl.float64))


@triton.jit(do_not_specialize=["n", "count", "a_batch", "l_batch"])
def _small_kernel(
    a, a_batch, a_row, a_column, lower, l_batch, l_row, l_column, probes, order, found, n, count,
    VECTORS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The residual of one matrix."""
    member = tl.program_id(0).to(tl.int64)
    a += member * a_batch
    lower += member * l_batch
    j = tl.arange(0, BLOCK)
    d = _scales(a, a_row + a_column, j, n)
    lost = tl.zeros((ROWS,), tl.float64)
    whole = tl.zeros((ROWS,), tl.float64)
    for vector in range(VECTORS):  # not unrolled, which would take the compiler four times as long
        x = d * tl.load(probes + j * VECTORS + vector, mask=j < n, other=0.0)
        below = tl.zeros((BLOCK,), tl.float64)
        for first in range(0, n, ROWS):
            i = first + tl.arange(0, ROWS)
            xi = _scales(a, a_row + a_column, i, n)
            xi *= tl.load(probes + i * VECTORS + vector, mask=i < n, other=0.0)
            inside = (i[:, None] < n) & (j[None, :] <= i[:, None])
            place = lower + i[:, None] * l_row + j[None, :] * l_column
            below += tl.sum(tl.load(place, mask=inside, other=0.0).to(tl.float64) * xi[:, None], axis=0)
        for first in range(0, n, ROWS):
            i = first + tl.arange(0, ROWS)
            di = _scales(a, a_row + a_column, i, n)
            inside = (i[:, None] < n) & (j[None, :] <= i[:, None])
            place = lower + i[:, None] * l_row + j[None, :] * l_column
            t = tl.load(place, mask=inside, other=0.0).to(tl.float64)
            row, column = tl.maximum(i[:, None], j[None, :]), tl.minimum(i[:, None], j[None, :])
            place = a + row * a_row + column * a_column
            s = tl.load(place, mask=(i[:, None] < n) & (j[None, :] < n), other=0.0).to(tl.float64)
            image = di * tl.sum(s * x[None, :], axis=1)
            product = di * tl.sum(t * below[None, :], axis=1)
            lost += (image - product) * (image - product)
            whole += image * image
    _put(found, order, member, count, tl.sum(lost), tl.sum(whole))


@triton.jit(do_not_specialize=["n", "count"])
def _norms_kernel(
    image, i_batch, i_row, i_column, product, p_batch, p_row, p_column, scales, order, found, n, count,
    VECTORS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """By what products of one matrix differ, rows scaled."""
    member = tl.program_id(0).to(tl.int64)
    image += member * i_batch
    product += member * p_batch
    lost = tl.zeros((SPAN,), tl.float64)
    whole = tl.zeros((SPAN,), tl.float64)
    for first in range(0, n, SPAN):
        i = first + tl.arange(0, SPAN)
        d = tl.load(scales + member * n + i, mask=i < n, other=0.0)
        for vector in tl.static_range(VECTORS):
            x = d * tl.load(image + i * i_row + vector * i_column, mask=i < n, other=0.0)
            y = d * tl.load(product + i * p_row + vector * p_column, mask=i < n, other=0.0)
            lost += (x - y) * (x - y)
            whole += x * x
    _put(found, order, member, count, tl.sum(lost), tl.sum(whole))
