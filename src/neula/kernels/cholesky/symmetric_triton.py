"""The copies of ``symmetric`` in one launch each: a number is written once, and read twice
at most.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from neula.kernels.cholesky.symmetric import room_for, triangle_room
from neula.kernels.launch import ceil_div
from neula.kernels.triton_source import jit, tl

TILE = 32


def symmetric_copy_triton(
    a: torch.Tensor, scales: torch.Tensor, *, rows: int = 0, whole: bool = True
) -> torch.Tensor:
    """:func:`neula.kernels.cholesky.symmetric.symmetric_copy` by the kernel, queued on the current stream."""
    out, scales = room_for(a, rows), scales.contiguous()
    count, n, _ = a.shape
    across = ceil_div(n, TILE)
    with torch.cuda.device_of(a):
        # The second and third index of a grid end at 65535.
        _symmetric_kernel[(count * across * across,)](
            a, scales, out, n, across, *a.stride(), out.stride(0), out.stride(2), TILE, whole
        )
    return out


def unscaled_triangle_triton(t: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``symmetric.unscaled_triangle`` by the kernel, queued on the current stream."""
    out, scales = triangle_room(t, dtype), scales.contiguous()
    count, n, _ = t.shape
    across = ceil_div(n, TILE)
    with torch.cuda.device_of(t):
        _triangle_kernel[(count * across * across,)](
            t, scales, out, n, across, *t.stride(), *out.stride(), TILE
        )
    return out


@jit(do_not_specialize=["n", "across", "a_0", "a_1", "a_2", "out_0", "out_2"])
def _symmetric_kernel(
    a, scales, out, n, across, a_0, a_1, a_2, out_0, out_2, TILE: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0)
    tile = place % (across * across)
    if not WHOLE:  # noqa: SIM102  (known when it is compiled, unlike the next)
        if tile % across < tile // across:
            return
    batch = (place // (across * across)).to(tl.int64)
    i = (tile % across) * TILE + tl.arange(0, TILE)[:, None]
    j = (tile // across) * TILE + tl.arange(0, TILE)[None, :]
    inside = (i < n) & (j < n)
    row, column = tl.maximum(i, j).to(tl.int64), tl.minimum(i, j).to(tl.int64)
    x = tl.load(a + batch * a_0 + row * a_1 + column * a_2, mask=inside, other=0.0)
    x = x.to(out.dtype.element_ty)
    x = x * tl.load(scales + batch * n + i, mask=i < n, other=0.0)
    x = x * tl.load(scales + batch * n + j, mask=j < n, other=0.0)
    tl.store(out + batch * out_0 + i + j.to(tl.int64) * out_2, x, mask=inside)


@jit(do_not_specialize=["n", "across", "t_0", "out_0"])
def _triangle_kernel(
    t, scales, out, n, across, t_0, t_1, t_2, out_0, out_1, out_2, TILE: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0)
    tile = place % (across * across)
    batch = (place // (across * across)).to(tl.int64)
    i = (tile % across) * TILE + tl.arange(0, TILE)[:, None]
    j = (tile // across) * TILE + tl.arange(0, TILE)[None, :]
    inside = (i < n) & (j < n)
    i_wide, j_wide = i.to(tl.int64), j.to(tl.int64)
    x = tl.load(t + batch * t_0 + i_wide * t_1 + j_wide * t_2, mask=inside & (j <= i), other=0.0)
    scale = tl.load(scales + batch * n + i, mask=i < n, other=1.0)
    x = (x.to(scales.dtype.element_ty) / scale).to(out.dtype.element_ty)
    tl.store(out + batch * out_0 + i_wide * out_1 + j_wide * out_2, x, mask=inside)
