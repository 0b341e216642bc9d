"""Small eigenvalues, foretold by the pivots of a Cholesky factorization that is under way."""

from __future__ import annotations

import math

import torch

TINY = 1e-30
"""In place of a pivot that is zero."""


class FallingPivotsError(ArithmeticError):
    """Pivots fall so fast that factors in a format will hold nothing but rounding errors in some direction.

    Attributes
    ----------
    smallest : float
        The smallest eigenvalue as it seems, of the matrix with a diagonal of ones.
    """

    def __init__(self, smallest: float) -> None:
        super().__init__(f"pivots fall, and the smallest eigenvalue will be about {smallest:.1e}")
        self.smallest = smallest


def foresee(pivots: torch.Tensor, n: int, smallest: float) -> None:
    """Give up where rounding errors will exceed the smallest eigenvalue, as pivots foretell.

    In a matrix whose eigenvalues fall geometrically and whose eigenvectors are random, the logarithm of the
    smallest pivot so far is about quadratic in the number of rows, and for all of them about that of the
    smallest eigenvalue: for condition numbers from 1e2 to 1e12 within a factor of four by half of the rows.
    Where a multiple of the identity is added, pivots do not fall below that.

    Parameters
    ----------
    pivots : Tensor, shape (done,)
        Those so far, of the matrix with a diagonal of ones.
    n : int
        Order of the matrix.
    smallest : float
        Lower bound wanted for the eigenvalues.

    Raises
    ------
    FallingPivotsError
        If one seems to be.
    """
    done = len(pivots)
    smallest_so_far = torch.stack([pivots[: done // 2].amin(), pivots.amin()])
    half, whole = smallest_so_far.clamp_min(TINY).log().tolist()
    rows = n / done
    linear, square = 4 * half - whole, 2 * whole - 4 * half
    expected = min(whole, rows * linear + rows**2 * square)
    if expected < math.log(smallest):
        raise FallingPivotsError(math.exp(expected))
