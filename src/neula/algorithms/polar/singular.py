"""Partial isometries from the singular value decomposition: it takes longest, and always works."""

from __future__ import annotations

import torch

from neula.engines.reduction import HERE, Reduction
from neula.kernels.precision import exact_matmul


def isometry(
    wide: torch.Tensor, cutoff: float, *, completion: bool = False, over_rows: Reduction = HERE
) -> tuple[torch.Tensor, torch.Tensor]:
    """``W V^T`` of ``W S V^T``, without the vectors of singular values that count as zero.

    Parameters
    ----------
    wide : Tensor, shape (batch, k, m), k <= m
        float32 or float64; no NaN, no Inf.
    cutoff : float
        Singular values up to this part of the largest count as zero.
    completion : bool
        Whether their vectors are taken all the same.
    over_rows : Reduction, optional
        Of the columns of W, the rows of its transpose.

    Returns
    -------
    factor : Tensor, shape (batch, k, m)
    rank : Tensor, shape (batch,)
        How many do not count as zero.

    Examples
    --------
    >>> import torch
    >>> from neula.algorithms.polar.singular import isometry
    >>> isometry(torch.tensor([[[3.0, 0.0], [0.0, 0.0]]]), 1e-6)
    (tensor([[[1., 0.],
             [0., 0.]]]), tensor([1]))
    """
    q, r = over_rows.merged(wide.mT, torch.linalg.qr)
    v, s, wh = over_rows.agreed(*torch.linalg.svd(r))
    counts = (s > cutoff * s[:, :1]) & (s > 0)
    left = wh.mT if completion else wh.mT * counts[:, None, :]
    return exact_matmul(left, exact_matmul(q, v).mT), counts.sum(1)
