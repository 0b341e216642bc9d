"""Cholesky factors of blocks of some thousand columns, with their inverses, in a few launches a leaf."""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.kernels.cholesky.cholesky import MAX_COLUMNS, cholesky_lower
from neula.kernels.dispatch import kernel, trial
from neula.kernels.precision import exact_matmul

LEAF = MAX_COLUMNS
"""Columns that one thread block factorizes."""


class BlockFactors(NamedTuple):
    """Of a symmetric matrix ``A = L L^T``.

    Attributes
    ----------
    inverse : Tensor, shape (n, n)
        ``L^-T``, upper triangular, zero below the diagonal.
    order : Tensor, shape (ceil(n / LEAF), 1)
        int32: what :func:`neula.kernels.cholesky.cholesky.cholesky_lower` has found of each diagonal block.
    """

    inverse: torch.Tensor
    order: torch.Tensor


@trial("The kernels of Cholesky factors of blocks", "library calls take their place, several times slower")
def _tried(device: torch.device) -> None:
    factor_lower.kernel(torch.eye(LEAF + 1, dtype=torch.float32, device=device))


@kernel(
    "neula.kernels.cholesky.cholesky_block_triton:factor_lower_triton",
    trial=_tried,
    when=lambda a: a.dtype == torch.float32 and len(a) > 0,
)
def factor_lower(a: torch.Tensor) -> BlockFactors:
    """A Cholesky factor in the place of the matrix, and its inverse, without synchronizing.

    The operations on columns that turn A into L turn the identity below it into ``L^-T``: leaf by leaf both
    are multiplied by the inverse of the diagonal block, and what they contribute to the columns to the right
    is subtracted.

    Parameters
    ----------
    a : Tensor, shape (n, n)
        float32, of any strides. Its lower triangle is read, and L takes its place; what is above the diagonal
        means nothing afterwards.

    Returns
    -------
    BlockFactors

    Examples
    --------
    >>> import torch
    >>> a = torch.tensor([[4.0, 0.0], [2.0, 2.0]])
    >>> factor_lower(a)  # doctest: +NUMBER
    BlockFactors(inverse=tensor([[ 0.5000, -0.5000],
            [ 0.0000,  1.0000]]), order=tensor([[0]], dtype=torch.int32))
    >>> a.tril()  # doctest: +NUMBER
    tensor([[2., 0.],
            [1., 1.]])
    """
    n, orders = len(a), []
    inverse = torch.zeros_like(a)
    for start in range(0, n, LEAF):
        known, k, rest = slice(0, start), slice(start, start + LEAF), slice(start + LEAF, n)
        (leaf,), order = cholesky_lower.reference(a[None, k, k])
        orders.append(order)
        below = exact_matmul(a[rest, k], leaf)
        a[rest, k] = below
        inverse[known, k], inverse[k, k] = exact_matmul(inverse[known, k], leaf), leaf
        a[rest, rest] -= exact_matmul(below, below.mT)
        inverse[: k.stop, rest] -= exact_matmul(inverse[: k.stop, k], below.mT)
    return BlockFactors(inverse, torch.stack(orders))
