"""Cholesky factors by tiles, all in one launch: with inverses of diagonal blocks, or of a batch.

A library factorizes some columns, solves for what is below them, and updates the rest, each after the one
before: with a matrix of middle size most of a GPU is idle meanwhile. Here what can be done of later columns
is done concurrently with the chain of square roots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.triangular_inverse import triangular_inverse

TILE = 64
"""Rows and columns that a thread block has at a time."""


ORDERS = range(768, 8193)
"""Of single matrices of which nothing but a factor is wanted (1500: 0.54 ms on an H200, 0.74 by the library;
2048: 0.68 and 1.0). With smaller ones little is gained, and this has to be compiled first."""


class InvertedFactor(NamedTuple):
    """``A = L L^T`` of one matrix."""

    lower: torch.Tensor  # shape (1, n, n): L, zero above the diagonal
    # Shape (blocks, 1, width, width): L_kk^-1 for blocks on the diagonal; of the last one only the part that
    # L has counts.
    inverses: torch.Tensor
    # Shape (1,): int32: 0, or the order of the first leading minor that is not positive; then L means
    # nothing.
    order: torch.Tensor


@trial("The kernel of Cholesky factors with inverses", "library calls take its place")
def _tried(device: torch.device) -> None:
    factor_inverted.kernel(torch.ones(1, 1, 1, dtype=torch.float64, device=device), 1)


@kernel(
    "neula.kernels.cholesky.cholesky_tiles_cuda:factor_inverted_cuda",
    trial=_tried,
    when=lambda a, width: a.dtype in (torch.float32, torch.float64) and len(a) == 1 and a.numel() > 0,
)
def factor_inverted(a: torch.Tensor, width: int) -> InvertedFactor:
    """A Cholesky factor of one matrix, and inverses of the blocks on its diagonal, without synchronizing.

    Parameters
    ----------
    a : Tensor, shape (1, n, n)
        float32 or float64, of any strides. Only the lower triangle is read.
    width : int
        Of the blocks; on a GPU a multiple of :data:`TILE`, or at least n.

    Returns
    -------
    InvertedFactor

    Examples
    --------
    >>> import torch
    >>> factor = factor_inverted(torch.tensor([[[4.0, 0.0], [2.0, 2.0]]], dtype=torch.float64), 2)
    >>> factor.inverses[0, 0].tolist(), factor.order.tolist()
    ([[0.5, 0.0], [-0.5, 1.0]], [0])
    """
    n = a.shape[-1]
    lower, order = torch.linalg.cholesky_ex(a)
    inverses = lower.new_zeros(-(-n // width), 1, width, width)
    for inverse, start in zip(inverses, range(0, n, width), strict=True):
        k = slice(start, min(start + width, n))
        size = k.stop - k.start
        inverse[:, :size, :size] = triangular_inverse(lower[:, k, k], upper=False)
    return InvertedFactor(lower, inverses, order)


def lower_factor(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cholesky factors as :func:`torch.linalg.cholesky_ex` has them, of one matrix of middle size by tiles.

    Parameters
    ----------
    a : Tensor, shape (..., n, n)
        Only the lower triangles are read.

    Returns
    -------
    lower : Tensor, shape (..., n, n)
    order : Tensor, shape (...)
        int32: 0, or the order of the first leading minor that is not positive; then L means nothing.

    Examples
    --------
    >>> import torch
    >>> lower_factor(torch.tensor([[4.0, 0.0], [2.0, 2.0]]))[0].tolist()  # doctest: +NUMBER
    [[2.0, 0.0], [1.0, 1.0]]
    """
    if a.ndim == 3 and a.shape[-1] in ORDERS and factor_inverted.takes(a, TILE):
        lower, _, order = factor_inverted(a, TILE)
        return lower, order
    lower, order = torch.linalg.cholesky_ex(a)
    return lower, order
