"""Copies from row-major to column-major order, converted and scaled on the way.

``m n`` elements are read and written once, in tiles that go through the chip: both sides touch whole lines
of memory.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from neula.kernels.launch import ceil_div
from neula.kernels.triton_source import jit, tl

TILE, WARPS = 64, 4


def transposed_copy_triton(
    out: torch.Tensor, a: torch.Tensor, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """:func:`neula.kernels.transposed_copy.transposed_copy` by the kernel, queued on the current stream."""
    m, n = a.shape
    grid = (ceil_div(m, TILE) * ceil_div(n, TILE),)
    with torch.cuda.device_of(a):
        _copy_kernel[grid](
            *(a, a if scales is None else scales, out, m, n, *a.stride(), *out.stride()),
            *(scales is not None, TILE),
            num_warps=WARPS,
        )
    return out


def transpose_in_place_triton(a: torch.Tensor) -> torch.Tensor:
    """:func:`neula.kernels.transposed_copy.transpose_in_place` by the kernel, on the current stream."""
    tiles = ceil_div(len(a), TILE)
    with torch.cuda.device_of(a):
        _exchange_kernel[(tiles, tiles)](a, len(a), *a.stride(), TILE, num_warps=WARPS)
    return a.T


@jit
def _exchange_kernel(a, n, a_row, a_column, TILE: tl.constexpr):
    """A tile above the diagonal, or on it, and the one that it is exchanged with."""
    if tl.program_id(0) <= tl.program_id(1):
        i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        j = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
        above = a + i[:, None] * a_row + j[None, :] * a_column
        below = a + j[:, None] * a_row + i[None, :] * a_column
        inside = (i < n)[:, None] & (j < n)[None, :]
        outside = (j < n)[:, None] & (i < n)[None, :]
        x, y = tl.load(above, mask=inside), tl.load(below, mask=outside)
        # A barrier: all threads have read what is overwritten now.
        tl.debug_barrier()
        tl.store(below, tl.trans(x), mask=outside)
        tl.store(above, tl.trans(y), mask=inside)


@jit
def _copy_kernel(
    a, scales, out, m, n, a_row, a_column, out_row, out_column,
    SCALED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(n, TILE)
    i = (tl.program_id(0) // tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    j = (tl.program_id(0) % tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (i < m)[:, None] & (j < n)[None, :]
    x = tl.load(a + i[:, None] * a_row + j[None, :] * a_column, mask=inside, other=0.0)
    if SCALED:
        x = x * tl.load(scales + j, mask=j < n, other=0.0)[None, :]
    if out.dtype.element_ty.primitive_bitwidth == 16:
        # As torch does: not every GPU converts float64 to half precision at once.
        x = x.to(tl.float32)
    tl.store(out + i[:, None] * out_row + j[None, :] * out_column, x.to(out.dtype.element_ty), mask=inside)
