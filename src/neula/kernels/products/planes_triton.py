"""Between complex matrices and planes of real numbers: every element is read and written once.

A tile of a complex matrix is twice as wide in memory; it is split and joined in registers, so that all
accesses are to consecutive elements.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from neula.kernels.launch import ceil_div
from neula.kernels.products.planes import room_for_planes
from neula.kernels.triton_source import jit, tl

TILE = (8, 256)
"""Complex elements that a thread block has: rows, and consecutive ones."""


def planes_triton(x: torch.Tensor, dtype: torch.dtype, *, conjugated: bool = False) -> torch.Tensor:
    """:func:`neula.kernels.products.planes.planes` by the kernel, queued on the current stream."""
    out = room_for_planes(x, dtype)
    _launch(_planes_kernel, x, out, -1.0 if conjugated else 1.0)
    return out


def interleave_triton(products: torch.Tensor, c: torch.Tensor, alpha: float, beta: float) -> None:
    """:func:`neula.kernels.products.planes.interleave` by the kernel, queued on the current stream."""
    _launch(_interleave_kernel, c, products, alpha, beta, adds=beta != 0.0)


def planes_of_product_triton(
    products: torch.Tensor, factor: float, shift: float, scales: torch.Tensor | None
) -> torch.Tensor:
    """:func:`neula.kernels.products.planes.planes_of_product` by the kernel, queued on the current stream."""
    _, batch, m, n = products.shape
    down, across = ceil_div(m, TILE[0]), ceil_div(n, TILE[1])
    with torch.cuda.device_of(products):
        _planes_of_product_kernel[(batch * down * across,)](
            *(products, products if scales is None else scales.contiguous(), factor, shift),
            *(m, n, down, across, *products.stride()[:3], scales is not None, *TILE),
        )
    return products


def _launch(kernel, x, planes, *factors: float, **constants: bool) -> None:
    """For each tile, in the order of the complex matrices."""
    if x.stride(2) != 2:
        x, planes = x.transpose(1, 2), planes.mT
    batch, m, n, _ = x.shape
    down, across = ceil_div(m, TILE[0]), ceil_div(n, TILE[1])
    with torch.cuda.device_of(x):
        kernel[(batch * down * across,)](
            *(x, planes, *factors, m, n, down, across),
            *(*x.stride()[:2], *planes.stride(), *constants.values(), *TILE),
        )


@jit(do_not_specialize=["m", "down", "across"])
def _planes_kernel(
    x, out, sign, m, n, down, across, x_batch, x_row, plane, batch_stride, row, column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    batch, i, j, inside = _place(m, n, down, across, ROWS, COLUMNS)
    wide, within = _place_of_pairs(m, n, down, across, ROWS, COLUMNS)
    pairs = tl.load(x + batch * x_batch + i * x_row + wide, mask=within, other=0.0)
    first, second = tl.split(pairs.reshape(ROWS, COLUMNS, 2))
    second = second * sign
    target = out + batch * batch_stride + i * row + j * column
    tl.store(target, first.to(out.dtype.element_ty), mask=inside)
    tl.store(target + plane, second.to(out.dtype.element_ty), mask=inside)
    tl.store(target + 2 * plane, (first + second).to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["m", "down", "across"])
def _interleave_kernel(
    c, products, alpha: tl.float64, beta: tl.float64, m, n, down, across, c_batch, c_row, plane, batch_stride,
    row, column, ADDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    batch, i, j, inside = _place(m, n, down, across, ROWS, COLUMNS)
    source = products + batch * batch_stride + i * row + j * column
    p = tl.load(source, mask=inside, other=0.0)
    q = tl.load(source + plane, mask=inside, other=0.0)
    s = tl.load(source + 2 * plane, mask=inside, other=0.0)
    wide, within = _place_of_pairs(m, n, down, across, ROWS, COLUMNS)
    pairs = tl.join(p - q, s - p - q).reshape(ROWS, 2 * COLUMNS) * alpha
    target = c + batch * c_batch + i * c_row + wide
    if ADDS:
        pairs += beta * tl.load(target, mask=within, other=0.0)
    tl.store(target, pairs, mask=within)


@jit(do_not_specialize=["m", "down", "across"])
def _planes_of_product_kernel(
    products, scales, factor: tl.float64, shift: tl.float64, m, n, down, across, plane, batch_stride, row,
    SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    batch, i, j, inside = _place(m, n, down, across, ROWS, COLUMNS)
    place = products + batch * batch_stride + i * row + j
    p = tl.load(place, mask=inside, other=0.0)
    q = tl.load(place + plane, mask=inside, other=0.0)
    s = tl.load(place + 2 * plane, mask=inside, other=0.0)
    real, imaginary = (p - q) * factor, (s - p - q) * factor
    real += tl.where(i == j, shift, 0.0).to(real.dtype)
    if SCALED:
        scale = tl.load(scales + batch)
        real, imaginary = real * scale, imaginary * scale
    tl.store(place, real, mask=inside)
    tl.store(place + plane, imaginary, mask=inside)
    tl.store(place + 2 * plane, real + imaginary, mask=inside)


@jit
def _place(m, n, down, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Which matrix this thread block has, rows and columns of its tile, and which of them there are."""
    batch, tile = (tl.program_id(0) // (down * across)).to(tl.int64), tl.program_id(0) % (down * across)
    i = ((tile // across) * ROWS + tl.arange(0, ROWS))[:, None]
    j = ((tile % across) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    return batch, i.to(tl.int64), j.to(tl.int64), (i < m) & (j < n)


@jit
def _place_of_pairs(m, n, down, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns of its tile in memory, where each element is a pair."""
    tile = tl.program_id(0) % (down * across)
    i = ((tile // across) * ROWS + tl.arange(0, ROWS))[:, None]
    j = ((tile % across) * 2 * COLUMNS + tl.arange(0, 2 * COLUMNS))[None, :]
    return j.to(tl.int64), (i < m) & (j < 2 * n)
