"""Column scaling: powers of two, exact both ways."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neula.algorithms.scaling import binary_exponents, power_of_two_scales, two_product
from neula.kernels.shift import LIMIT, shift

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def is_power_of_two(x: torch.Tensor) -> bool:
    return bool((torch.frexp(x).mantissa == 0.5).all())


@DTYPES
def test_every_normal_number_comes_into_the_upper_half_of_one(dtype: torch.dtype) -> None:
    """All exponents whose scale has a finite reciprocal, and the edges of each binade."""
    last = 125 if dtype == torch.float32 else 1021
    powers = torch.ldexp(torch.ones((), dtype=dtype), torch.arange(-last, last + 1).to(dtype))
    below = torch.nextafter(2 * powers, torch.zeros((), dtype=dtype))
    column_max = torch.cat([powers, 1.5 * powers, below])
    scales = power_of_two_scales(column_max)
    assert scales.dtype == dtype
    assert is_power_of_two(scales)
    scaled = scales * column_max
    assert ((scaled >= 0.5) & (scaled < 1)).all()


@DTYPES
def test_scales_and_their_reciprocals_are_finite_at_the_ends_of_the_range(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    column_max = torch.tensor([info.max, info.tiny, info.smallest_normal, info.tiny / 4], dtype=dtype)
    scales = power_of_two_scales(column_max)
    assert is_power_of_two(scales)
    assert torch.isfinite(scales).all()
    assert torch.isfinite(1 / scales).all()
    assert torch.equal(1 / (1 / scales), scales)
    # Nothing overflows fp16, whose largest number is 65504.
    assert (scales * column_max <= 4).all()
    assert (scales * column_max > 0).all()


@DTYPES
def test_scaling_is_undone_exactly(dtype: torch.dtype) -> None:
    """Columns of 1e-30 to 1e30: neither step rounds anything."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.linspace(-30, 30, 61, dtype=torch.float64)
    a = (torch.randn(40, 61, generator=generator, dtype=torch.float64) * sizes).to(dtype)
    scales = power_of_two_scales(a.abs().max(0).values)
    scaled = a * scales
    assert torch.equal(scaled / scales, a)
    assert (scaled.abs().max(0).values < 1).all()


ENDS = [
    *(2.0**-1074, 3 * 2.0**-1074, 2.0**-1022 - 2.0**-1074, 2.0**-1022),
    *(1.0, 1.75, 2.0**1023, (2 - 2.0**-52) * 2.0**1023),
]


def shifted(x: float, exponent: int) -> float:
    return shift(torch.tensor([x], dtype=torch.float64), torch.tensor([exponent])).item()


def nearest(x: float, exponent: int) -> float:
    """``x 2^exponent`` rounded once."""
    try:
        return math.ldexp(x, exponent)
    except OverflowError:
        return math.copysign(math.inf, x)


@pytest.mark.parametrize("x", ENDS)
def test_shift_at_the_ends_of_the_range(x: float) -> None:
    """To every number that float64 holds, from every one, without an overflow on the way."""
    for exponent in (-2097, -2045, -2044, -1074, -1, 0, 1, 537, 1023, 1024, 1074, 2044, 2097):
        assert shifted(-x, exponent) == -nearest(x, max(-LIMIT, min(LIMIT, exponent)))


@settings(max_examples=200, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(-LIMIT, LIMIT))
def test_shift_is_exact_where_the_result_is_normal(x: float, exponent: int) -> None:
    expected = nearest(x, exponent)
    if expected == 0 or abs(expected) >= 2.0**-1022:
        assert shifted(x, exponent) == expected
    else:
        assert abs(shifted(x, exponent) - expected) <= 2.0**-1074


@pytest.mark.parametrize("last", [7, 9])
def test_shift_rounds_subnormal_numbers_to_a_unit(last: int) -> None:
    """To 7/16 and 9/16 of a unit, which are no ties: in the two steps they become ones, by way of 2/4."""
    odd = math.ldexp(2**52 + 16 + last if last == 7 else 2**52 + last, -1074)
    assert abs(Fraction(shifted(odd, -4)) - Fraction(odd) / 16) <= Fraction(2) ** -1074


@pytest.mark.parametrize("x", ENDS)
def test_binary_exponents_bring_every_number_below_one(x: float) -> None:
    e = int(binary_exponents(torch.tensor([x], dtype=torch.float64)))
    assert 0.5 <= shifted(x, -e) < 1
    assert shifted(shifted(x, -e), e) == x


@settings(max_examples=300, deadline=None)
@given(*[st.floats(-1e100, 1e100).filter(lambda x: x == 0 or abs(x) > 1e-100)] * 2)
def test_two_product_is_exact(x: float, y: float) -> None:
    high, low = two_product(*torch.tensor([[x], [y]], dtype=torch.float64))
    assert high.item() == x * y
    assert Fraction(high.item()) + Fraction(low.item()) == Fraction(x) * Fraction(y)
