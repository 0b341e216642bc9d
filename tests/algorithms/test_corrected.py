"""Corrected products against float64, in the arithmetic of tensor cores as it is emulated."""

from __future__ import annotations

import math

import pytest
import torch

from neula.algorithms.corrected import (
    balanced,
    corrected_bmm,
    corrected_product,
    scaled_product,
    split,
    unbalanced,
)
from neula.engines import BF16, FP16, FP32, TF32, UNITS, EmulatedEngine
from neula.engines.formats import round_to
from neula.kernels.products.kept import Kept
from neula.kernels.products.parts import SCHEMES

U = FP32.u
FORMATS = [FP16, TF32, BF16]


def uniform(m: int, n: int, seed: int, low: float = -1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(m, n, generator=generator) * (1 - low) + low


def wide(m: int, n: int, seed: int, decades: float = 8.0) -> torch.Tensor:
    """Both signs, magnitudes of uniform logarithm from 10^-decades to 10^decades."""
    return 10 ** (decades * uniform(m, n, seed)) * uniform(m, n, seed + 1000).sign()


def errors(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``|C - A B| / (|A| |B|)`` in units of u."""
    a, b = a.double(), b.double()
    return (c.double() - a @ b).abs() / (a.abs() @ b.abs()) / U


def bound(k: int, engine: EmulatedEngine | None = None, run: int = 64) -> float:
    """In units of u: 2 for splitting each operand, 4 for the dropped product, 4 for adding corrections and
    undoing scales; k / run sums that are added to nearest err by the square root of their number (twice
    that for all entries together); in a run those of an ideal unit likewise, and others lose what they cut
    off.
    """
    engine = engine or EmulatedEngine()
    ideal = engine.unit.extra_bits is None
    lost = 2 * math.sqrt(run) if ideal else engine.unit.sum_error(run, engine.block) / U
    return 12 + 2 * math.sqrt(k / run) + lost


# ---------------------------------------------------------------- splitting


@pytest.mark.parametrize("format", [FP16, TF32])
def test_two_parts_have_22_bits(format):
    x = uniform(100, 100, 0) * 1000
    high, low = split(x, format)
    assert torch.equal(high, round_to(x, format))
    assert torch.equal(low, round_to(low, format))
    error = (x.double() - high.double() - low.double() / 2**11).abs()
    # A remainder in [2^-12, 2^-11) of a number in [1, 2) is rounded to a multiple of 2^-22.
    normal = x.abs() >= 2.0**-13
    assert (error[normal] <= 2 * U * x.double().abs()[normal]).all()


@pytest.mark.parametrize("format", FORMATS)
def test_kernels_split_alike(format):
    scheme = SCHEMES[f"{format.name}_cor"]
    x = wide(60, 70, 3, decades=12)
    scaled, exponents = balanced(x, scheme.top)
    kept = Kept.from_matrix(x, scheme)
    parts, kernel_exponents = kept.parts, kept.exponents
    assert torch.equal(exponents, kernel_exponents)
    for part, expected in zip(parts, split(scaled, format, scheme.parts, 2.0**scheme.shift), strict=True):
        assert torch.equal(part.float(), expected)


# ---------------------------------------------------------------- scaling


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scales_are_undone_exactly(dtype):
    limit = 33 if dtype == torch.float32 else 300
    x = (wide(50, 20, 4, 3).double() * 10 ** (limit * uniform(50, 1, 5).double())).to(dtype)
    scaled, exponents = balanced(x)
    largest = scaled.abs().amax(1)
    assert ((largest >= 2.0**14) & (largest <= 2.0**15)).all()
    back = unbalanced(scaled.to(dtype), exponents, torch.zeros(20, dtype=torch.int32))
    assert ((back - x).abs() <= (0 if dtype == torch.float32 else U) * x.abs()).all()


def test_one_scale_may_be_out_of_range_if_the_product_is_not():
    """Either scale alone would overflow or leave nothing of the product."""
    a, b = torch.full((3, 4), 1e-44), torch.full((4, 2), 3e38)
    for engine in (EmulatedEngine(format="fp16"), EmulatedEngine(format="bf16")):
        assert errors(corrected_product(a, b, engine), a, b).max() <= bound(4)
        assert errors(corrected_product(b.T, a.T, engine), b.T, a.T).max() <= bound(4)


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("format", FORMATS)
def test_sixteen_decades_with_rows_of_zeros_and_nan(format):
    """Much worse without correction, which the products of moderate numbers show."""
    a, b = wide(30, 300, 12), wide(300, 30, 13)
    a[0], a[1, 2], a[2, 5], b[:, 0] = 0, math.nan, math.inf, 0
    engine = EmulatedEngine("cpu", format)
    c = corrected_product(a, b, engine)
    assert not c[1:3].isfinite().any()
    assert not c[0].any()
    assert not c[3:, 0].any()
    assert errors(c, a, b)[3:, 1:].max() <= bound(300, engine)
    x, y, ideal = uniform(40, 300, 10), uniform(300, 40, 11), EmulatedEngine("cpu", format, "ideal")
    assert errors(corrected_product(x, y, ideal), x, y).max() <= bound(300, ideal)
    assert errors(scaled_product(x, y, ideal), x, y).max() > 10 * bound(300, ideal)


def test_long_sums_on_a_unit_that_truncates():
    """Errors of one sign add up; in short runs they have no time to."""
    k = 8192
    a, b = uniform(8, k, 14, 0.0), uniform(k, 8, 15, 0.0)
    engine, ideal = EmulatedEngine("cpu", FP16), EmulatedEngine("cpu", FP16, "ideal")
    assert errors(corrected_product(a, b, engine), a, b).max() <= bound(k, engine)
    at_once = errors(corrected_product(a, b, engine, run=k), a, b)
    assert at_once.min() > bound(k, engine)
    # Rounding to nearest inside the unit would not need the runs.
    assert errors(corrected_product(a, b, ideal, run=k), a, b).max() <= bound(k, ideal, run=k)


@pytest.mark.parametrize("format", FORMATS)
def test_tiny_elements_beside_a_large_one(format):
    """Absolute errors of 2^-50 of the largest element in the row, in fp16."""
    a = torch.tensor([[1.0, 1e-10, 3e-13, 7e-16, 1e-25]])
    c = corrected_product(a, torch.eye(5), EmulatedEngine(format=format))
    absolute = 2.0**-50 if format is FP16 else 0.0
    assert ((c.double() - a.double()).abs() <= 2 * U * a.double() + absolute).all()


# ---------------------------------------------------------------- batches of small products


@pytest.mark.parametrize("format", [FP16, TF32])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 2, 5, 7), (4, 20, 256, 9), (0, 3, 4, 5)])
def test_batches(format, shape):
    """Without runs: all sums are the unit's."""
    batch, m, k, n = shape
    a, b = uniform(batch * m, k, 22).view(batch, m, k), uniform(batch * k, n, 23).view(batch, k, n)
    for unit in UNITS:
        engine = EmulatedEngine("cpu", format, unit)
        c = corrected_bmm(a, b, engine)
        assert (c.shape, c.dtype) == ((batch, m, n), torch.float32)
        assert (errors(c, a, b) <= bound(k, engine, run=k)).all()
        ideal = EmulatedEngine(unit="ideal")
        assert batch == 0 or k < 256 or errors(engine.bmm(a, b), a, b).max() > 10 * bound(k, ideal, run=k)


def test_remainders_of_a_batch_stay_out_of_the_subnormal_numbers():
    """Elements of 2^-10, of which the remainder is 2^-22: it is the scale that keeps its bits in fp16."""
    a, b = uniform(30, 64, 26)[None] * 2.0**-10, uniform(64, 20, 27)[None]
    assert errors(corrected_bmm(a, b, EmulatedEngine(format="fp16")), a, b).max() <= bound(64, run=64)
