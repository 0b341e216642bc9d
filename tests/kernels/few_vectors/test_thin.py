"""Products with a few vectors: the reference by definition, and the kernel against the same bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.devices import KERNEL, normal

from neula.kernels.few_vectors.thin import _product_of_parts, thin_product

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(params=["reference", KERNEL])
def multiply(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Multiply:
    if request.param == "reference":
        return thin_product.reference
    pytest.importorskip("triton")
    from neula.kernels.few_vectors import thin as module

    monkeypatch.setattr(module, "MIN_PIECE", 50)  # that few columns are cut into pieces
    return module.thin_product_triton


# Each dtype of A with each of the vectors, and each with each shape.
@pytest.mark.parametrize(
    ("m", "n", "k", "low", "wide", "transposed"),
    [
        (1, 1, 1, torch.float16, torch.float32, False),
        (1, 1, 1, torch.float32, torch.float64, True),
        (300, 20, 4, torch.float32, torch.float32, True),
        (300, 20, 4, torch.float64, torch.float64, False),
        (300, 20, 4, torch.float16, torch.float64, True),
        (130, 129, 5, torch.float64, torch.float32, True),
        (130, 129, 5, torch.float16, torch.float64, False),
        (130, 129, 5, torch.float32, torch.float64, False),
    ],
)
def test_errors_are_those_of_the_vectors_precision(
    multiply: Multiply, m: int, n: int, k: int, low: torch.dtype, wide: torch.dtype, transposed: bool
) -> None:
    a = normal(n, m, dtype=low).mT if transposed else normal(m, n, dtype=low)
    x = normal(n, k, dtype=wide)
    found = multiply(a, x)
    assert (found.shape, found.dtype) == ((m, k), wide)
    # gamma_n |A| |x| (Higham 2002, section 3.5), for the result and for A rounded to the wide precision.
    size = a.double().abs() @ x.double().abs()
    assert ((found.double() - a.double() @ x.double()).abs() <= (n + 2) * torch.finfo(wide).eps * size).all()


def test_views(multiply: Multiply) -> None:
    whole, x = normal(200, 90, dtype=torch.float32), normal(30, 4, dtype=torch.float64)
    view = whole[5:195:3, 1:90:3][:, :30]
    assert torch.allclose(multiply(view, x), view.double() @ x, rtol=0, atol=1e-12)


def test_nan_comes_out(multiply: Multiply) -> None:
    a, x = normal(40, 30, dtype=torch.float32), normal(30, 4, dtype=torch.float64)
    a[17, 29] = torch.nan
    assert multiply(a, x).isnan().any(1).nonzero().tolist() == [[17]]


@pytest.mark.parametrize("product", [thin_product, _product_of_parts], ids=["product", "parts"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("vectors", [1, 4, 7])
def test_complex_matrices(product: Multiply, dtype: torch.dtype, vectors: int) -> None:
    a, x = normal(40, 30, dtype=dtype), normal(30, vectors, dtype=torch.complex128)
    expected = a.to(torch.complex128) @ x
    for view in (a, a.mT.contiguous().mT):
        assert torch.allclose(product(view, x), expected, rtol=0, atol=1e-12)
        assert torch.allclose(thin_product(view.conj(), x.conj()), expected.conj(), rtol=0, atol=1e-12)
    assert torch.allclose(
        thin_product(a[::2, ::3], x[::3]), a[::2, ::3].to(x.dtype) @ x[::3], rtol=0, atol=1e-12
    )


@pytest.mark.gpu
def test_more_vectors_than_the_kernel_takes() -> None:
    a, x = normal(100, 30, dtype=torch.float32), normal(30, 9, dtype=torch.float64)
    assert torch.allclose(thin_product(a, x), a.double() @ x, rtol=0, atol=1e-12)
