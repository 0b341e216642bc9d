"""Cholesky factors of blocks of some thousand columns, with their inverses, in a few launches a leaf."""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.kernels.cholesky import MAX_COLUMNS, cholesky_lower
from neula.kernels.dispatch import kernel, trial
from neula.kernels.precision import exact_matmul

LEAF = MAX_COLUMNS
"""Columns that one thread block factorizes."""


class BlockFactors(NamedTuple):
    """Of a batch of symmetric matrices ``A = L L^T``.

    Attributes
    ----------
    inverse : Tensor, shape (batch, n, n)
        ``L^-T``, upper triangular, zero below the diagonal.
    order : Tensor, shape (ceil(n / LEAF), batch)
        int32: what :func:`neula.kernels.cholesky.cholesky_lower` has found of each diagonal block.
    """

    inverse: torch.Tensor
    order: torch.Tensor


@trial("The kernels of Cholesky factors of blocks", "library calls take their place, several times slower")
def _tried(device: torch.device) -> None:
    factor_lower.kernel(torch.eye(LEAF + 1, device=device)[None], None)


def _fits_kernel(a: torch.Tensor, low: torch.dtype | None) -> bool:
    # The kernel counts what lies between two matrices in 32 bits.
    return a.dtype == torch.float32 and a.numel() > 0 and (len(a) == 1 or a.stride(0) < 2**31)


@kernel("neula.kernels.cholesky_block_triton:factor_lower_triton", trial=_tried, when=_fits_kernel)
def factor_lower(a: torch.Tensor, low: torch.dtype | None) -> BlockFactors:
    """Cholesky factors of a batch in their place, and their inverses, without synchronizing.

    The operations on columns that turn A into L turn the identity below it into ``L^-T``: leaf by leaf both
    are multiplied by the inverse of the diagonal block, and what they contribute to the columns to the right
    is subtracted.

    Parameters
    ----------
    a : Tensor, shape (batch, n, n)
        float32, of any strides. Its lower triangles are read, and L takes their place; what is above the
        diagonal means nothing afterwards.
    low : torch.dtype or None
        A format to which L is rounded below the diagonal blocks of :data:`LEAF` columns before it is
        multiplied: then the columns to the right make good what rounding has lost.

    Returns
    -------
    BlockFactors

    Examples
    --------
    >>> import torch
    >>> a = torch.tensor([[[4.0, 0.0], [2.0, 2.0]]])
    >>> factor_lower(a, None)
    BlockFactors(inverse=tensor([[[ 0.5000, -0.5000],
             [ 0.0000,  1.0000]]]), order=tensor([[0]], dtype=torch.int32))
    >>> a.tril()
    tensor([[[2., 0.],
             [1., 1.]]])
    """
    n, orders = a.shape[1], []
    inverse = torch.zeros_like(a)
    for start in range(0, n, LEAF):
        done, k, rest = slice(0, start), slice(start, start + LEAF), slice(start + LEAF, n)
        inverse[:, k, k], order = cholesky_lower.reference(a[:, k, k])
        orders.append(order)
        below = exact_matmul(a[:, rest, k], inverse[:, k, k])
        a[:, rest, k] = below = below if low is None else below.to(low).to(a.dtype)
        inverse[:, done, k] = exact_matmul(inverse[:, done, k], inverse[:, k, k])
        a[:, rest, rest] -= exact_matmul(below, below.mT)
        known = slice(0, k.stop)
        inverse[:, known, rest] -= exact_matmul(inverse[:, known, k], below.mT)
    return BlockFactors(inverse, torch.stack(orders))
