"""LU factorization of a small block without pivoting, and the inverses of its triangles.

Panels are solved with these inverses: products are what is fast.
"""

from __future__ import annotations

import torch

LEAF = 16
"""Columns at which the recursion of the reference stops."""


def lu_unpivoted(block: torch.Tensor) -> torch.Tensor:
    """Overwrite a square block with its factors: U, and L below the diagonal.

    Parameters
    ----------
    block : Tensor, shape (n, n)
        float32 or float64, of any strides.

    Returns
    -------
    Tensor, shape (n, n)
        ``block``. It never waits for the device: a zero pivot stays on the diagonal, and what is divided by
        it is NaN or Inf.

    Examples
    --------
    >>> import torch
    >>> lu_unpivoted(torch.tensor([[2.0, 4.0], [1.0, 5.0]]))
    tensor([[2.0000, 4.0000],
            [0.5000, 3.0000]])
    """
    if block.is_cuda:
        return block.copy_(torch.linalg.lu_factor_ex(block, pivot=False).LU)
    return lu_unpivoted_reference(block)


def lu_unpivoted_reference(block: torch.Tensor) -> torch.Tensor:
    """:func:`lu_unpivoted` in plain torch, on any device: recursive down to :data:`LEAF` columns."""
    n = block.shape[0]
    if n <= LEAF:
        for j in range(n - 1):
            column = block[j + 1 :, j]
            column /= block[j, j].clone()
            block[j + 1 :, j + 1 :].addr_(column, block[j, j + 1 :], alpha=-1)
        return block
    k = n // 2
    lu_unpivoted_reference(block[:k, :k])
    factors, right, below = block[:k, :k], block[:k, k:], block[k:, :k]
    right.copy_(torch.linalg.solve_triangular(factors, right, upper=False, unitriangular=True))
    below.copy_(torch.linalg.solve_triangular(factors, below, upper=True, left=False))
    # In double: no switch for float32 products has a say.
    block[k:, k:] -= (below.double() @ right.double()).to(block.dtype)
    lu_unpivoted_reference(block[k:, k:])
    return block


def triangular_inverses(lu: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverses of both factors of :func:`lu_unpivoted`, in one launch for the two.

    Parameters
    ----------
    lu : Tensor, shape (..., n, n)

    Returns
    -------
    l_inverse : Tensor, shape (..., n, n)
        Unit lower triangular.
    u_inverse : Tensor, shape (..., n, n)
        Upper triangular; not finite where U is singular.
    """
    identity = torch.eye(lu.shape[-1], dtype=lu.dtype, device=lu.device)
    lower = torch.stack([lu.tril(-1) + identity, lu.mT.tril()])
    l_inverse, u_inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    return l_inverse, u_inverse.mT
