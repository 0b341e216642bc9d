"""Arguments that cuBLAS receives for matrices in memory, with a library that obeys them on a CPU."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from neula.engines import cublas

DTYPES = {0: np.float32, 2: np.float16}
COMPUTE = {68: "float32", 77: "tf32"}
U16, U32 = 2.0**-11, 2.0**-24


class Library:
    """``cublasGemmEx`` as documented, for matrices by columns in the memory of the CPU."""

    def __init__(self) -> None:
        self.mode, self.log, self.status = 0, [], 0

    def cublasSetMathMode(self, handle: int, mode: int) -> int:
        assert handle == 7
        self.mode = mode
        return 0

    def cublasGemmEx(self, handle: int, *arguments: Any) -> int:
        assert handle == 7
        transposed_a, transposed_b, m, n, k, alpha, *rest = arguments
        a, type_a, lda, b, type_b, ldb, beta, c, type_c, ldc, compute, _ = rest
        a = self.columns(a, type_a, lda, *((k, m) if transposed_a else (m, k)))
        b = self.columns(b, type_b, ldb, *((n, k) if transposed_b else (k, n)))
        c = self.columns(c, type_c, ldc, m, n)
        a, b = (x.T if t else x for x, t in ((a, transposed_a), (b, transposed_b)))
        product = alpha._obj.value * (a.astype(np.float64) @ b.astype(np.float64))
        c[...] = product if beta._obj.value == 0 else product + beta._obj.value * c
        self.log.append((COMPUTE[compute], self.mode))
        return self.status

    @staticmethod
    def columns(pointer: int, dtype: int, leading: int, m: int, n: int) -> np.ndarray:
        assert leading >= max(1, m), "cuBLAS refuses this"
        item = np.dtype(DTYPES[dtype]).itemsize
        memory = (ctypes.c_char * (item * (leading * (n - 1) + m))).from_address(pointer)
        flat = np.frombuffer(memory, DTYPES[dtype])
        return np.lib.stride_tricks.as_strided(flat, (m, n), (item, item * leading))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    fake = Library()
    monkeypatch.setattr(cublas, "_library", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 7)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    return fake


def stored(kind: str, m: int, n: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    whole = torch.randn(2 * m + 3, 2 * n + 4, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return {
        "rows": lambda: whole[:m, :n].contiguous(),
        "columns": lambda: whole[:m, :n].T.contiguous().T,
        "block of rows": lambda: whole[1 : m + 1, 2 : n + 2],
        "block of columns": lambda: whole.T.contiguous().T[1 : m + 1, 2 : n + 2],
        "gaps both ways": lambda: whole[: 2 * m : 2, : 2 * n : 2],
    }[kind]()


KINDS = ("rows", "columns", "block of rows", "block of columns", "gaps both ways")


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(("alpha", "beta"), [(-1.0, 1.0), (2.0, 0.0)])
def test_every_order_of_memory(m: int, n: int, k: int, alpha: float, beta: float, library: Library) -> None:
    for kinds in [(x, y, z) for x in KINDS for y in KINDS for z in KINDS]:
        a, b, c = (
            stored(kind, *shape, seed, torch.float32)
            for seed, (kind, shape) in enumerate(zip(kinds, ((m, k), (k, n), (m, n)), strict=True))
        )
        expected = alpha * (a.double() @ b.double()) + beta * c.double()
        size = abs(alpha) * (a.abs() @ b.abs()) + abs(beta) * c.abs()
        assert cublas.gemm(a, b, c, alpha=alpha, beta=beta) is c
        assert ((c.double() - expected).abs() <= 2 * U32 * size).all(), kinds


def test_neighbours_of_a_block_stay_as_they_are(library: Library) -> None:
    whole = stored("columns", 6, 6, 0, torch.float32)
    expected = whole.clone()
    block = whole[2:5, 1:3]
    expected[2:5, 1:3] = block - whole[2:5, 4:6] @ whole[4:6, 1:3]
    cublas.gemm(whole[2:5, 4:6], whole[4:6, 1:3], block, alpha=-1.0, beta=1.0)
    torch.testing.assert_close(whole, expected, rtol=4 * U32, atol=8 * U32)


def test_arithmetic_is_said_with_the_product_and_the_handle_left_as_it_was(library: Library) -> None:
    for dtype, tf32 in ((torch.float32, False), (torch.float32, True), (torch.float16, False)):
        a, b, c = (stored("columns", 3, 3, seed, dtype) for seed in range(3))
        cublas.gemm(a, b, c, tf32=tf32)
        assert ((c.double() - a.double() @ b.double()).abs() <= U16 * (a.abs() @ b.abs()).double()).all()
    assert library.log == [("float32", 16), ("tf32", 16), ("float32", 16)]
    assert library.mode == 0


def test_nothing_to_sum(library: Library) -> None:
    c = torch.full((2, 3), 5.0)
    assert torch.equal(cublas.gemm(torch.ones(2, 0), torch.ones(0, 3), c, beta=2.0), torch.full((2, 3), 10.0))
    assert torch.equal(cublas.gemm(torch.ones(2, 0), torch.ones(0, 3), c), torch.zeros(2, 3))
    cublas.gemm(torch.ones(0, 4), torch.ones(4, 3), torch.ones(0, 3))
    assert not library.log


def test_a_refusal_is_an_error(library: Library) -> None:
    library.status = 13
    with pytest.raises(RuntimeError, match="status 13"):
        cublas.gemm(*(torch.ones(2, 2) for _ in range(3)))
    assert library.mode == 0


def test_without_a_gpu_it_does_not_run() -> None:
    assert not cublas.runs(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    assert cublas.runs(torch.device("cuda", torch.cuda.current_device()))
    for kinds in [(x, y, z) for x in KINDS for y in KINDS for z in KINDS]:
        shapes = ((65, 129), (129, 33), (65, 33))
        a, b, c = (
            stored(kind, *shape, seed, dtype).to("cuda")
            for seed, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))
        )
        expected, size = (
            c.double() - a.double() @ b.double(),
            c.abs().double() + a.abs().double() @ b.abs().double(),
        )
        cublas.gemm(a, b, c, alpha=-1.0, beta=1.0)
        u = torch.finfo(dtype).eps / 2
        assert ((c.double() - expected).abs() <= u * expected.abs() + 4 * 132 * U32 * size).all(), kinds


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "k", "n"), [(128, 136, 264), (200, 131, 157), (1, 3, 5)])
def test_batches(dtype: torch.dtype, m: int, k: int, n: int) -> None:
    """Rows may have gaps between them."""
    a, b = (
        torch.randn(3, m, k + 8, device="cuda").to(dtype),
        torch.randn(3, k, n + 3, device="cuda").to(dtype),
    )
    a, b = a[..., :k], b[..., :n]
    c = cublas.batched(a, b, torch.empty(3, m, n + 5, dtype=dtype, device="cuda")[..., :n])
    exact = a.double() @ b.double()
    sums = 2 * k * 2.0**-24 * (a.double().abs() @ b.double().abs())
    assert ((c.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + sums + 1e-6).all()
