"""Cholesky factors of some matrices together."""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.kernels.cholesky.cholesky import MAX_COLUMNS
from neula.kernels.dispatch import kernel, trial


class BatchFactors(NamedTuple):
    """Cholesky factors of symmetric matrices ``A = L L^T``."""

    lower: torch.Tensor  # shape (batch, n, n): L, float32, row-major, zero above the diagonal
    # Shape (batch,): int32: 0, or the order of the first leading minor that is not positive, or may not be
    # for all that rounding errors say; then L means nothing.
    order: torch.Tensor


@trial("The kernels of Cholesky factors of batches", "library calls take their place, several times slower")
def _tried(device: torch.device) -> None:
    factor_batch.kernel(torch.eye(MAX_COLUMNS + 1, dtype=torch.float32, device=device)[None])


@kernel(
    "neula.kernels.cholesky.cholesky_tiles_cuda:factor_batch_cuda",
    trial=_tried,
    when=lambda a: a.dtype != torch.float64 and 0 not in a.shape,
)
def factor_batch(a: torch.Tensor) -> BatchFactors:
    """Cholesky factors of all matrices of a batch, in products as accurate as float32, without synchronizing.

    On a GPU by the kernel of tiles, or by that of matrices of up to 128 columns.

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
    lower, order = torch.linalg.cholesky_ex(a.float())
    return BatchFactors(lower.contiguous(), order)
