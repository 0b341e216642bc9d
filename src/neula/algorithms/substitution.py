"""Solving with the factors of an LU factorization that are kept in a low format."""

from __future__ import annotations

import torch

from neula.algorithms.lu import PackedLU
from neula.algorithms.lu_panels import blocks
from neula.engines.precision import exact_matmul

WIDTH = 512
"""Columns of the factors that are converted at a time."""


def solve_factored(factors: PackedLU, b: torch.Tensor) -> torch.Tensor:
    """``x = U^-1 L^-1 P b``, by substitution in the precision of ``b``.

    Parameters
    ----------
    factors : PackedLU
        Of an n x n matrix.
    b : Tensor, shape (n, k)
        float32 or float64, on the device of the factors; not modified.

    Returns
    -------
    Tensor, shape (n, k)
        In the dtype of ``b``.

    Examples
    --------
    >>> import torch
    >>> from neula.algorithms.lu import lu_factorize
    >>> from neula.engines import EmulatedEngine
    >>> a = torch.tensor([[0.0, 2.0], [4.0, 8.0]])
    >>> factors = lu_factorize(a, EmulatedEngine(), pivoting=True)
    >>> solve_factored(factors, a.sum(1, keepdim=True))
    tensor([[1.],
            [1.]])
    """
    n = factors.lu.shape[0]
    x = b[factors.permutation]
    steps = list(blocks(slice(0, n), WIDTH))
    for k in steps:
        below = slice(k.stop, n)
        _solve_block(factors.lu, x, k, below, upper=False)
    for k in reversed(steps):
        above = slice(0, k.start)
        _solve_block(factors.lu, x, k, above, upper=True)
    return x


def _solve_block(lu: torch.Tensor, x: torch.Tensor, k: slice, rest: slice, *, upper: bool) -> None:
    """Solve for the unknowns ``k``, and subtract what they contribute to the rest."""
    diagonal = lu[k, k].to(x.dtype)
    x[k] = torch.linalg.solve_triangular(diagonal, x[k], upper=upper, unitriangular=not upper)
    x[rest] -= exact_matmul(lu[rest, k].to(x.dtype), x[k])
