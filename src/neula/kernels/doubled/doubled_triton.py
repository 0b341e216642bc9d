"""Sums and products with their rounding errors, for kernels in Triton.

They are compiled without contractions: a sum that is to be made of rounded products has another rounding
error than one of a multiply-add.
"""

from __future__ import annotations

from neula.kernels.triton_source import jit, tl


@jit
def product_error(a, b, product, FUSED: tl.constexpr):
    """``a b - product``, without a fused multiply-add (Dekker) where Triton's interpreter may round twice."""
    if FUSED:
        error = tl.fma(a, b, -product)
    else:
        a_high, a_low = _halves(a)
        b_high, b_low = _halves(b)
        error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return error


@jit
def _halves(a):
    """A number as the sum of two of half as many bits (Veltkamp)."""
    shifted = a * 134217729.0  # 2^27 + 1
    high = shifted - (shifted - a)
    return high, a - high


@jit
def two_sum(a, b):
    """``a + b`` and its rounding error (Knuth)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


@jit
def add_pairs(a, a_low, b, b_low):
    total, error = two_sum(a, b)
    return total, error + (a_low + b_low)
