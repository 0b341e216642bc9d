"""Minimum-norm least squares for matrices without full rank, in double precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MinimumNorm:
    """Solution of :func:`minimum_norm`.

    Attributes
    ----------
    x : Tensor, shape (n, k)
    rank : int
    range_basis : Tensor, shape (m, rank)
        Orthonormal basis of the numerical range of A.
    norm : float
        ``||A D||_2``.
    """

    x: torch.Tensor
    rank: int
    range_basis: torch.Tensor
    norm: float


def minimum_norm(a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor, rcond: float) -> MinimumNorm:
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
    """
    m, n = a.shape
    if m >= n:
        q, r = torch.linalg.qr(a * scales)
        u, s, vh = torch.linalg.svd(r, full_matrices=False)
        u = q @ u
    else:
        u, s, vh = torch.linalg.svd(a * scales, full_matrices=False)
    rank, norm = int((s > rcond * s[0]).sum()), float(s[0])
    u, s, vh = u[:, :rank], s[:rank], vh[:rank]
    row_space = torch.linalg.qr(vh.T / scales[:, None])[0] if rank < n else None

    def apply_inverse(rhs: torch.Tensor) -> torch.Tensor:
        x = scales[:, None] * (vh.T @ ((u.T @ rhs) / s[:, None]))
        return x if row_space is None else row_space @ (row_space.T @ x)

    x = apply_inverse(b)
    return MinimumNorm(x + apply_inverse(b - a @ x), rank, u, norm)
