"""Products in the precision that was asked for, without a switch that other threads see."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from neula.engines import CudaEngine, cublas
from neula.io.matrices import random_matrix
from neula.kernels import precision
from neula.kernels.precision import exact_matmul, exactly, no_tf32

U32 = 2.0**-24
SWITCHES = (
    "fp32_precision",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


class OnGpu:
    """An operand with the attributes that :func:`exactly` reads, without a GPU."""

    is_cuda, dtype = True, torch.float32

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def double(self) -> torch.Tensor:
        return self.x.double()


def normal(m: int, n: int, seed: int, device: str = "cpu") -> torch.Tensor:
    return random_matrix("normal", m, n, seed=seed).float().to(device)


needs_guard = pytest.mark.skipif(no_tf32() is None, reason="this build of torch has no guard by that name")


@needs_guard
def test_tf32_is_forbidden_in_this_thread_and_nowhere_else() -> None:
    guard = no_tf32()
    seen = []

    def product(x: OnGpu) -> torch.Tensor:
        other = threading.Thread(target=lambda: seen.append(guard.is_on()))
        other.start()
        other.join()
        seen.append(guard.is_on())
        exactly(lambda x: seen.append(guard.is_on()), x)  # one inside the other
        seen.append(guard.is_on())
        return x.x

    exactly(product, OnGpu(torch.ones(1)))
    assert seen == [False, True, True, True]
    assert not guard.is_on()


@needs_guard
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_product_that_fails_leaves_nothing_behind(error: type[BaseException]) -> None:
    def product(_: OnGpu) -> torch.Tensor:
        raise error

    with pytest.raises(error):
        exactly(product, OnGpu(torch.ones(1)))
    assert not no_tf32().is_on()


@pytest.mark.parametrize("switch", ["ieee", "tf32"])
def test_where_there_is_no_guard_products_are_those_of_doubles(
    switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    monkeypatch.setattr(precision, "no_tf32", lambda: None)
    dtypes = []

    def product(x: OnGpu | torch.Tensor, alpha: float) -> torch.Tensor:
        dtypes.append(x.dtype)
        return alpha * (x.x if isinstance(x, OnGpu) else x)

    try:
        torch.backends.cuda.matmul.fp32_precision = switch
        result = exactly(product, OnGpu(torch.ones(3)), alpha=2.0)
        assert torch.backends.cuda.matmul.fp32_precision == switch
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert dtypes == [torch.float64 if switch == "tf32" else torch.float32]
    assert torch.equal(result, torch.full((3,), 2.0))


def test_on_a_cpu_a_product_is_just_called() -> None:
    a, b, c = normal(5, 4, 1), normal(4, 3, 2), normal(5, 3, 3)
    assert torch.equal(exact_matmul(a, b), a @ b)
    expected = c - a @ b
    assert exactly(torch.addmm, c, a, b, alpha=-1.0, out=c) is c
    torch.testing.assert_close(c, expected, rtol=0, atol=16 * U32 * float(expected.abs().max()))


# ---------------------------------------------------------------- on a GPU


@pytest.fixture
def switches() -> Iterator[None]:
    """All of them set to the least that a user can ask for."""
    matmul = torch.backends.cuda.matmul
    before = [getattr(matmul, name) for name in SWITCHES]
    for name, value in zip(SWITCHES, ("tf32", True, True, True), strict=True):
        setattr(matmul, name, value)
    yield
    for name, value in zip(SWITCHES, before, strict=True):
        setattr(matmul, name, value)


def read_switches() -> list[object]:
    return [getattr(torch.backends.cuda.matmul, name) for name in SWITCHES]


@pytest.mark.gpu
@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("n", [1, 2, 70])
def test_float32_products_in_place_are_exact_for_any_width(n: int) -> None:
    a, b, c = normal(300, 500, 1, "cuda"), normal(500, n, 2, "cuda"), normal(n, 300, 3, "cuda").T
    size = c.double().abs() + a.double().abs() @ b.double().abs()
    expected = c.double() - a.double() @ b.double()
    before = read_switches()
    CudaEngine("cuda", "fp32").gemm(a, b, c, alpha=-1.0, beta=1.0)
    assert ((c.double() - expected).abs() <= 4 * 503 * U32 * size).all()
    assert read_switches() == before


@pytest.mark.gpu
@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("format", ["fp16", "bf16"])
@pytest.mark.parametrize("direct", [True, False])
def test_products_of_halves_are_summed_in_float32(
    format: str, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long k, which cuBLAS cuts up: parts that were added in half precision would err by ``2^-11`` each."""
    if not direct:
        monkeypatch.setattr(cublas, "runs", lambda device: False)
    engine = CudaEngine("cuda", format)
    k = 20000
    a, b = (engine.operand(x) for x in (normal(k, 40, 1, "cuda").T, normal(k, 24, 2, "cuda")))
    c = engine.operand(normal(24, 40, 3, "cuda").T)
    size = c.double().abs() + a.double().abs() @ b.double().abs()
    exact = a.double() @ b.double()
    expected, start = c.double() - exact, c.float()
    before = read_switches()
    engine.gemm_low(a, b, c)
    wide = engine.gemm(a, b, start.clone(), alpha=-1.0, beta=1.0)
    product = engine.gemm(a, b)
    assert read_switches() == before
    assert ((c.double() - expected).abs() <= engine.format.u * expected.abs() + 4 * k * U32 * size).all()
    for found, reference in ((wide, expected), (product, exact)):
        assert ((found.double() - reference).abs() <= 4 * k * U32 * size).all()


@pytest.mark.gpu
@pytest.mark.parametrize("direct", [True, False])
def test_tf32_products_with_and_without_cublas(direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They err as much as operands of eleven bits, and no more, whatever the user's switch says."""
    if not direct:
        monkeypatch.setattr(cublas, "runs", lambda device: False)
    engine = CudaEngine("cuda", "tf32")
    a, b, c = normal(300, 500, 1, "cuda"), normal(500, 70, 2, "cuda"), normal(70, 300, 3, "cuda").T
    size = c.double().abs() + a.double().abs() @ b.double().abs()
    expected = c.double() - a.double() @ b.double()
    before = read_switches()
    error = (engine.gemm(a, b, c, alpha=-1.0, beta=1.0).double() - expected).abs()
    assert (error <= (4.2 * engine.format.u + 4 * 503 * U32) * size).all()
    assert float((error / size).max()) > 16 * U32, "full precision, which would be slower"
    assert read_switches() == before
