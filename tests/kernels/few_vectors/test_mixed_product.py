"""Products in two precisions: the reference by definition, and the kernel against the same bound.

The kernel runs on the GPU where there is one (``pytest -m gpu``), in Triton's interpreter elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, KERNEL

from neula.kernels.few_vectors import mixed_product
from neula.kernels.few_vectors.mixed_product import subtract_product

Subtract = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(params=["reference", KERNEL])
def subtract(request: pytest.FixtureRequest) -> Subtract:
    if request.param == "reference":
        return subtract_product.reference
    pytest.importorskip("triton")
    from neula.kernels.few_vectors import mixed_product as module

    return module.subtract_product_triton


def operands(m: int, n: int, k: int, low: torch.dtype, wide: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(m + n)
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
        for shape, dtype in (((m, n), low), ((n, k), wide), ((m, k), wide))
    )


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (64, 32, 1), (130, 70, 2), (7, 100, 8)])
@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_errors_are_those_of_the_wider_precision(
    subtract: Subtract, m: int, n: int, k: int, low: torch.dtype, wide: torch.dtype
) -> None:
    a, x, y = operands(m, n, k, low, wide)
    expected = y.double() - a.double() @ x.double()
    size = y.double().abs() + a.double().abs() @ x.double().abs()
    found = subtract(a, x, y)
    assert found is y
    # gamma_{n + 1} of |y| + |A| |x| (Higham 2002, section 3.1), for both the result and the reference.
    assert ((found - expected).abs() <= (n + 2) * torch.finfo(wide).eps * size).all()


def test_blocks_of_column_major_matrices(subtract: Subtract) -> None:
    whole, x, y = operands(100, 90, 3, torch.float16, torch.float64)
    block = whole.T.contiguous().T[20:90, 10:70]
    rows = torch.zeros(100, 3, dtype=torch.float64, device=DEVICE)
    rows[20:90] = y[20:90]
    subtract(block, x[10:70], rows[20:90])
    expected = y[20:90] - block.double() @ x[10:70]
    torch.testing.assert_close(rows[20:90], expected, rtol=0, atol=1e-13)
    assert (rows[:20] == 0).all()
    assert (rows[90:] == 0).all()


def test_no_rows_at_all() -> None:
    a, x, y = operands(3, 4, 2, torch.float16, torch.float32)
    assert subtract_product(a[:0], x, y[:0]).shape == (0, 2)


def test_the_reference_converts_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    a, x, y = operands(50, 30, 2, torch.bfloat16, torch.float64)
    whole = subtract_product.reference(a, x, y.clone())
    monkeypatch.setitem(mixed_product._CHUNK, "cpu", 100)
    torch.testing.assert_close(subtract_product.reference(a, x, y), whole, rtol=0, atol=1e-13)


@pytest.mark.gpu
def test_a_gpu_takes_the_kernel_for_few_columns_and_converts_for_many() -> None:
    assert subtract_product.runs(DEVICE)
    for k in (1, mixed_product.VECTORS, mixed_product.VECTORS + 1):
        a, x, y = operands(3000, 700, k, torch.float16, torch.float64)
        expected = subtract_product.reference(a, x, y.clone())
        torch.testing.assert_close(subtract_product(a, x, y), expected, rtol=0, atol=1e-11)


def test_what_is_not_finite_shows() -> None:
    a, x, y = operands(40, 40, 2, torch.float16, torch.float32)
    x[3, 1] = torch.inf
    found = subtract_product(a, x, y)
    assert found[:, 0].isfinite().all()
    assert not found[:, 1].isfinite().any()
