"""Rounding, bit by bit, against NumPy's float16 and against exact rational arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from neula.engines.formats import (
    BF16,
    FORMATS,
    FP16,
    FP32,
    FP64,
    TF32,
    Format,
    format_named,
    format_of,
    round_to,
)

NARROW = pytest.mark.parametrize("target", [FP16, BF16, TF32], ids=lambda f: f.name)


def nearest(x: float, target: Format) -> float:
    """Round to nearest, ties to even, in rational arithmetic: the definition, one number at a time."""
    if x == 0 or not math.isfinite(x):
        return x
    exponent = max(math.frexp(x)[1] - 1, 1 - target.max_exponent)
    unit = Fraction(2) ** (exponent - target.significand + 1)
    rounded = round(Fraction(x) / unit) * unit  # Python rounds a Fraction half to even
    if abs(rounded) >= Fraction(2) ** (target.max_exponent + 1):
        return math.copysign(math.inf, x)
    return math.copysign(float(rounded), x)


def any_float32(count: int, seed: int) -> torch.Tensor:
    """Random bit patterns: every exponent, subnormal numbers, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def around(target: Format, count: int, seed: int) -> torch.Tensor:
    """Float64 numbers from below the smallest subnormal number of the target to beyond its largest."""
    generator = torch.Generator().manual_seed(seed)
    low, high = 1 - target.max_exponent - target.significand - 3, target.max_exponent + 2
    exponents = torch.randint(low, high, (count,), generator=generator)
    significands = 1 + torch.rand(count, generator=generator, dtype=torch.float64)
    signs = 1 - 2 * torch.randint(0, 2, (count,), generator=generator)
    return torch.ldexp(signs * significands, exponents.double())


def ties(target: Format, count: int, seed: int) -> torch.Tensor:
    """Float64 numbers halfway between two neighbours of the target, subnormal ones among them."""
    generator = torch.Generator().manual_seed(seed)
    smallest = 1 - target.max_exponent - target.significand + 1
    largest = target.max_exponent - target.significand + 1
    exponents = torch.randint(smallest, largest + 1, (count,), generator=generator).double()
    whole = torch.randint(0, 2**target.significand, (count,), generator=generator)
    return torch.ldexp(whole.double() + 0.5, exponents)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal including the sign of zero; one NaN is as good as another."""
    integer = {4: torch.int32, 8: torch.int64}[a.element_size()]
    equal = (a.contiguous().view(integer) == b.contiguous().view(integer)) | (a.isnan() & b.isnan())
    return a.dtype == b.dtype and bool(equal.all())


@pytest.mark.parametrize("target", FORMATS.values(), ids=lambda f: f.name)
def test_parameters_are_those_of_the_torch_types(target: Format) -> None:
    info = torch.finfo(target.dtype)
    if target is TF32:  # the exponent range of float32, the significand of fp16
        assert (target.u, target.max_exponent) == (FP16.u, FP32.max_exponent)
        assert target.largest == (2 - 2.0**-10) * 2.0**127
    else:
        assert target.u == info.eps / 2
        assert target.largest == info.max
    assert target.storage == (torch.float64 if target is FP64 else torch.float32)
    assert format_named(target.name) is target


@pytest.mark.parametrize(
    ("dtype", "target"),
    [(torch.float16, FP16), (torch.bfloat16, BF16), (torch.float32, FP32), (torch.float64, FP64)],
)
def test_format_of_a_dtype(dtype: torch.dtype, target: Format) -> None:
    assert format_of(dtype) is target


def test_fp16_is_numpys_float16_for_any_float32() -> None:
    x = any_float32(1 << 20, seed=1)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        expected = torch.from_numpy(x.numpy().astype(np.float16).astype(np.float32))
    assert same_bits(round_to(x, FP16), expected)


def test_fp16_between_all_of_its_neighbours() -> None:
    """Midpoints go to the even neighbour; one float32 step off the midpoint decides."""
    bits = np.arange(0x7C00, dtype=np.uint16)  # 0 up to the largest finite number
    lower = torch.from_numpy(bits.view(np.float16).astype(np.float32))
    upper = torch.cat([lower[1:], torch.tensor([65536.0])])
    middle = (lower + upper) / 2
    above = torch.nextafter(middle, torch.tensor(math.inf))
    below = torch.nextafter(middle, torch.tensor(-math.inf))
    upper[-1] = math.inf
    even = torch.where(torch.from_numpy(bits % 2 == 0), lower, upper)
    for sign in (1.0, -1.0):
        assert same_bits(round_to(sign * lower, FP16), sign * lower)
        assert same_bits(round_to(sign * middle, FP16), sign * even)
        assert same_bits(round_to(sign * above, FP16), sign * upper)
        assert same_bits(round_to(sign * below, FP16), sign * lower)


@NARROW
def test_any_float32_against_rational_arithmetic(target: Format) -> None:
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan])
    x = torch.cat([special, any_float32(3000, seed=2), around(target, 3000, seed=3).float()])
    expected = torch.tensor([nearest(v, target) for v in x.tolist()], dtype=torch.float64).float()
    assert same_bits(round_to(x, target), expected)


@pytest.mark.parametrize("target", [FP16, BF16, TF32, FP32], ids=lambda f: f.name)
def test_float64_is_rounded_once(target: Format) -> None:
    """Via float32 the tail of a number just off a tie is lost, and the second rounding goes the wrong way.

    Ties go to the even neighbour.
    """
    tie = ties(target, 1000, seed=5)
    off = 1 + 2.0**-40 * (1 - 2 * (torch.arange(1000).double() % 2))
    special = torch.tensor([0.0, -0.0, math.inf, math.nan], dtype=torch.float64)
    x = torch.cat([tie, tie * off, around(target, 1000, seed=6), special])
    expected = torch.tensor([nearest(v, target) for v in x.tolist()], dtype=torch.float64)
    assert same_bits(round_to(x, target), expected)
    assert same_bits(round_to(-x, target), -expected)


def test_fp64_leaves_float64_alone() -> None:
    x = around(FP64, 100, seed=7)
    assert same_bits(round_to(x, FP64), x)


@NARROW
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_of_the_format_stay(target: Format, dtype: torch.dtype) -> None:
    """Every one of them: 2^16 in half precision, 2^19 in tf32."""
    if target is TF32:
        x = (torch.arange(1 << 19, dtype=torch.int64) << 13).to(torch.int32).view(torch.float32)
    else:
        x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(target.dtype)
    x = x[torch.isfinite(x)].to(dtype)
    assert len(x) > 60_000
    assert same_bits(round_to(x, target), x)


@NARROW
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_overflow_starts_half_a_unit_above_the_largest(target: Format, dtype: torch.dtype) -> None:
    half_unit = 2.0 ** (target.max_exponent - target.significand)
    threshold = target.largest + half_unit
    x = torch.full((2,), threshold, dtype=dtype)
    x[1] = torch.nextafter(x[0], torch.zeros((), dtype=dtype))
    expected = torch.tensor([math.inf, target.largest], dtype=dtype)
    assert same_bits(round_to(x, target), expected)
    assert same_bits(round_to(-x, target), -expected)


@NARROW
def test_input_is_left_alone_and_views_are_read_through(target: Format) -> None:
    x = any_float32(600, seed=9).nan_to_num(nan=1.0).reshape(20, 30)
    before = x.clone()
    for view in (x.T, x[::2, 1::3], x[:, 5:6].expand(-1, 4)):
        assert same_bits(round_to(view, target), round_to(view.contiguous(), target))
    assert same_bits(x, before)
