"""neula.matmul against products in float64."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import neula
from neula.engines import BF16, FP16, UNITS, CpuEngine, EmulatedEngine
from neula.engines.shipped import cuda_tuning
from neula.kernels.products.gemm import corrected_gemm
from neula.kernels.products.parts import SCHEMES
from neula.problems.products.matmul import MODES, _cheapest

U = 2.0**-24
HALF_UNIT = {"fp16": 2.0**-11, "tf32": 2.0**-11, "bf16": 2.0**-8}
EACH_MODE = pytest.mark.parametrize("mode", MODES)


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator) * 2 - 1


def wide(*shape: int, seed: int = 0) -> torch.Tensor:
    return 10 ** (8 * uniform(*shape, seed=seed)) * uniform(*shape, seed=seed + 1000).sign()


def bound(mode: str, k: int) -> float:
    """Relative to |A| |B|: two roundings of operands, or those of parts (see the tests of corrected
    products), and sums in float32.
    """
    sums = (12 + 2 * math.sqrt(k)) * U
    return {"fp64": k * 2.0**-53, "fp32": sums}.get(mode, sums + 2.01 * HALF_UNIT.get(mode, 0.0))


def check(c, a, b, mode: str, factor: float = 1.0) -> None:
    a, b, c = (torch.as_tensor(x).double() for x in (a, b, c))
    assert ((c - a @ b).abs() <= factor * bound(mode, a.shape[-1]) * (a.abs() @ b.abs())).all()


# ---------------------------------------------------------------- modes


@pytest.mark.parametrize("mode", HALF_UNIT)
def test_the_correction_is_what_makes_it_accurate(mode):
    a, b = uniform(40, 200), uniform(200, 30, seed=1)
    check(neula.matmul(a, b, compute=f"{mode}_cor", engine="emulated"), a, b, "fp32")
    with pytest.raises(AssertionError):
        check(neula.matmul(a, b, compute=mode, engine="emulated"), a, b, "fp32", 10)


@pytest.mark.parametrize("mode", SCHEMES)
def test_on_a_unit_that_truncates(mode):
    k = 4096
    a, b = uniform(6, k).abs(), uniform(k, 6, seed=1).abs()
    engine = EmulatedEngine()
    check(neula.matmul(a, b, compute=mode, engine=engine), a, b, "fp32")
    # Without short runs: the plain product on the same unit, of operands that fp16 holds exactly.
    exact = [x.half().float() for x in (a, b)]
    with pytest.raises(AssertionError):
        check(neula.matmul(*exact, compute="fp16", engine=engine), *exact, "fp32")


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "fp64"])
def test_float64_operands(mode):
    """Outside of the range of float32 as well."""
    a, b = uniform(9, 50).double() * 1e60, uniform(50, 8, seed=1).double() * 1e-70
    c = neula.matmul(a, b, compute=mode, engine="emulated")
    assert c.dtype == torch.float64
    check(c, a, b, mode)


# ---------------------------------------------------------------- the bounds that the docstring states

PLAIN_BOUNDS = {"fp16": 2.0**-10, "tf32": 2.0**-9, "bf16": 2.0**-7}
RANGE = {"fp16": 2.0**-39, "fp16_cor": 2.0**-50}


def stated(mode: str, k: int, run: float) -> float:
    """The f of ``|C - A B| <= f |A| |B|``; ``run`` is what a unit loses in 64 products, in units of u."""
    if mode in PLAIN_BOUNDS:
        return PLAIN_BOUNDS[mode] + math.ceil(k / 64) * max(run, 128) * U
    sums = {"fp16_cor": 12 + run + k / 50, "tf32_cor": 12 + run + k / 50, "bf16_cor": 6 + run + k / 30}
    return sums.get(mode, k) * U


def excess(c, a, b, mode: str, run: float) -> float:
    """The largest error relative to what is stated, with the rounding of the result and the range of fp16."""
    a, b, c = (x.double() for x in (a, b, c))
    exact = a @ b
    allowed = stated(mode, a.shape[1], run) * (a.abs() @ b.abs()) + U * exact.abs()
    rows, columns = a.abs().amax(1, keepdim=True), b.abs().amax(0, keepdim=True)
    lost = rows * b.abs().sum(0, keepdim=True) + a.abs().sum(1, keepdim=True) * columns
    return float(((c - exact).abs() / (allowed + RANGE.get(mode, 0.0) * lost)).max())


def cancelling(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Products that add up to a millionth of their size or less."""
    a, b = uniform(m, k // 2).abs() + 1, uniform(k // 2, n, seed=1).abs() + 1
    return torch.cat([a, -a * (1 + 1e-6 * uniform(m, k // 2, seed=2))], 1), torch.cat([b, b])


def disjoint(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Large elements of A meet nothing but tiny ones of B."""
    sizes = torch.logspace(0, -12, k)
    return uniform(m, k) * sizes, uniform(k, n, seed=1) * sizes.flip(0)[:, None]


HARD = {
    "random": lambda m, n, k: (uniform(m, k), uniform(k, n, seed=1)),
    "positive": lambda m, n, k: (uniform(m, k).abs(), uniform(k, n, seed=1).abs()),
    "cancelling": cancelling,
    "wide": lambda m, n, k: (wide(m, k), wide(k, n, seed=1)),
    "rows and columns in units": lambda m, n, k: (
        uniform(m, k) * 10 ** (18 * uniform(m, 1, seed=2)),
        uniform(k, n, seed=1) * 10 ** (18 * uniform(1, n, seed=3)),
    ),
    "disjoint": disjoint,
    "halves of the last bit": lambda m, n, k: (torch.full((m, k), 1 + 2.0**-11), torch.ones(k, n) + 2.0**-8),
}


@EACH_MODE
@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 2), (7, 5, 130), (6, 4, 2000)])
def test_bounds_hold_for_any_matrices(mode, kind, m, n, k):
    a, b = HARD[kind](m, n, k)
    before = a.clone(), b.clone()
    for unit in UNITS:
        engine = EmulatedEngine("cpu", unit=unit)
        used = engine.using("tf32") if "tf32" in mode else engine
        c = neula.matmul(a, b, compute=mode, engine=engine)
        assert (c.shape, c.dtype, c.is_contiguous()) == ((m, n), torch.float32, True)
        assert torch.equal(a, before[0])
        assert torch.equal(b, before[1])
        assert excess(c, a, b, mode, used.unit.sum_error(64, used.block) / U) <= 1
    if mode in SCHEMES:
        assert excess(corrected_gemm(a, b, SCHEMES[mode]), a, b, mode, 1) <= 1


@EACH_MODE
def test_bounds_hold_for_float64_operands(mode):
    a, b = uniform(7, 300).double() + 2.0**-40, uniform(300, 5, seed=1).double()
    c = neula.matmul(a, b, compute=mode, engine="emulated")
    if mode == "fp64":
        error = (c - a @ b).abs() / (a.abs() @ b.abs())  # of two such products
        assert float(error.max()) <= 2 * 300 * 2.0**-53
    else:
        assert excess(c, a, b, mode, 64 + 2) <= 1


@pytest.mark.parametrize(("mode", "bits"), [("fp16", 11), ("bf16", 8)])
def test_bounds_of_uncorrected_products_are_attained(mode, bits):
    """Numbers half-way between two of the format, all rounded down: errors of 2 u."""
    a = torch.full((2, 200), 1 + 2.0**-bits)
    c = neula.matmul(a, a.T, compute=mode, engine="emulated")
    assert excess(c, a, a.T, mode, 64) > 0.9


# ---------------------------------------------------------------- the default


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
def test_default_is_the_accuracy_of_the_dtype(engine):
    a, b = uniform(20, 90), uniform(90, 10, seed=1)
    check(neula.matmul(a, b, engine=engine), a, b, "fp32")
    check(neula.matmul(a.double(), b.double(), engine=engine), a, b, "fp64")
    check(neula.matmul(a.double(), b, engine=engine), a, b, "fp64")


@pytest.mark.parametrize(
    ("shape", "mode"),
    [
        ((16384, 512, 16384), "fp16_cor"),
        ((12288, 12288, 256), "fp16_cor"),
        ((1000, 100_000, 1000), "fp16_cor"),
        ((128, 524_288, 128), "fp32"),
        ((524_288, 128, 128), "fp32"),
        ((2048, 128, 2048), "fp32"),
        ((20_000, 20_000, 4), "fp32"),
    ],
)
def test_products_are_corrected_where_that_takes_less_time(shape: tuple[int, int, int], mode: str) -> None:
    m, k, n = shape
    engine = type("Tuned", (EmulatedEngine,), {"tuning": cuda_tuning((9, 0))})("cpu")
    assert _cheapest(torch.float32, engine, torch.empty(m, k, device="meta"), (m, n)) == mode


@pytest.mark.parametrize("format", [FP16, BF16])
@pytest.mark.parametrize("engine", ["cpu", "emulated"])
def test_half_precision(engine, format):
    """Operands are exact: errors are those of sums, and of rounding the result."""
    a, b = uniform(20, 64).to(format.dtype), uniform(64, 10, seed=1).to(format.dtype)
    c = neula.matmul(a, b, engine=engine)
    assert c.dtype == format.dtype
    a, b = a.double(), b.double()
    assert ((c.double() - a @ b).abs() <= (format.u + bound("fp32", 64)) * (a.abs() @ b.abs())).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_sums_of_bf16_on_a_cpu_are_not_rounded_to_it(dtype, monkeypatch):
    """Operands are exact in bf16: errors are those of sums in float32, and of the dtype."""
    monkeypatch.setattr("neula.engines.cpu.why_no_bf16", lambda: "")
    a, b = uniform(20, 64).bfloat16().to(dtype), uniform(64, 10, seed=1).bfloat16().to(dtype)
    c = a.double() @ b.double()
    size = a.double().abs() @ b.double().abs()
    allowed = torch.finfo(dtype).eps * (size + 1) + 2 * bound("fp32", 64) * size
    assert ((neula.matmul(a, b, compute="bf16", engine="cpu").double() - c).abs() <= allowed).all()


def test_modes_of_the_cpu():
    for mode in CpuEngine("cpu").formats:
        check(neula.matmul(uniform(9, 8), uniform(8, 7), compute=mode), uniform(9, 8), uniform(8, 7), "bf16")
    with pytest.raises(ValueError, match=r"'fp16_cor'.*choose one of.*'fp32'.*engine='emulated'"):
        neula.matmul(uniform(3, 3), uniform(3, 3), compute="fp16_cor", engine="cpu")


# ---------------------------------------------------------------- shapes and libraries


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("left", "right"), [((2, 3, 40, 70), (2, 3, 70, 6)), ((5, 300, 1), (5, 1, 300))])
def test_small_matrices_of_a_batch_are_multiplied_together(left, right, dtype):
    a, b = uniform(*left).to(dtype), uniform(*right, seed=1).to(dtype).mT.contiguous().mT
    c = neula.matmul(a, b, engine="cpu")
    assert (c.shape, c.dtype) == ((a @ b).shape, dtype)
    k, size = left[-1], a.double().abs() @ b.double().abs()
    sums = k * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    error = (c.double() - a.double() @ b.double()).abs()
    assert (error <= (sums + torch.finfo(dtype).eps) * size).all()


LEADING = [(), (1,), (3,), (0,), (2, 1), (2, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("m", "k", "n"), [(0, 4, 5), (4, 0, 5), (4, 5, 0), (0, 0, 3), (0, 0, 0), (2, 3, 4)])
def test_shapes_and_dtypes_are_those_of_numpy(m, k, n, dtype):
    for left, right in itertools.product(LEADING, LEADING):
        a, b = uniform(*left, m, k).to(dtype), uniform(*right, k, n, seed=1)
        for x, y in ((a, b), (a, uniform(k)), (uniform(k).to(dtype), b)):
            try:
                expected = np.matmul(x.numpy(), y.numpy())
            except ValueError:
                with pytest.raises(ValueError, match="do not go together"):
                    neula.matmul(x, y)
                continue
            for compute, engine in ((None, "cpu"), ("fp16_cor", "emulated")):
                c = neula.matmul(x.numpy(), y.numpy(), compute=compute, engine=engine)
                assert (c.shape, c.dtype) == (expected.shape, expected.dtype)
                np.testing.assert_allclose(c, expected, rtol=0, atol=100 * U * max(k, 1))


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize(
    ("left", "right"), [((5,), (5, 6)), ((4, 5), (5,)), ((5,), (5,)), ((5,), (2, 5, 6)), ((2, 3, 5), (5,))]
)
def test_vectors(left, right, engine):
    a, b = uniform(*left).requires_grad_(), uniform(*right, seed=1).requires_grad_()
    c, expected = neula.matmul(a, b, engine=engine), torch.matmul(a, b)
    assert c.shape == expected.shape
    weights = uniform(*c.shape, seed=2)
    for x, y in zip(
        (c, *torch.autograd.grad((weights * c).sum(), (a, b))),
        (expected, *torch.autograd.grad((weights * expected).sum(), (a, b))),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=0, atol=100 * U)


def test_the_product_of_two_vectors_is_a_number():
    a = np.arange(3.0)
    assert type(neula.matmul(a, a)) is type(np.matmul(a, a)) is np.float64
    assert neula.matmul(a, a) == 5


@pytest.mark.parametrize(("left", "right"), [((2, 3, 0), (0, 4)), ((2, 0, 3), (2, 3, 4)), ((0,), (0,))])
def test_gradients_where_there_is_nothing_to_multiply(left, right):
    a, b = torch.ones(left, requires_grad=True), torch.ones(right, requires_grad=True)
    c = neula.matmul(a, b)
    assert not c.any()
    for x, y in zip(torch.autograd.grad(c.sum(), (a, b)), (a, b), strict=True):
        assert x.shape == y.shape
        assert not x.any()


def test_a_result_that_does_not_fit():
    a = torch.full((4, 4), 1000.0, dtype=torch.float16)
    with pytest.raises(OverflowError, match=r"float16: pass the input in a wider dtype"):
        neula.matmul(a, a)


# ---------------------------------------------------------------- what is not finite


@EACH_MODE
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row_and_column(mode, bad):
    a, b = uniform(6, 9), uniform(9, 5, seed=1)
    a[2, 3] = bad
    c = neula.matmul(a, b, compute=mode, engine="emulated")
    assert not c[2].isfinite().any()
    rest = [0, 1, 3, 4, 5]
    check(c[rest], a[rest], b, "fp32" if mode == "fp64" else mode)
    c = neula.matmul(b.T, a.T, compute=mode, engine="emulated")
    assert not c[:, 2].isfinite().any()
    assert c[:, rest].isfinite().all()


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("a", "b", "options", "error", "message"),
    [
        ((3, 4), (5, 6), {}, ValueError, r"A has 4 columns and B 5 rows.*\(3, 4\).*\(5, 6\)"),
        ((4,), (3, 5), {}, ValueError, r"A has 4 elements and B 3 rows.*\(4,\).*\(3, 5\)"),
        ((3, 4), (3,), {}, ValueError, r"A has 4 columns and B 3 elements.*\(3, 4\).*\(3,\)"),
        ((), (3,), {}, ValueError, r"A must be a vector.*shape \(\).*B \* A"),
        ((3,), (), {}, ValueError, r"B must be a vector.*shape \(\).*A \* B"),
        ((2, 3, 4), (3, 4, 5), {}, ValueError, r"batches of shape \(2,\) and \(3,\).*\(2, 3, 4\)"),
        ((3, 3), (3, 3), {"compute": "fp8"}, ValueError, r"unknown compute 'fp8': choose one of 'fp16'"),
        ((3, 3), (3, 3), {"engine": "tpu"}, ValueError, r"unknown engine 'tpu'"),
    ],
)
def test_bad_input(a, b, options, error, message):
    with pytest.raises(error, match=message):
        neula.matmul(torch.ones(a), torch.ones(b), **options)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@EACH_MODE
@pytest.mark.parametrize("users_precision", ["ieee", "tf32"])
def test_every_mode_on_a_gpu(mode, users_precision):
    switch = torch.backends.cuda.matmul
    before, switch.fp32_precision = switch.fp32_precision, users_precision
    try:
        for make in (uniform, wide):
            a, b = make(500, 700).cuda(), make(700, 300, seed=1).cuda()
            out = neula.matmul(a, b, compute=mode)
            # Tensor cores cut operands of tf32 off, and truncate sums: twice the errors.
            check(out, a, b, "fp32" if mode == "fp64" else mode, 4)
            check(neula.matmul(a.double(), b.double(), compute=mode), a, b, mode, 4)
        assert switch.fp32_precision == users_precision
    finally:
        switch.fp32_precision = before


@pytest.mark.gpu
def test_defaults_on_a_gpu():
    a, b = uniform(3000, 3000).cuda(), uniform(3000, 2000, seed=1).cuda()
    check(neula.matmul(a, b), a, b, "fp32", 2)
    corrected = neula.matmul(a, b, compute="fp16_cor")
    assert torch.equal(neula.matmul(a, b), corrected)
    for dtype in (torch.float16, torch.bfloat16):
        x, y = a.to(dtype), b.to(dtype)
        c = neula.matmul(x, y)
        assert c.dtype == dtype
        error = (c.double() - x.double() @ y.double()).abs()
        assert (error <= torch.finfo(dtype).eps * (x.double().abs() @ y.double().abs())).all()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fp16", "fp16_cor", "fp32"])
def test_batches_and_arrays_on_a_gpu(mode):
    a, b = uniform(3, 200, 100).cuda(), uniform(3, 100, 50, seed=1).cuda()
    check(neula.matmul(a, b, compute=mode), a, b, mode, 4)
    c = neula.matmul(a.cpu().numpy(), b.cpu().numpy(), compute=mode, engine="cuda")
    assert isinstance(c, np.ndarray)
    check(c, a.cpu(), b.cpu(), mode, 4)
