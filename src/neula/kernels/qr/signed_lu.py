"""LU of small blocks less signs that are chosen on the way: what turns an orthonormal Q into reflectors.

Ballard, Demmel, Grigori, Jacquelin, Knight and Nguyen, "Reconstructing Householder vectors from tall-skinny
QR" (J. Parallel Distrib. Comput. 85, 2015), Algorithm 6: without pivoting, since a sign makes each pivot at
least 1.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial

WIDTH = 32
"""Order of the largest block that the kernel takes: three of them fill the registers of a warp."""


@trial("The kernel of blocks less signs", "plain torch takes its place, many times slower")
def _tried(device: torch.device) -> None:
    signed_lu.kernel(torch.zeros(1, WIDTH, WIDTH, dtype=torch.float32, device=device))


@kernel(
    "neula.kernels.qr.signed_lu_triton:signed_lu_triton",
    trial=_tried,
    when=lambda block: block.shape[-1] <= WIDTH,
)
def signed_lu(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Overwrite square blocks B with the factors of ``B - S = L U``, S diagonal with elements 1 and -1.

    Parameters
    ----------
    block : Tensor, shape (batch, n, n)
        At least in single precision, of any strides: U, and below the diagonal L, take its place.

    Returns
    -------
    signs : Tensor, shape (batch, n)
        The diagonal of S: opposite to the real parts of pivots as they would be without it.
    l_inverse, u_inverse : Tensor, shape (batch, n, n)
        Inverses of the factors; what a block holds that is not finite is in all of them.

    Examples
    --------
    >>> import torch
    >>> signs, _, u_inverse = signed_lu(block := torch.tensor([[[0.6, -0.8], [0.8, 0.6]]]))
    >>> signs, block
    (tensor([[-1., -1.]]), tensor([[[ 1.6000, -0.8000],
             [ 0.5000,  2.0000]]]))
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
        # The same steps make the inverses of an identity below, and of one beside the block.
        l_inverse[:, j + 1 :] -= column[:, :, None] * l_inverse[:, j : j + 1]
        u_inverse[:, :, j] /= pivot[:, None]
        u_inverse[:, :, j + 1 :] -= u_inverse[:, :, j : j + 1] * row[:, None, :]
    return signs, l_inverse, u_inverse
