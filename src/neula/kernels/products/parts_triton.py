"""How float32 operands become parts of a narrower format: device functions that several kernels share.

:mod:`neula.kernels.products.parts` says what parts are, and has the same functions in plain torch.
"""

from __future__ import annotations

from neula.kernels.triton_source import jit, tl


@jit
def split(x, LOW: tl.constexpr):
    """``x`` as ``high + low``, rounded to a narrow type each."""
    high = x.to(LOW)
    return high, remainder(x, high, 1.0)


@jit
def remainder(x, high, SCALE: tl.constexpr):
    """Rounding error of ``high`` as a copy of x, times SCALE, in the type of ``high``."""
    rest = x - high.to(tl.float32)
    if SCALE != 1.0:
        rest = rest * SCALE
    return rest.to(high.dtype)


@jit
def product_of_parts(a_high, a_low, b_high, b_low):
    """``A B`` without ``A_low B_low``, smallest first, all of it summed on the unit."""
    return tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))


@jit
def round_to_bits(x, SIGNIFICAND: tl.constexpr):
    """float32 rounded to so many bits, to nearest, ties to even; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    last = (bits >> (24 - SIGNIFICAND)) & 1
    nearest = (bits + ((1 << (23 - SIGNIFICAND)) - 1) + last) & -(1 << (24 - SIGNIFICAND))
    return tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)


@jit
def exponents_of(largest):
    """``e`` with ``2**e <= largest < 2**(e+1)``; less than the smallest normal number counts as that one."""
    return tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) & 255, 1) - 127


@jit
def power_of_two(exponents):
    """``2**exponents``, where that is a normal number."""
    return ((exponents + 127) << 23).to(tl.float32, bitcast=True)


@jit
def times_power_of_two(x, exponents):
    """``x 2**exponents``, by two factors, since one alone may be out of range."""
    half = exponents >> 1
    first, second = power_of_two(half), power_of_two(exponents - half)
    return x * first * second
