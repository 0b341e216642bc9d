"""Extreme singular values of a triangular factor, by the power method and by inverse iteration."""

from __future__ import annotations

import torch

from neula.algorithms.triangular import BlockTriangular, Triangular

_STEPS = 4


def largest_singular_value(r: torch.Tensor, steps: int = _STEPS + 1) -> float:
    """Estimate ``||R||_2`` from below, usually within a few percent: n^2 operations a step.

    Parameters
    ----------
    r : Tensor, shape (n, n)
    steps : int
        Steps of the power method on ``R^T R``.
    """
    x = _random_vector(r)[:, 0]
    for _ in range(steps):
        x = r.T @ (r @ (x / torch.linalg.vector_norm(x).clamp_min(torch.finfo(x.dtype).tiny)))
    return float(torch.linalg.vector_norm(x).sqrt())


def smallest_singular_value(r: Triangular, steps: int = _STEPS) -> float:
    """Estimate the smallest singular value of a triangular R from above; 0 for an exactly singular one.

    Parameters
    ----------
    r : Triangular, shape (n, n)
        Upper triangular.
    steps : int
        Steps of inverse iteration on ``R^T R``.
    """
    if not bool((r.diagonal() != 0).all()):
        return 0.0
    x = _random_vector(r.r if isinstance(r, BlockTriangular) else r)
    for _ in range(steps):
        x = solve_normal(r, x / torch.linalg.vector_norm(x))
    growth = float(torch.linalg.vector_norm(x))
    return growth**-0.5 if growth > 0 else 0.0


def solve_normal(r: Triangular, x: torch.Tensor) -> torch.Tensor:
    """``(R^T R)^-1 x`` for upper triangular R and the columns of x."""
    return solve_r(r, solve_rt(r, x))


def solve_r(r: Triangular, x: torch.Tensor) -> torch.Tensor:
    """``R^-1 x``."""
    if isinstance(r, BlockTriangular):
        return r.solve(x)
    return torch.linalg.solve_triangular(r, x, upper=True)


def solve_rt(r: Triangular, x: torch.Tensor) -> torch.Tensor:
    """``R^-T x``."""
    if isinstance(r, BlockTriangular):
        return r.solve_transposed(x)
    return torch.linalg.solve_triangular(r.T, x, upper=False)


def multiply_r(r: Triangular, x: torch.Tensor) -> torch.Tensor:
    """``R x``."""
    return r.matmul(x) if isinstance(r, BlockTriangular) else r @ x


def _random_vector(r: torch.Tensor) -> torch.Tensor:
    """A fixed direction that no matrix is built to avoid; the caller's random state stays untouched."""
    generator = torch.Generator("cpu").manual_seed(20200623)
    return torch.randn(r.shape[0], 1, generator=generator, dtype=r.dtype, device="cpu").to(r.device)
