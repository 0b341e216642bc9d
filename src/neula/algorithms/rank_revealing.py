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
    u, s, v = u[:, :rank], s[:rank, None], vh[:rank].T

    def solve(rhs: torch.Tensor) -> torch.Tensor:
        coefficients = (u.T @ rhs) / s
        return scales[:, None] * (v @ coefficients) if rank == n else _shortest(coefficients, v, scales)

    x = solve(b)
    return MinimumNorm(x + solve(b - a @ x), rank, u, norm)


def _shortest(coefficients: torch.Tensor, v: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The shortest x with ``V^T D^-1 x = coefficients``, by QR of ``D^-1 V``.

    Rows are taken in order of size, without which Householder QR loses the small ones (Powell and Reid,
    1969).
    """
    order = scales.argsort()
    q, r = torch.linalg.qr(v[order] / scales[order, None])
    x = v.new_empty(v.shape[0], coefficients.shape[1])
    x[order] = q @ torch.linalg.solve_triangular(r.T, coefficients, upper=False)
    return x
