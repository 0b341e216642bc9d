"""Copies from row-major to column-major order, converted and scaled on the way: users have the one,
factorizations work in the other.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import ceil_div
from neula.kernels.triton_source import jit, tl

SMALLEST = 1 << 16
"""Elements below which the library's copy takes no longer than a launch."""


@trial("The kernels of transposed copies", "the library's take three times as long")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, device=device, dtype=torch.float64)
    transposed_copy.kernel(one.half(), one, one[0])
    transpose_in_place.kernel(one)


def _changes_the_order(out: torch.Tensor, a: torch.Tensor, scales: torch.Tensor | None = None) -> bool:
    """Or scales columns, or widens numbers, in a matrix on a GPU that is large enough."""
    transposed = a.ndim == 2 and a.stride(0) > a.stride(1) and out.stride(0) < out.stride(1)
    widened = a.ndim == 2 and a.itemsize < out.itemsize
    return (transposed or widened or scales is not None) and a.is_cuda and a.numel() >= SMALLEST


@kernel("transposed_copy_triton", trial=_tried, when=_changes_the_order)
def transposed_copy(out: torch.Tensor, a: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """``out = a diag(scales)`` in the dtype of ``out``, which may be ``a``, on a GPU by a Triton kernel.

    Unless neither the order changes, nor columns are scaled or numbers widened, what the library does at full
    speed. Products are rounded to the wider of the dtypes of ``scales`` and ``a``, then to that of ``out``.
    """
    return out.copy_(a) if scales is None else torch.mul(a, scales, out=out)


@kernel("transpose_in_place_triton", trial=_tried)
def transpose_in_place(a: torch.Tensor) -> torch.Tensor:
    """Exchange ``a[i, j]`` and ``a[j, i]``: from column-major to row-major order, and back; returns ``a.T``,
    the former ``a``.
    """
    a.copy_(a.T.clone())
    return a.T


TILE, WARPS = 64, 4


def transposed_copy_triton(out, a, scales=None):
    m, n = a.shape
    grid = (ceil_div(m, TILE) * ceil_div(n, TILE),)
    _copy_kernel[grid](
        *(a, a if scales is None else scales, out, m, n, *a.stride(), *out.stride()),
        *(scales is not None, TILE),
        num_warps=WARPS,
    )
    return out


def transpose_in_place_triton(a):
    tiles = ceil_div(len(a), TILE)
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
