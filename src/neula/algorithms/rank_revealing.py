"""Minimum-norm least squares for matrices without full rank, in double precision."""

from __future__ import annotations

import torch


def minimum_norm(
    a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor, rcond: float
) -> tuple[torch.Tensor, int]:
    """Minimum-norm solution of ``min ||A x - b||``, its rank decided in the column-scaled matrix.

    Householder QR, then the SVD of R, and one step of refinement with the same factors. The rank is that of
    ``A D``, which does not depend on the units of the columns; among the solutions the one with the smallest
    ``||x||`` (not ``||D^-1 x||``) is taken.

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
    m, n = a.shape
    if m >= n:
        q, r = torch.linalg.qr(a * scales)
        u, s, vh = torch.linalg.svd(r, full_matrices=False)
        u = q @ u
    else:
        u, s, vh = torch.linalg.svd(a * scales, full_matrices=False)
    rank = int((s > rcond * s[0]).sum())
    u, s, vh = u[:, :rank], s[:rank], vh[:rank]
    row_space = torch.linalg.qr(vh.T / scales[:, None])[0] if rank < n else None

    def apply_inverse(rhs: torch.Tensor) -> torch.Tensor:
        x = scales[:, None] * (vh.T @ ((u.T @ rhs) / s[:, None]))
        return x if row_space is None else row_space @ (row_space.T @ x)

    x = apply_inverse(b)
    return x + apply_inverse(b - a @ x), rank
