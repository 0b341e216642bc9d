"""The kernels of :mod:`neula.kernels.spectra.correction`: what is read is read once."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from neula.kernels.launch import ceil_div
from neula.kernels.triton_source import jit, tl


def turned_triton(x: torch.Tensor, turns: torch.Tensor, offset: int, tile: int = 64) -> torch.Tensor:
    """``correction.turned`` by the kernel, queued on the current stream."""
    count, m, n = x.shape
    blocks, width = turns.shape[1:3]
    out, turns, down = x.new_empty(x.shape), turns.contiguous(), ceil_div(m, tile)
    with torch.cuda.device_of(x):
        _turned[(count * down * blocks,)](
            *(x, turns, out, m, n, down, blocks, -offset % width, *x.stride(), tile, width)
        )
    return out


def correction_triton(
    s: torch.Tensor, w: torch.Tensor, apart: torch.Tensor, noise: torch.Tensor, tile: int = 64
) -> torch.Tensor:
    """``correction.correction`` by the kernel, queued on the current stream."""
    s, w, out = s.contiguous(), w.contiguous(), torch.empty_like(s)
    count, n, _ = s.shape
    across = ceil_div(n, tile)
    with torch.cuda.device_of(s):
        _correction[(count * across * across,)](
            s, w, apart.contiguous(), noise.contiguous(), out, n, across, tile
        )
    return out


@jit(do_not_specialize=["m", "n", "down", "blocks", "before", "x_0"])
def _turned(
    x, turns, out, m, n, down, blocks, before, x_0, x_1, x_2, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0)
    block, row, batch = place % blocks, place // blocks % down, (place // (blocks * down)).to(tl.int64)
    i = row * ROWS + tl.arange(0, ROWS)[:, None]
    j = block * WIDTH - before + tl.arange(0, WIDTH)[None, :]
    inside = (i < m) & (j >= 0) & (j < n)
    i, j = i.to(tl.int64), j.to(tl.int64)
    found = tl.load(x + batch * x_0 + i * x_1 + j * x_2, mask=inside, other=0.0)
    k, l = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]  # noqa: E741
    turn = tl.load(turns + (batch * blocks + block) * WIDTH * WIDTH + k * WIDTH + l)
    tl.store(out + (batch * m + i) * n + j, tl.dot(found, turn, input_precision="ieee"), mask=inside)


@jit(do_not_specialize=["n", "across"])
def _correction(s, w, apart, noise, out, n, across, TILE: tl.constexpr):
    place = tl.program_id(0)
    tile, batch = place % (across * across), (place // (across * across)).to(tl.int64)
    i = tile // across * TILE + tl.arange(0, TILE)[:, None]
    j = tile % across * TILE + tl.arange(0, TILE)[None, :]
    inside = (i < n) & (j < n)
    at = batch * n * n + i.to(tl.int64) * n + j
    first = tl.load(w + batch * n + i, mask=i < n, other=0.0)
    gap = tl.load(w + batch * n + j, mask=j < n, other=0.0) - first
    x = tl.load(s + at, mask=inside, other=0.0)
    clear = (tl.abs(gap) > tl.load(apart + batch)) & (tl.abs(x) > tl.load(noise + batch))
    tl.store(out + at, tl.where(clear, x / tl.where(clear, gap, 1.0), 0.0), mask=inside)
