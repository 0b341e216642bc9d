"""Minimum-norm least squares for matrices without full rank, in double precision."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from neula.algorithms.batched_lstsq import MARGIN, probes, schatten_bounds
from neula.algorithms.refinement import over
from neula.engines import FP64

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class MinimumNorm:
    """Solution of :func:`minimum_norm`.

    Attributes
    ----------
    y : Tensor, shape (n, k)
        ``D x``.
    rank : int
    doubt : str
        Why the rank is not certain; empty if it is.
    range_basis : Tensor, shape (m, rank)
        Orthonormal basis of the numerical range of B.
    norm : float
        ``||B||_2``.
    condition : float
        ``sigma_1 / sigma_rank``.
    forward_error : Tensor, shape (k,)
        Bound on the relative error of y as the solution of the problem of exactly this rank.
    residual : Tensor, shape (m, k)
        ``b - B y``.
    """

    y: torch.Tensor
    rank: int
    doubt: str
    range_basis: torch.Tensor
    norm: float
    condition: float
    forward_error: torch.Tensor
    residual: torch.Tensor


def minimum_norm(b_matrix: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, rcond: float) -> MinimumNorm:
    """Solution of ``min ||A x - b||`` with the smallest ``||x||``, its rank decided in ``B = A D^-1``.

    Householder QR, then the SVD of R, and one step of refinement with the same factors. The rank does not
    depend on the units of the columns; among the solutions the one with the smallest ``||x||`` (not
    ``||D x||``) is taken.

    Parameters
    ----------
    b_matrix : Tensor, shape (m, n)
        B, float64, any shape, columns of norm 1 or 0.
    b : Tensor, shape (m, k)
    sizes : Tensor, shape (n,)
        The diagonal of D, at most 1.
    rcond : float
        Singular values of B below ``rcond`` times the largest count as zero.
    """
    m, n = b_matrix.shape
    if m >= n:
        q, r = torch.linalg.qr(b_matrix)
        u, s, vh = torch.linalg.svd(r, full_matrices=False)
        u = q @ u
    else:
        u, s, vh = torch.linalg.svd(b_matrix, full_matrices=False)
    rank, doubt = _rank(s, rcond, max(m, n))
    u, kept, v = u[:, :rank], s[:rank, None], vh[:rank].T
    row_space = None if rank == n else _RowSpace(v, sizes)

    def solve(rhs: torch.Tensor) -> Pair:
        coefficients = (u.T @ rhs) / kept
        return coefficients, v @ coefficients if row_space is None else row_space.shortest(coefficients)

    coefficients, y = solve(b)
    more, step = solve(b - b_matrix @ y)
    coefficients, y = coefficients + more, y + step
    residual = b - b_matrix @ y
    angle, error = _coefficient_error(s, rank, coefficients, b - u @ (u.T @ b), m + n)
    if row_space is not None:
        error = row_space.error(coefficients, y, error, angle)
    norm = float(s[0])
    return MinimumNorm(
        y=y,
        rank=rank,
        doubt=doubt,
        range_basis=u,
        norm=norm,
        condition=norm / float(s[rank - 1]) if rank else 1.0,
        forward_error=error,
        residual=residual,
    )


def _rank(s: torch.Tensor, rcond: float, size: int) -> tuple[int, str]:
    """How many singular values count, and which one might as well not, by the rounding errors of the SVD."""
    relative = s / s[0] if s[0] > 0 else s
    rank = int((relative > rcond).sum())
    unclear = ((relative - rcond).abs() <= size * FP64.u) & (relative > 0)
    if rank == 0 or not bool(unclear.any()):
        return rank, ""
    value = float(relative[unclear][0])
    return rank, (
        f"a singular value is {value:.2e} times the largest, too close to rcond = {rcond:.2e} to say whether "
        "it counts: pass another rcond"
    )


def _coefficient_error(
    s: torch.Tensor, rank: int, coefficients: torch.Tensor, residual: torch.Tensor, size: int
) -> tuple[float, torch.Tensor]:
    """Errors of the singular vectors that count, as an angle, and of the coefficients of y in them.

    B is known to ``eps ||B||``: ``eps`` is the backward error of the SVD. The singular vectors turn by at
    most ``eps sigma_1 / (sigma_r - sigma_(r+1))`` (Wedin), and with them what the other singular values,
    which count as zero, add to the part of B that counts (Hansen, "The truncated SVD as a method for
    regularization", BIT 27, 1987).
    """
    if rank == 0:
        return 0.0, torch.zeros_like(coefficients.sum(0))
    eps = 4 * math.sqrt(size) * FP64.u
    smallest = float(s[rank - 1])
    dropped = float(s[rank]) if rank < len(s) else 0.0
    condition = float(s[0]) / smallest
    gap = (smallest - dropped) / smallest
    angle = condition * eps / gap if gap > 0 else math.inf
    change = condition * eps * (1 + 2 * dropped / smallest / gap) if gap > 0 else math.inf
    norm = torch.linalg.vector_norm
    ratio = over(norm(residual, dim=0), s[0] * norm(coefficients, dim=0))
    grows = torch.where(ratio > 0, (condition + 1) * ratio, 0.0)
    return angle, change * (2 + grows)


class _RowSpace:
    """The row space of the part of A that counts: where the shortest x is.

    With ``M = D V`` it is ``x = M (M^T M)^-1 c`` for the coefficients c of ``D x`` in V.

    Parameters
    ----------
    v : Tensor, shape (n, rank)
        Singular vectors.
    sizes : Tensor, shape (n,)
        The diagonal of D.
    """

    def __init__(self, v: torch.Tensor, sizes: torch.Tensor) -> None:
        self.sizes = sizes[:, None]
        # Rows in order of size, without which Householder QR loses the small ones (Powell and Reid, 1969).
        order = sizes.argsort(descending=True)
        q, self.r = torch.linalg.qr((v * self.sizes)[order])
        self.q = torch.empty_like(q)
        self.q[order] = q

    def shortest(self, coefficients: torch.Tensor) -> torch.Tensor:
        """``D x`` for the shortest x with these coefficients."""
        return self.sizes * (self.q @ torch.linalg.solve_triangular(self.r.mT, coefficients, upper=False))

    def error(
        self, coefficients: torch.Tensor, y: torch.Tensor, relative: torch.Tensor, angle: float
    ) -> torch.Tensor:
        """Relative error of ``y = D x`` by those of the coefficients and of V, to first order.

        ``dx = (M^T)^+ (dc - dM^T x) + (I - M M^+) dM (M^T M)^-1 c`` with ``dM = D dV``.
        """
        if self.r.shape[0] == 0:
            return torch.zeros_like(relative)
        norm = torch.linalg.vector_norm
        identity = torch.eye(self.r.shape[0], dtype=y.dtype, device=y.device)
        inverse = torch.linalg.solve_triangular(self.r.mT, identity, upper=False)
        along = schatten_bounds((self.sizes * (self.q @ inverse))[None])[1][0]
        z = self.sizes * probes(len(self.sizes), y.device)
        across = MARGIN * torch.linalg.matrix_norm(self.sizes * (z - self.q @ (self.q.mT @ z)))
        weights = norm(self._gram_solve(coefficients), dim=0)
        sizes = norm(y, dim=0)
        change = along * (relative * norm(coefficients, dim=0) + angle * sizes) + across * angle * weights
        return over(change, sizes)

    def _gram_solve(self, coefficients: torch.Tensor) -> torch.Tensor:
        """``(M^T M)^-1 c``."""
        half = torch.linalg.solve_triangular(self.r.mT, coefficients, upper=False)
        return torch.linalg.solve_triangular(self.r, half, upper=True)
