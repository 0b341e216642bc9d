"""Complex products: every mode, mixed with real ones, against complex128 in the bounds of the docstring."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import neula
from neula.engines import UNITS, EmulatedEngine
from neula.problems.products.matmul import MODES

U = 2.0**-24
KINDS = list(itertools.product(("real", "complex"), repeat=2))[1:]
OPERAND = {"fp16": 2.0**-10, "tf32": 2.0**-9, "bf16": 2.0**-7}
RANGE = {"fp16": 2.0**-39, "fp16_cor": 2.0**-50}

EACH_MODE = pytest.mark.parametrize("mode", MODES)


def matrix(kind: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.complex64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dtype = dtype if kind == "complex" else dtype.to_real()
    return torch.randn(*shape, generator=generator, dtype=dtype)


def stated(mode: str, k: int, run: float, *, real: bool) -> float:
    """The f of ``|C - A B| <= f |A| |B|`` that the docstring states."""
    if mode in ("fp32", "fp64"):
        return (1.0 if real else 2**1.5) * k * (U if mode == "fp32" else 2.0**-53)
    sums = {"fp16_cor": 12 + run + k / 50, "tf32_cor": 12 + run + k / 50, "bf16_cor": 6 + run + k / 30}
    f = sums[mode] * U if mode in sums else OPERAND[mode] + math.ceil(k / 64) * max(run, 128) * U
    return f * math.sqrt(2) if real else 3.2 * f + 12 * U


def excess(c, a, b, mode: str, run: float = 130.0) -> float:
    """The largest error relative to what is stated, with the rounding of the result and the range of fp16."""
    unit = torch.finfo(torch.as_tensor(c).dtype).eps / 2
    a, b, c = (torch.as_tensor(x).to(torch.complex128) for x in (a, b, c))
    exact, real = a @ b, not (a.imag.any() and b.imag.any())
    allowed = stated(mode, a.shape[-1], run, real=real) * (a.abs() @ b.abs())
    allowed += unit * exact.abs()
    rows, columns = a.abs().amax(-1, keepdim=True), b.abs().amax(-2, keepdim=True)
    lost = rows * b.abs().sum(-2, keepdim=True) + a.abs().sum(-1, keepdim=True) * columns
    allowed += 4 * RANGE.get(mode, 0.0) * lost
    return float(((c - exact).abs() / allowed.clamp_min(1e-300)).max())


@EACH_MODE
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 5, 3), (20, 15, 130)])
def test_every_mode(mode, kinds, m, n, k):
    a, b = matrix(kinds[0], m, k), matrix(kinds[1], k, n, seed=1)
    before = a.clone(), b.clone()
    c = neula.matmul(a, b, compute=mode, engine="emulated")
    assert (c.shape, c.dtype, c.is_contiguous(), c.is_conj()) == ((m, n), torch.complex64, True, False)
    assert excess(c, a, b, mode if mode != "fp64" else "fp32") <= 1
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])


@EACH_MODE
@pytest.mark.parametrize("unit", UNITS)
def test_bounds_hold_for_hard_matrices(mode, unit):
    engine = EmulatedEngine("cpu", unit=unit)
    used = engine.using("tf32") if "tf32" in mode else engine
    run = used.unit.sum_error(64, used.block) / U
    sizes = torch.logspace(0, -12, 300)
    rows = 10.0 ** torch.linspace(-15, 15, 6)[:, None]
    angle = torch.polar(torch.ones(300), torch.linspace(0, 7, 300))
    a, b = matrix("complex", 6, 300), matrix("complex", 300, 5, seed=1)
    for x, y in (
        (a, b),
        (a.abs() * angle, b.abs() * angle.conj()[:, None]),  # in phase: nothing cancels
        (a * rows, b * rows[:5].mT),
        (a * sizes, b * sizes.flip(0)[:, None]),
        (a.real + 1e-6j * a.imag, b.real + 1e-6j * b.imag),
        (a.real * 1j, b.imag * 1j),
        (a.real + 0j, b),
    ):
        assert excess(neula.matmul(x, y, compute=mode, engine=engine), x, y, mode, run) <= 1


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("engine", ["cpu", "emulated"])
def test_dtypes(engine, kinds):
    """The default is the accuracy of the dtype; products of complex128 in a narrower mode are complex128."""
    a, b = matrix(kinds[0], 20, 90), matrix(kinds[1], 90, 10, seed=1)
    c = neula.matmul(a, b, engine=engine)
    assert c.dtype == torch.complex64
    assert excess(c, a, b, "fp32") <= 1
    wide_a, wide_b = (x.to(torch.promote_types(x.dtype, torch.float64)) for x in (a, b))
    for x, y in ((a, wide_b), (a.to(torch.complex128), b)):
        c = neula.matmul(x, y, engine=engine)
        assert c.dtype == torch.complex128
        assert excess(c, x, y, "fp64") <= 1
    for mode in ("fp32", "fp16_cor", "bf16") if engine == "emulated" else ():
        x, y = wide_a * 1e60, wide_b * 1e-70
        c = neula.matmul(x, y, compute=mode, engine=engine)
        assert c.dtype == torch.complex128
        assert excess(c, x, y, mode, 200.0) <= 1
    half = matrix("real", 4, 5).half()
    assert neula.matmul(half, matrix("complex", 5, 2), engine=engine).dtype == torch.complex64


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize(
    ("left", "right"),
    [((2, 3, 4, 5), (5, 6)), ((4, 5), (2, 5, 6)), ((2, 1, 4, 5), (3, 5, 6)), ((5,), (5,)), ((3, 4, 5), (5,)),
     ((0, 3), (3, 2)), ((3, 0), (0, 5)), ((2, 2, 3), (2, 3, 0)), ((3, 40, 7), (3, 7, 6))],
)  # fmt: skip
@pytest.mark.parametrize(("mode", "engine"), [("fp16_cor", "emulated"), ("fp32", "cpu")])
def test_shapes(kinds, left, right, mode, engine):
    a, b = matrix(kinds[0], *left), matrix(kinds[1], *right, seed=1)
    expected = np.matmul(a.numpy(), b.numpy())
    c = neula.matmul(a, b, compute=mode, engine=engine)
    assert (tuple(c.shape), c.dtype) == (expected.shape, torch.complex64)
    np.testing.assert_allclose(c, expected, rtol=0, atol=1e-4)
    numbers = neula.matmul(a.numpy(), b.numpy(), compute=mode, engine=engine)
    assert type(numbers) is type(expected)
    assert numbers.dtype == np.complex64


def test_a_real_operand_stays_real(monkeypatch):
    """Of a real and a complex matrix no complex product is computed, and no three."""
    addmm = torch.addmm
    monkeypatch.setattr(
        torch, "addmm", lambda *x, **_: pytest.fail("complex") if x[0].is_complex() else addmm(*x, **_)
    )
    monkeypatch.setattr(
        "neula.problems.products.matmul.three_products", lambda *_, **__: pytest.fail("three products")
    )
    a, b = matrix("real", 7, 9), matrix("complex", 9, 5, seed=1)
    for mode in ("fp32", "fp16_cor", "fp64"):
        neula.matmul(a, b, compute=mode, engine="emulated")
        neula.matmul(b.mT, a.mT, compute=mode, engine="emulated")


@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_views(kinds):
    a, b = matrix(kinds[0], 12, 8), matrix(kinds[1], 8, 6, seed=1)
    for x in (a.conj(), a.mH.contiguous().mH, a[::2], a.expand(2, 12, 8), a.mT.contiguous().mT):
        assert excess(neula.matmul(x, b), x, b, "fp32") <= 1
        assert excess(neula.matmul(b.mH, x.mH), b.mH, x.mH, "fp32") <= 1
    assert excess(neula.matmul(a.numpy()[::-1], b.numpy()), a.flip(0), b, "fp32") <= 1
