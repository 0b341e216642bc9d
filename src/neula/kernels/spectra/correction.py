"""Corrections of approximate eigenvectors of Hermitian matrices, apart from dense products: block diagonal
transformations of neighbours, and first-order changes (:mod:`neula.algorithms.spectra.divide`).
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import ceil_div
from neula.kernels.precision import exact_matmul
from neula.kernels.triton_source import jit, tl


@trial("The kernel that turns eigenvectors", "several passes of the library's take its place")
def _tried(device: torch.device) -> None:
    x = torch.ones(1, 16, 16, dtype=torch.float32, device=device)
    turned.kernel(x, x[None], 0)


@kernel(
    "turned_triton",
    trial=_tried,
    when=lambda x, turns, _: x.numel() > 0 and x.dtype == torch.float32 and turns.shape[-1] in (16, 32),
)
def turned(x: torch.Tensor, turns: torch.Tensor, offset: int) -> torch.Tensor:
    """``X T`` for X (batch, m, n) with a block diagonal T, given by its blocks (batch, blocks, width, width).

    ``offset`` is a column of X at which a block begins; the first and the last one may stick out.
    """
    count, m, n = x.shape
    blocks, width = turns.shape[1:3]
    before = -offset % width
    x = torch.nn.functional.pad(x, (before, blocks * width - before - n))
    x = x.view(count, m, blocks, width).transpose(1, 2)
    return exact_matmul(x, turns).transpose(1, 2).reshape(count, m, -1)[:, :, before : before + n]


def correction(s: torch.Tensor, w: torch.Tensor, min_gap: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """``s_ij / (w_j - w_i)`` where the denominator exceeds ``min_gap`` and the numerator ``noise``, else 0,
    for S (batch, n, n).
    """
    gaps = w[:, None, :] - w[:, :, None]
    clear = (gaps.abs() > min_gap[:, None, None]) & (s.abs() > noise[:, None, None])
    return torch.where(clear, s / torch.where(clear, gaps, 1.0), 0.0)


def turned_triton(x, turns, offset, tile=64):
    count, m, n = x.shape
    blocks, width = turns.shape[1:3]
    out, turns, down = x.new_empty(x.shape), turns.contiguous(), ceil_div(m, tile)
    _turned[(count * down * blocks,)](
        *(x, turns, out, m, n, down, blocks, -offset % width, *x.stride(), tile, width)
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
