"""LU of small blocks less signs that are chosen on the way, which turns an orthonormal Q into reflectors.

Ballard, Demmel, Grigori, Jacquelin, Knight and Nguyen, "Reconstructing Householder vectors from tall-skinny
QR" (J. Parallel Distrib. Comput. 85, 2015), Algorithm 6: without pivoting, since a sign makes each pivot at
least 1. On a GPU a warp keeps a block and the two inverses of its factors in registers.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import next_power_of_2
from neula.kernels.triton_source import jit, tl

WIDTH = 32
"""Order of the largest block that the kernel takes: three of them fill the registers of a warp."""


@trial("The kernel of blocks less signs", "plain torch takes its place, many times slower")
def _tried(device: torch.device) -> None:
    signed_lu.kernel(torch.zeros(1, WIDTH, WIDTH, dtype=torch.float32, device=device))


@kernel("signed_lu_triton", trial=_tried, when=lambda block: block.shape[-1] <= WIDTH)
def signed_lu(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Overwrite square blocks B (batch, n, n) with the factors of ``B - S = L U``, S diagonal with elements 1
    and -1.

    Returns the diagonals of S, opposite to the real parts of pivots as they would be without it, and the
    inverses of L and U; what a block holds that is not finite is in all of them.
    """
    batch, n, _ = block.shape
    signs = block.new_empty(batch, n)
    identity = torch.eye(n, dtype=block.dtype, device=block.device)
    l_inverse, u_inverse = (identity.repeat(batch, 1, 1) for _ in range(2))
    for j in range(n):
        pivot = block[:, j, j]
        signs[:, j] = torch.where(pivot.real >= 0, -1.0, 1.0)
        pivot -= signs[:, j]
        column, row = block[:, j + 1 :, j], block[:, j, j + 1 :]
        column /= pivot[:, None]
        block[:, j + 1 :, j + 1 :] -= column[:, :, None] * row[:, None, :]
        # Elimination applied to identity matrices gives the inverses of L and of U.
        l_inverse[:, j + 1 :] -= column[:, :, None] * l_inverse[:, j : j + 1]
        u_inverse[:, :, j] /= pivot[:, None]
        u_inverse[:, :, j + 1 :] -= u_inverse[:, :, j : j + 1] * row[:, None, :]
    return signs, l_inverse, u_inverse


def signed_lu_triton(block):
    batch, n, _ = block.shape
    signs, inverses = block.new_empty(batch, n), block.new_empty(2, batch, n, n)
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
    # Beyond the block, pivots of 1 and zeros.
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
