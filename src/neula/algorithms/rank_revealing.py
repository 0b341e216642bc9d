"""Minimum-norm least squares for matrices without full column rank, in double precision."""

from __future__ import annotations

import torch


def minimum_norm(
    a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor, rcond: float
) -> tuple[torch.Tensor, int]:
    """Minimum-norm solution of ``min ||A x - b||``, its rank decided in the column-scaled matrix.

    Householder QR, then the SVD of R. The rank is that of ``A D``, which does not depend on the units of the
    columns; among the solutions the one with the smallest ``||x||`` (not ``||D^-1 x||``) is taken.

    Parameters
    ----------
    a : Tensor, shape (m, n)
        float64, any shape.
    b : Tensor, shape (m, k)
    scales : Tensor, shape (n,)
        The diagonal of D.
    rcond : float
        Singular values of ``A D`` below ``rcond`` times the largest count as zero.

    Returns
    -------
    x : Tensor, shape (n, k)
    rank : int
    """
    q, r = torch.linalg.qr(a * scales)
    u, s, vh = torch.linalg.svd(r, full_matrices=True)
    rank = int((s > rcond * s[0]).sum())
    coefficients = (u[:, :rank].T @ (q.T @ b)) / s[:rank, None]
    x = scales[:, None] * (vh[:rank].T @ coefficients)
    null, _ = torch.linalg.qr(scales[:, None] * vh[rank:].T)
    return x - null @ (null.T @ x), rank
