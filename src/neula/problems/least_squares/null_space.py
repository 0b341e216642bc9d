"""Equality constraints ``C x = d``: the points that fulfil them, by QR of ``C^T``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neula.algorithms.scaling import power_of_two_scales
from neula.algorithms.spectra.condition import extreme_singular_values
from neula.engines import FP64, Engine
from neula.problems.orthogonal.qr import qr

ROUNDINGS = 8.0
"""Unit roundoffs, times the condition number of C, of the shortest x that fulfils the constraints."""

ROUNDING = 8.0
"""Factor on ``max(n, p) u``: smaller diagonal elements of R, and residuals of constraints, count as zero."""


@dataclass(frozen=True)
class NullSpace:
    """All x with ``C x = d``: a particular one, and a basis of the directions that change nothing.

    Attributes
    ----------
    shortest : Tensor, shape (n, k)
        The x of smallest norm.
    basis : Tensor, shape (n, n - rank)
        Orthonormal.
    rank : int
    condition : float
        Of the rows of C that are independent, scaled; an estimate from below.
    c, d : Tensor, shape (p, n), (p, k)
        The constraints, rows scaled to elements of at most 1.
    """

    shortest: torch.Tensor
    basis: torch.Tensor
    rank: int
    condition: float
    c: torch.Tensor
    d: torch.Tensor

    @property
    def noise(self) -> float:
        """By how much rounding errors of the factorization turn the basis, and move the shortest x."""
        return ROUNDINGS * self.condition * FP64.u

    @classmethod
    def of(cls, c: torch.Tensor, d: torch.Tensor, engine: Engine) -> NullSpace:
        """Factorize.

        Parameters
        ----------
        c : Tensor, shape (p, n)
            float64.
        d : Tensor, shape (p, k)
        engine : Engine
        """
        p, n = c.shape
        if not p or not n:
            shortest, basis = d.new_zeros(n, d.shape[1]), torch.eye(n, dtype=d.dtype, device=d.device)
            return cls(shortest, basis, 0, 1.0, c, d)
        scales = power_of_two_scales(c.abs().amax(1))[:, None]  # of norms squares may underflow
        scaled, rhs = c * scales, d * scales
        q, r, order = qr(scaled.mT, mode="complete", pivoting=True, engine=engine)
        diagonal = r.diagonal().abs()
        rank = int((diagonal > ROUNDING * max(n, p) * FP64.u * diagonal.max()).sum())
        triangle = r[:rank, :rank].mT
        y = torch.linalg.solve_triangular(triangle, rhs[order][:rank], upper=False)
        condition = _condition(r[:rank, :rank]) if rank else 1.0
        return cls(q[:, :rank] @ y, q[:, rank:], rank, condition, scaled, rhs)

    def error(self, x: torch.Tensor) -> torch.Tensor:
        """``||C x - d|| / (||C|| ||x|| + ||d||)`` of each column, in the scaled rows; 0 where both vanish."""
        norm = torch.linalg.vector_norm
        size = torch.linalg.matrix_norm(self.c) * norm(x, dim=-2) + norm(self.d, dim=-2)
        residual = norm(self.c @ x - self.d, dim=-2)
        return torch.where(residual > 0, residual / size, 0.0)

    @property
    def tolerance(self) -> float:
        """What such an error may be by rounding alone."""
        return ROUNDING * max(*self.c.shape, 1) * FP64.u * max(1.0, self.condition**0.5)

    def check(self, c: torch.Tensor, d: torch.Tensor) -> None:
        """Refuse constraints, as they were given, that no x fulfils.

        Raises
        ------
        ValueError
        """
        if bool((self.error(self.shortest) <= self.tolerance).all()):
            return
        nearest = torch.linalg.pinv(c) @ d
        residual = c @ nearest - d
        worst = int(residual.abs().amax(1).argmax())
        least = float(torch.linalg.vector_norm(residual))
        raise ValueError(
            f"the constraints contradict one another: C of shape {tuple(c.shape)} has rank {self.rank}, and "
            f"||C x - d|| is at least {least:.3g} (most of it in row {worst}): "
            "leave out constraints that follow from others, or change d"
        )


def _condition(r: torch.Tensor) -> float:
    """Condition number of a triangle."""
    largest, smallest = extreme_singular_values(r.contiguous(), r.contiguous()).tolist()
    return float(largest / max(smallest, torch.finfo(torch.float64).tiny))
