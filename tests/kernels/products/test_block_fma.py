"""Sums of matrix units against a transcription of the model in rational arithmetic, one number at a time."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from tests.devices import DEVICE, KERNEL, variants

from neula.engines import UNITS, EmulatedEngine
from neula.kernels.core import core
from neula.kernels.products import block_fma
from neula.kernels.products.block_fma import block_fma_product

UNIT = pytest.mark.parametrize("unit", ["v100", "a100", "h100"])
FORMAT = pytest.mark.parametrize("format", ["fp16", "bf16", "tf32"])


def exponent(x: float, least: int) -> int:
    """``floor(log2 |x|)``, for subnormal numbers that of the smallest normal one."""
    return max(math.frexp(x)[1] - 1, least)


def truncated(x: Fraction, bits: int = 24) -> Fraction:
    """Cut off after so many significant bits."""
    if x == 0:
        return x
    top = abs(x.numerator).bit_length() - abs(x.denominator).bit_length()
    top -= abs(x) < Fraction(2) ** top
    last = Fraction(2) ** (top - bits + 1)
    return int(x / last) * last


def summed(row: list[float], column: list[float], engine: EmulatedEngine) -> float:
    """Khattak and Mikaitis: align terms to the largest exponent, cut each off, add, cut the sum off."""
    least, bits, total = 1 - engine.format.max_exponent, engine.unit.extra_bits, Fraction(0)
    assert bits is not None
    for k in range(0, len(row), engine.block):
        pairs = list(zip(row[k : k + engine.block], column[k : k + engine.block], strict=True))
        terms = [
            (Fraction(x) * Fraction(y), exponent(x, least) + exponent(y, least)) for x, y in pairs if x and y
        ]
        if total:
            terms.append((total, exponent(float(total), -126)))
        if terms:
            last = Fraction(2) ** (max(top for _, top in terms) - 23 - bits)
            total = truncated(sum(int(x / last) for x, _ in terms) * last)
    return float(total)


def operands(engine: EmulatedEngine, m: int, k: int, n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of many sizes, some of them zero, some subnormal in fp16, some columns that cancel."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (
        torch.randn(*shape, generator=generator)
        * torch.exp2(torch.randint(-12, 6, shape, generator=generator).float())
        for shape in ((m, k), (k, n))
    )
    a[0, ::3] = 0
    a[1 % m] *= 2.0**-13
    b[k // 2 :, 0] = -b[: k - k // 2, 0].clone()
    a[2 % m, k // 2 :] = a[2 % m, : k - k // 2].clone()
    return engine.operand(a), engine.operand(b)


@UNIT
@FORMAT
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (3, 16, 3), (4, 37, 4)])
def test_bit_by_bit(format: str, unit: str, m: int, k: int, n: int) -> None:
    engine = EmulatedEngine("cpu", format, unit)
    a, b = operands(engine, m, k, n, seed=k)
    expected = [[summed(row, column, engine) for column in b.T.tolist()] for row in a.tolist()]
    assert torch.equal(engine.gemm(a, b), torch.tensor(expected))


@pytest.mark.skipif(core() is None, reason="no compiled core")
@UNIT
@pytest.mark.parametrize("shape", [(3, 70, 33, 41), (2, 1, 5, 300), (4, 9, 0, 3), (0, 2, 3, 4)])
def test_compiled_and_in_torch_are_the_same(unit: str, shape: tuple[int, ...], monkeypatch) -> None:
    batch, m, k, n = shape
    engine = EmulatedEngine("cpu", "fp16", unit)
    generator = torch.Generator().manual_seed(1)
    a = engine.operand(torch.randn(batch, m, k, generator=generator))
    b = engine.operand(torch.randn(batch, k, n, generator=generator))
    found = engine.bmm(a, b)
    monkeypatch.setattr(block_fma, "core", lambda: None)
    monkeypatch.setitem(block_fma.PRODUCTS, "cpu", 100)
    assert torch.equal(engine.bmm(a, b), found)


truncated_sums = variants(block_fma.truncated_sums, KERNEL)


@UNIT
@pytest.mark.parametrize(("format", "batch"), [("fp16", (2,)), ("bf16", ()), ("tf32", ())])
def test_truncated_by_the_kernel(truncated_sums, format: str, unit: str, batch: tuple[int, ...]) -> None:
    """Bit by bit what plain torch computes, also for tiles that are not whole and for a transposed B."""
    engine = EmulatedEngine("cpu", format, unit)
    a, b = operands(engine, 33, 9, 65, seed=5)
    if format != "fp16":
        a, b = a.double(), b.double()
    a, b = a.expand(*batch, 33, 9).to(DEVICE), b.T.contiguous().T.expand(*batch, 9, 65).to(DEVICE)
    assert engine.unit.extra_bits is not None
    given = a, b, engine.block, 2.0 ** (-23 - engine.unit.extra_bits), 1 - engine.format.max_exponent
    found = truncated_sums(*given)
    assert torch.equal(found, block_fma.truncated_sums.reference(*given))
    assert found.abs().max() > 0


@pytest.mark.gpu
@UNIT
def test_on_a_gpu_as_on_a_cpu(unit: str) -> None:
    here, there = (EmulatedEngine(device, "fp16", unit) for device in ("cpu", "cuda"))
    a, b = operands(here, 70, 90, 50, seed=2)
    assert torch.equal(there.gemm(a.cuda(), b.cuda()).cpu(), here.gemm(a, b))


@UNIT
@FORMAT
@pytest.mark.parametrize("k", [3, 64, 1000])
def test_sums_err_by_what_theory_allows(format: str, unit: str, k: int) -> None:
    engine = EmulatedEngine("cpu", format, unit)
    generator = torch.Generator().manual_seed(3)
    for low in (-1.0, 0.0):
        a, b = (
            engine.operand(torch.rand(*shape, generator=generator) * (1 - low) + low)
            for shape in ((40, k), (k, 40))
        )
        exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
        limit = engine.unit.sum_error(k, engine.block)
        assert float(((engine.gemm(a, b) - exact).abs() / size).max()) <= limit


def test_the_bound_is_nearly_attained() -> None:
    """Four products just below the last bit of the sum are lost: 8 of the 24 u that theory allows."""
    unit = UNITS["v100"]
    engine = EmulatedEngine("cpu", "fp16", unit)
    a = torch.tensor([[1.0, 0, 0, 0] + [2.0**-12 * (2 - 2.0**-9)] * 4])
    b = torch.ones(8, 1) * 2.0**-12
    b[0] = 1
    exact = float(a.double() @ b.double())
    error = (exact - float(engine.gemm(a, b))) / exact
    assert 7 * 2.0**-24 < error <= unit.sum_error(8, 4)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    a, b = torch.ones(3, 10), torch.ones(10, 4)
    a[1, 7] = bad
    found = block_fma_product(a, b, block=4, extra_bits=0, min_exponent=-14)
    assert torch.equal(found[[0, 2]], torch.full((2, 4), 10.0).double())
    assert torch.equal(found[1].isnan(), torch.full((4,), math.isnan(bad)))
    assert not found[1].isfinite().any()
