"""Leading eigenvectors of a symmetric matrix by subspace iteration, filtered by Chebyshev polynomials.

A library computes all eigenvectors, with many steps that are matters of latency on a GPU. For a few of them
there are products with a thin block instead: a polynomial that is small on the eigenvalues which are not
wanted and grows as fast as it can beyond them (Zhou, Saad, Tiago, Chelikowsky, "Self-consistent-field
calculations using Chebyshev-filtered subspace iteration", Journal of Computational Physics 219, 2006).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

BEYOND = 32
"""Vectors beyond those that are wanted, or as many as those: the filter damps what is smaller than all of
theirs, and the fewer they are the slower those that are wanted grow."""

DEGREE = 64
"""Degree of the polynomial at most."""

SPREAD = 1e6
"""By how much the filter may magnify what vectors have in common more than what they have not: half of the
digits are left to tell them apart."""

MORE = 1e3
"""By how much more where they are eigenvectors but for small errors."""

FLAT = 0.97
"""What is smaller than the largest eigenvalue by less than a few percent is not damped: with more equal
eigenvalues than vectors in the block, any of them will do."""

STARTS = 6
"""Filters before eigenvalues are looked at: they cost less than that."""

ROUNDS = 6
"""Rounds after which a library's solver is faster."""


def leading_eigenvectors(g: torch.Tensor, k: int, tolerance: Callable[[float], float]) -> torch.Tensor | None:
    """Eigenvectors of the k largest eigenvalues, or None where they are not found soon.

    That no larger eigenvalue is missed is certain to the tolerance: what is left of G without those that were
    found is measured by a Cholesky factorization.

    Parameters
    ----------
    g : Tensor, shape (n, n)
        float64, symmetric, positive semidefinite but for rounding errors.
    k : int
    tolerance : callable
        What ``||G V - V Theta||_F`` may be, given the smallest element of Theta; no less than rounding
        errors.

    Returns
    -------
    Tensor, shape (n, k), or None
        Orthonormal columns, by descending eigenvalue.

    Examples
    --------
    >>> import torch
    >>> v = leading_eigenvectors(torch.diag(torch.arange(64.0, dtype=torch.float64)), 2, lambda _: 1e-9)
    >>> v.abs().argmax(0)
    tensor([63, 62])
    """
    v = _random_block(len(g), block_size(k), g)
    found = v[:, :0]
    values = g.new_zeros(0, device="cpu")
    # No eigenvalue exceeds the largest sum of a row; half of all or more are below their mean.
    rest, largest, mean = g, float(torch.linalg.matrix_norm(g, math.inf)), float(g.diagonal().mean())
    if not (mean > 0 and math.isfinite(largest)):
        return None
    for _ in range(STARTS):
        v, _ = _orthonormal(_filtered(g, v, largest, mean, SPREAD))
    filtered = v
    for _ in range(ROUNDS):
        pairs = _ritz_pairs(rest, filtered, found)
        if pairs is None:
            return None
        theta, v, residuals = pairs
        left = k - len(values)
        bound = tolerance(float(theta[left - 1]))
        count = int((residuals[:left] <= bound / math.sqrt(k)).cumprod(0).sum())
        # Those that are done leave the matrix, or the polynomial would grow with them more than all others.
        done, kept = v[:, :count], v[:, count:]
        rest = rest - (done * theta[:count].to(g.device)) @ done.T
        found, values = torch.cat([found, done], 1), torch.cat([values, theta[:count]])
        if count == left:
            return found if _nothing_above(rest, float(values.min()) + bound) else None
        if not float(theta[-1]) > 0:
            return None
        top = float(theta[count])
        # Vectors near to eigenvectors have little in common.
        spread = SPREAD * min(max(top / float(residuals[count:].max()), 1.0), MORE)
        filtered = _filtered(rest, kept, top, float(theta[-1]), spread)
    return None


def block_size(k: int) -> int:
    """How many vectors are iterated with for k of them."""
    return k + max(BEYOND, k)


def _filtered(g: torch.Tensor, v: torch.Tensor, largest: float, cut: float, spread: float) -> torch.Tensor:
    """``T_d((2 / cut) G - I) V``: at most 1 for eigenvalues from 0 to ``cut``, as large as can be
    beyond, and about ``spread`` for the largest.
    """
    cut = min(cut, FLAT * largest)
    degree = max(1, min(DEGREE, int(math.log(spread) / math.acosh(2 * largest / cut - 1))))
    mapped = (2 / cut) * g
    mapped.diagonal().sub_(1)
    before, now = v, mapped @ v
    for _ in range(degree - 1):
        before, now = now, torch.addmm(before, mapped, now, beta=-1, alpha=2)
    return now


def _ritz_pairs(
    g: torch.Tensor, v: torch.Tensor, found: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Ritz values, descending, Ritz vectors and the norms of their residuals, of a block without the directions
    that were found; values and norms on the host.
    """
    # Twice is enough: the first time leaves half of the digits.
    v, first = _orthonormal(v - found @ (found.T @ v))
    v, second = _orthonormal(v - found @ (found.T @ v))
    image = g @ v
    theta, w = torch.linalg.eigh((v.T @ image).nan_to_num(0.0, 0.0, 0.0))  # NaN would be an exception
    v, image, theta = v @ w.flip(1), image @ w.flip(1), theta.flip(0)
    residuals = torch.linalg.vector_norm(image - v * theta, dim=0)
    theta, residuals, info = torch.stack([theta, residuals, (first + second).expand_as(theta)]).cpu()
    return None if bool(info.any()) or not bool(theta.isfinite().all()) else (theta, v, residuals)


def _orthonormal(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cholesky QR with columns scaled before, and LAPACK's info."""
    v = v / torch.linalg.vector_norm(v, dim=0)
    factor, info = torch.linalg.cholesky_ex(v.T @ v)
    return torch.linalg.solve_triangular(factor, v.T, upper=False).T, info


def _nothing_above(g: torch.Tensor, bound: float) -> bool:
    """Whether all eigenvalues are below: ``bound I - G`` has a Cholesky factor."""
    rest = -g
    rest.diagonal().add_(bound)
    return bool(torch.linalg.cholesky_ex(rest)[1] == 0)


def _random_block(n: int, k: int, like: torch.Tensor) -> torch.Tensor:
    """Fixed random vectors; the user's random state stays untouched."""
    generator = torch.Generator("cpu").manual_seed(n)
    return torch.randn(n, k, generator=generator, dtype=like.dtype, device="cpu").to(like.device)
