"""GMRES for several right-hand sides at once, each in a Krylov space of its own.

Saad and Schultz, "GMRES: A Generalized Minimal Residual Algorithm for Solving Nonsymmetric Linear Systems",
SIAM J. Sci. Stat. Comput. 7, 1986. Gram-Schmidt is classical and done twice, which is as orthogonal as
Householder reflections and consists of products (Giraud, Langou, Rozloznik, van den Eshof, "Rounding error
analysis of the classical Gram-Schmidt orthogonalization process", Numer. Math. 101, 2005).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from neula.certificates.backward_error import over

HOPELESS_AFTER = 20
"""Iterations after which the rate of convergence can be trusted enough to give up. Where few singular values
of the preconditioned matrix are far from one, residuals are hardly smaller until those are done with."""


def gmres(
    operator: Callable[[torch.Tensor], torch.Tensor],
    b: torch.Tensor,
    *,
    tolerance: float,
    max_iterations: int,
) -> tuple[torch.Tensor, int]:
    """Minimize ``||b - A x||`` over Krylov spaces that grow until every column is small enough.

    Parameters
    ----------
    operator : callable
        Applies A to the columns of a matrix of shape (n, k); with a preconditioner M from the right, A M^-1.
    b : Tensor, shape (n, k)
        Right-hand sides.
    tolerance : float
        Norm of the residual, relative to that of b, at which a column is done.
    max_iterations : int
        Largest dimension of the Krylov spaces, all of which is kept. It ends earlier as soon as the rate of
        convergence says that they will not be enough.

    Returns
    -------
    x : Tensor, shape (n, k)
        ``M x`` with a preconditioner.
    iterations : int
        Applications of the operator.

    Examples
    --------
    >>> a = torch.diag(torch.arange(1.0, 4.0, dtype=torch.float64))
    >>> x, iterations = gmres(lambda z: a @ z, torch.ones_like(a[:, :1]), tolerance=1e-12, max_iterations=9)
    >>> x[:, 0], iterations
    (tensor([1.0000, 0.5000, 0.3333], dtype=torch.float64), 3)
    """
    n, k = b.shape
    steps = min(n, max_iterations)
    start = torch.linalg.vector_norm(b, dim=0)
    basis = b.new_zeros(k, n, steps + 1)
    basis[:, :, 0] = over(b, start).T
    problem = _Hessenberg(start.cpu(), steps)
    iterations = 0
    while iterations < steps:
        found = basis[:, :, : iterations + 1]
        w = operator(found[:, :, -1].T).T[:, :, None]
        iterations += 1
        h, w = _orthogonalize(found, w)
        norm = torch.linalg.vector_norm(w, dim=1)
        basis[:, :, iterations] = over(w[:, :, 0], norm)
        residual = problem.append(torch.cat([h[:, :, 0], norm], dim=1).cpu())
        worst = float(over(residual, problem.start).max())
        # NaN ends it too: the caller measures what came of it.
        if not tolerance < worst or is_hopeless(worst, iterations, tolerance, max_iterations):
            break
    y = problem.solve().to(b.device)
    return (basis[:, :, :iterations] @ y)[:, :, 0].T, iterations


def is_hopeless(reduction: float, iterations: int, tolerance: float, max_iterations: int) -> bool:
    """Whether the mean rate so far is too slow."""
    return iterations >= HOPELESS_AFTER and reduction ** (max_iterations / iterations) > tolerance


def _orthogonalize(basis: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Coefficients of w in the basis, and what is left of it, for each right-hand side."""
    h = basis.mT @ w
    w = w - basis @ h
    again = basis.mT @ w
    return h + again, w - basis @ again


class _Hessenberg:
    """The least-squares problems ``min ||beta e_1 - H y||`` of GMRES, by Givens rotations, on the host."""

    def __init__(self, start: torch.Tensor, steps: int) -> None:
        k = len(start)
        self.start = start
        self._size = 0
        self._r = start.new_zeros(k, steps, steps)
        # The product of all rotations so far, and the right-hand side that they have turned.
        self._q = torch.eye(steps + 1, dtype=start.dtype, device="cpu").repeat(k, 1, 1)
        self._rhs = start.new_zeros(k, steps + 1)
        self._rhs[:, 0] = start

    def append(self, h: torch.Tensor) -> torch.Tensor:
        """Add a column, shape (k, size + 2), and return the norms of the residuals."""
        j = self._size
        column = (self._q[:, : j + 2, : j + 2] @ h[:, :, None])[:, :, 0]
        radius = torch.linalg.vector_norm(column[:, j:], dim=1)
        # A Krylov space that cannot grow has nothing left to rotate.
        cosine = torch.where(radius > 0, column[:, j] / radius, 1.0)
        sine = torch.where(radius > 0, column[:, j + 1] / radius, 0.0)
        rotation = torch.stack([torch.stack([cosine, sine], 1), torch.stack([-sine, cosine], 1)], 1)
        self._q[:, j : j + 2] = rotation @ self._q[:, j : j + 2]
        self._rhs[:, j : j + 2] = (rotation @ self._rhs[:, j : j + 2, None])[:, :, 0]
        self._r[:, :j, j] = column[:, :j]
        # Nor does it need a coefficient: any pivot will do where the right-hand side is zero.
        self._r[:, j, j] = torch.where(radius > 0, radius, 1.0)
        self._size += 1
        return self._rhs[:, j + 1].abs()

    def solve(self) -> torch.Tensor:
        """The coefficients y, shape (k, size, 1)."""
        j = self._size
        return torch.linalg.solve_triangular(self._r[:, :j, :j], self._rhs[:, :j, None], upper=True)
