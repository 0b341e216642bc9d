"""The least multiple of the identity that makes a symmetric matrix positive definite."""

from __future__ import annotations

import math

import torch

from neula.algorithms.elimination.cholesky import library_cholesky


def least_jitter(a: torch.Tensor) -> float:
    """The least of the numbers 1, 3, 10, 30 ..., to any power of ten, with which ``A + jitter I`` has a
    Cholesky factor in double precision: within a factor of 3.4 of the least of all.

    Matrices are factorized: first with a unit roundoff of A, as kernel matrices need, then with larger steps
    until one succeeds, and by bisection between it and one that fails. Every matrix is definite beyond
    Gershgorin's bound.

    Parameters
    ----------
    a : Tensor, shape (n, n)
        Finite; the lower triangle is read. What is added is rounded as the user's addition would be.

    Returns
    -------
    float
        0 if A has a factor; infinite where the diagonal is out of range.

    Examples
    --------
    >>> least_jitter(torch.tensor([[1.0, 0.0], [2.0, 1.0]]))
    3.0
    """

    def fails(place: int) -> bool:
        shifted = a.clone()
        shifted.diagonal().add_(_on_grid(place))
        return bool(library_cholesky(shifted[None].double()).order.any())

    if not bool(library_cholesky(a[None].double()).order.any()):
        return 0.0
    size = float(a.diagonal().abs().max()) or 1.0
    high = math.floor(2 * math.log10(size * torch.finfo(a.dtype).eps))
    step, low = 1, None
    while fails(high):
        low, high, step = high, high + step, 2 * step
        if not math.isfinite(_on_grid(high)):
            return math.inf
    step = 1
    while low is None or high - low > 1:
        place = high - step if low is None else (low + high) // 2
        if fails(place):
            low = place
        else:
            high, step = place, 2 * step
    return _on_grid(high)


def _on_grid(place: int) -> float:
    """1, 3, 10, 30 ... for 0, 1, 2, 3 ...; a decimal number that is printed without rounding."""
    power, odd = divmod(place, 2)
    return float(f"{'3' if odd else '1'}e{power}")
