"""The least multiple of the identity that makes a Hermitian matrix positive definite."""

from __future__ import annotations

import math

import torch

from neula.algorithms.elimination.cholesky import library_cholesky
from neula.engines.formats import in_double


def least_jitter(a: torch.Tensor) -> float:
    """The least of the numbers 1, 3, 10, 30 ..., to any power of ten, with which ``A + jitter I`` has a
    Cholesky factor in double precision: within a factor of 3.4 of the least of all.

    Matrices are factorized: first with a unit roundoff of A, as kernel matrices need, then with larger steps
    until one succeeds, and by bisection between it and one that fails. Every matrix is definite beyond
    Gershgorin's bound.

    ``a``, shape (n, n): finite; the lower triangle is read. What is added is rounded as the user's addition
    would be. Infinite where the sum overflows.

    >>> least_jitter(torch.tensor([[1.0, 0.0], [3.0, 1.0]]))
    3.0
    """

    def fails(place: int) -> bool:
        shifted = a.clone()
        shifted.diagonal().add_(_on_grid(place))
        if not _on_grid(place) or not bool(shifted.diagonal().isfinite().all()):
            return True
        scaled = torch.ldexp(in_double(shifted), torch.tensor(-exponent, device=a.device))
        return bool(library_cholesky(scaled[None]).order.any())

    size = float(a.diagonal().real.abs().max()) or 1.0
    # Numbers near 1 neither overflow nor underflow; powers of 4 change no rounding error.
    exponent = 2 * (math.frexp(size)[1] // 2)
    high = math.floor(2 * (math.log10(size) + math.log10(torch.finfo(a.dtype).eps)))
    step, low, top = 1, None, math.floor(2 * math.log10(torch.finfo(a.dtype).max))
    while fails(high):
        if high >= top:
            return math.inf
        low, high, step = high, min(high + step, top), 2 * step
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
