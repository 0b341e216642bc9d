"""LU of blocks less signs: a warp keeps a block and the two inverses of its factors in registers.

A block of 32 x 32 takes ``2 n^3`` flops with the inverses and ``4 n^2`` numbers of memory traffic, both
nothing beside what the factors are for. The bound is the latency of n dependent steps, each with a division.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from neula.kernels.launch import next_power_of_2
from neula.kernels.triton_source import jit, tl


def signed_lu_triton(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`neula.kernels.qr.signed_lu.signed_lu` by the kernel, queued on the current stream."""
    batch, n, _ = block.shape
    signs, inverses = block.new_empty(batch, n), block.new_empty(2, batch, n, n)
    with torch.cuda.device_of(block):
        _kernel[(batch,)](
            *(block, *block.stride(), signs, inverses[0], inverses[1], n),
            WIDTH=max(16, next_power_of_2(n)),
            num_warps=1,
        )
    return signs, inverses[0], inverses[1]


@jit
def _kernel(
    block, batch_stride, row_stride, column_stride, signs, l_inverse, u_inverse, n, WIDTH: tl.constexpr
):
    matrix = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (i < n) & (j < n)
    place = block + matrix * batch_stride + i * row_stride + j * column_stride
    b = tl.load(place, mask=inside, other=0.0)
    # Beyond the block, pivots of 1 and nothing beside them.
    one = tl.where(i == j, 1.0, 0.0).to(b.dtype)
    left, right, sign = one, one, tl.sum(one, axis=0, keep_dims=True)
    for step in range(n):
        column = tl.sum(tl.where(j == step, b, 0.0), axis=1, keep_dims=True)
        row = tl.sum(tl.where(i == step, b, 0.0), axis=0, keep_dims=True)
        pivot = tl.sum(tl.where(j == step, row, 0.0), axis=1, keep_dims=True)
        chosen = tl.where(pivot >= 0.0, -1.0, 1.0).to(b.dtype)
        pivot -= chosen
        sign = tl.where(j == step, chosen, sign)
        below = tl.where(i > step, column / pivot, 0.0)
        beside = tl.where(j > step, row, 0.0)
        b = tl.where(j == step, tl.where(i > step, below, b), b) - below * beside
        b = tl.where((i == step) & (j == step), pivot, b)
        left -= below * tl.sum(tl.where(i == step, left, 0.0), axis=0, keep_dims=True)
        scaled = tl.sum(tl.where(j == step, right, 0.0), axis=1, keep_dims=True) / pivot
        right = tl.where(j == step, scaled, right - scaled * beside)
    tl.store(place, b, mask=inside)
    tl.store(signs + matrix * n + j, sign, mask=j < n)
    inverse = matrix * n * n + i * n + j
    tl.store(l_inverse + inverse, left, mask=inside)
    tl.store(u_inverse + inverse, right, mask=inside)
