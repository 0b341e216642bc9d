"""Cholesky factors of some matrices together, a leaf of columns at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.kernels.cholesky.cholesky import MAX_COLUMNS, cholesky_lower
from neula.kernels.dispatch import kernel, trial
from neula.kernels.precision import exact_matmul

LEAF = MAX_COLUMNS
"""Columns that one thread block factorizes."""


class BatchFactors(NamedTuple):
    """Of symmetric matrices ``A = L L^T``.

    Attributes
    ----------
    lower : Tensor, shape (batch, n, n)
        L, float32, row-major, zero above the diagonal.
    order : Tensor, shape (batch,)
        int32: 0, or the order of the first leading minor that is not positive, or may not be for all that
        rounding errors say; then L means nothing.
    """

    lower: torch.Tensor
    order: torch.Tensor


@trial("The kernels of Cholesky factors of batches", "library calls take their place, several times slower")
def _tried(device: torch.device) -> None:
    factor_batch.kernel(torch.eye(LEAF + 1, dtype=torch.float32, device=device)[None])


@kernel(
    "neula.kernels.cholesky.cholesky_tiles_cuda:factor_batch_cuda",
    trial=_tried,
    when=lambda a: a.dtype != torch.float64 and 0 not in a.shape,
)
def factor_batch(a: torch.Tensor) -> BatchFactors:
    """Cholesky factors of all matrices of a batch, in products as accurate as float32, without synchronizing.

    A leaf of columns is updated by all that are done (left-looking: each element is written once), its
    diagonal block is factorized, and what is below is multiplied by the inverse of that; by the kernel of
    tiles, which solves with the diagonal blocks.

    Parameters
    ----------
    a : Tensor, shape (batch, n, n)
        Of any floating dtype and any strides. Only the lower triangles are read.

    Returns
    -------
    BatchFactors

    Examples
    --------
    >>> import torch
    >>> factor_batch(torch.tensor([[[4.0, torch.nan], [2.0, 2.0]]]))  # doctest: +NUMBER
    BatchFactors(lower=tensor([[[2., 0.],
             [1., 1.]]]), order=tensor([0], dtype=torch.int32))
    """
    n, orders = a.shape[1], []
    lower = torch.zeros(a.shape, dtype=torch.float32, device=a.device)
    for start in range(0, n, LEAF):
        done, k, below = slice(0, start), slice(start, start + LEAF), slice(start, n)
        columns = a[:, below, k].float() - exact_matmul(lower[:, below, done], lower[:, k, done].mT)
        width = columns.shape[2]
        inverse, order = cholesky_lower.reference(columns[:, :width])
        orders.append(order)
        lower[:, k, k] = columns[:, :width]
        lower[:, start + width :, k] = exact_matmul(columns[:, width:], inverse)
    return BatchFactors(lower, first_order(torch.stack(orders)))


def first_order(found: torch.Tensor) -> torch.Tensor:
    """The first leading minor that is not positive, given those of leaves, shape (leaves, batch)."""
    if len(found) == 1:
        return found[0]
    starts = torch.arange(len(found), dtype=torch.int32, device=found.device)[:, None] * LEAF
    most = torch.iinfo(torch.int32).max
    first = torch.where(found > 0, found + starts, most).amin(0)
    return torch.where(first == most, 0, first)
