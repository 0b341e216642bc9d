"""Numbers in one part or two of half precision, scaled on the way, in one pass over memory."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from neula.kernels.launch import ceil_div
from neula.kernels.polar.batched_product import SHIFT, room
from neula.kernels.triton_source import jit, tl

TILE = 64


def split_triton(
    x: torch.Tensor,
    dtype: torch.dtype,
    parts: int = 1,
    scales: torch.Tensor | None = None,
    factor: float = 1.0,
) -> torch.Tensor:
    """:func:`neula.kernels.polar.batched_product.split` by the kernel, queued on the current stream."""
    batch, m, n = x.shape
    out = room(parts, batch, m, n, dtype=dtype, device=x.device)
    down, across = ceil_div(m, TILE), ceil_div(n, TILE)
    with torch.cuda.device_of(x):
        # The second and third index of a grid end at 65535.
        _split_kernel[(batch * down * across,)](
            *(x, x if scales is None else scales, out, factor, m, n, down, across),
            *(*x.stride(), *out.stride()[:3], SHIFT, parts, scales is not None, x.dtype == torch.float64),
            TILE,
        )
    return out


def joined_triton(parts: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """:func:`neula.kernels.polar.batched_product.joined` of two parts by the kernel, likewise."""
    _, batch, m, n = parts.shape
    out = torch.empty(batch, m, n, dtype=dtype, device=parts.device)
    down, across = ceil_div(m, TILE), ceil_div(n, TILE)
    with torch.cuda.device_of(parts):
        _joined_kernel[(batch * down * across,)](parts, out, m, n, down, across, *parts.stride(), SHIFT, TILE)
    return out


@jit(do_not_specialize=["m", "n", "down", "across", "x_batch", "out_part", "out_batch", "out_row"])
def _split_kernel(
    x, scales, out, factor, m, n, down, across, x_batch, x_row, x_column, out_part, out_batch, out_row,
    SHIFT: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr, DOUBLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    tile = place % (down * across)
    batch = (place // (down * across)).to(tl.int64)
    i = (tile // across) * TILE + tl.arange(0, TILE)[:, None]
    j = (tile % across) * TILE + tl.arange(0, TILE)[None, :]
    inside = (i < m) & (j < n)
    i, j = i.to(tl.int64), j.to(tl.int64)
    value = tl.load(x + batch * x_batch + i * x_row + j * x_column, mask=inside, other=0.0)
    value = value.to(tl.float64 if DOUBLE else tl.float32)
    if SCALED:
        # One factor after the other: together they may be out of range.
        value = value * tl.load(scales + batch) * factor
    value = value.to(tl.float32)
    first = value.to(out.dtype.element_ty)
    target = out + batch * out_batch + i * out_row + j
    tl.store(target, first, mask=inside)
    if PARTS == 2:
        rest = ((value - first.to(tl.float32)) * (1 << SHIFT)).to(first.dtype)
        tl.store(target + out_part, rest, mask=inside)


@jit(do_not_specialize=["m", "n", "down", "across", "part", "batch_step"])
def _joined_kernel(
    parts, out, m, n, down, across, part, batch_step, row, column, SHIFT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0)
    tile = place % (down * across)
    batch = (place // (down * across)).to(tl.int64)
    i = (tile // across) * TILE + tl.arange(0, TILE)[:, None]
    j = (tile % across) * TILE + tl.arange(0, TILE)[None, :]
    inside = (i < m) & (j < n)
    i, j = i.to(tl.int64), j.to(tl.int64)
    source = parts + batch * batch_step + i * row + j * column
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    rest = tl.load(source + part, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + (batch * m + i) * n + j, first + rest * (1.0 / (1 << SHIFT)), mask=inside)
