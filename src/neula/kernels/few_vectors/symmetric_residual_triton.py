"""Kernels of :mod:`neula.kernels.few_vectors.symmetric_residual`.

The products are ``triangle_triton``'s. What the library takes a dozen launches for before
and after them, each longer than the bytes, are two.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from neula.kernels.few_vectors.symmetric_residual import images
from neula.kernels.few_vectors.triangle import VECTORS
from neula.kernels.launch import ceil_div, next_power_of_2
from neula.kernels.triton_source import jit, tl

SPAN = 1024
"""Diagonal elements, and rows of products, that a thread block has at a time."""


def diagonal_scales_triton(a: torch.Tensor) -> torch.Tensor:
    """:func:`neula.kernels.few_vectors.symmetric_residual.diagonal_scales` by the kernel."""
    count, n, _ = a.shape
    scales = torch.empty(count, n, dtype=torch.float64, device=a.device)
    span = min(SPAN, next_power_of_2(n))
    with torch.cuda.device_of(a):
        _scales_kernel[(count * ceil_div(n, span),)](
            a, a.stride(0), a.stride(1) + a.stride(2), scales, n, span
        )
    return scales


def factor_residuals_triton(
    a: torch.Tensor, lower: torch.Tensor, order: torch.Tensor, probes: torch.Tensor
) -> torch.Tensor:
    """:func:`neula.kernels.few_vectors.symmetric_residual.factor_residuals` by the kernels."""
    count, n, _ = a.shape
    found = torch.empty(2, count, dtype=torch.float64, device=a.device)
    scales = diagonal_scales_triton(a)
    image, product = images(a, lower, probes * scales[..., None])
    span = min(SPAN, next_power_of_2(n))
    with torch.cuda.device_of(a):
        _norms_kernel[(count,)](
            *(image, *image.stride(), product, *product.stride(), scales, order, found, n, count),
            *(VECTORS, span),
            num_warps=max(1, span // 128),
        )
    return found


@jit(do_not_specialize=["n", "a_batch", "apart"])
def _scales_kernel(a, a_batch, apart, scales, n, SPAN: tl.constexpr):
    parts = tl.cdiv(n, SPAN)
    member = (tl.program_id(0) // parts).to(tl.int64)
    i = tl.program_id(0) % parts * SPAN + tl.arange(0, SPAN)
    x = tl.load(a + member * a_batch + i.to(tl.int64) * apart, mask=i < n, other=1.0).to(tl.float64)
    # Of what is not double precision no number is subnormal in it: 2^e times one in [1/2, 1).
    exponent = ((x.to(tl.int64, bitcast=True) >> 52) & 0x7FF) - 1022
    scale = ((1023 - (exponent >> 1)) << 52).to(tl.float64, bitcast=True)
    tl.store(scales + member * n + i, tl.where(x > 0, scale, 1.0), mask=i < n)


@jit(do_not_specialize=["n", "count"])
def _norms_kernel(
    image, i_batch, i_row, i_column, product, p_batch, p_row, p_column, scales, order, found, n, count,
    VECTORS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Norm of the difference of the products of one matrix, with scaled rows."""
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
    size = tl.sqrt(tl.sum(whole))
    residual = tl.sqrt(tl.sum(lost)) / tl.where(size == 0, 1.0, size)
    which = tl.load(order + member)
    tl.store(found + member, tl.where(which == 0, residual, float("nan")))
    tl.store(found + count + member, which.to(tl.float64))
