"""Products with a few dozen vectors: the reference by definition, and the kernel against the same bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, KERNEL

from neula.kernels.few_vectors.narrow_product import narrow_product

U = 2.0**-24

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(params=["reference", KERNEL])
def multiply(request: pytest.FixtureRequest) -> Multiply:
    if request.param == "reference":
        return narrow_product.reference
    pytest.importorskip("triton")
    from neula.kernels.few_vectors import narrow_product as module

    return module.narrow_product_triton


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (130, 129, 17), (64, 640, 32)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("vectors_by_columns", [False, True])
def test_errors_are_those_of_float32(
    multiply: Multiply, m: int, n: int, k: int, transposed: bool, vectors_by_columns: bool
) -> None:
    a = normal(n, m).mT if transposed else normal(m, n)
    x = normal(k, n).mT if vectors_by_columns else normal(n, k)
    found = multiply(a, x)
    assert (found.shape, found.dtype) == ((m, k), torch.float32)
    # gamma_n |A| |x| (Higham 2002, section 3.5), and what three products of four leave out of one.
    size = a.double().abs() @ x.double().abs()
    assert ((found.double() - a.double() @ x.double()).abs() <= (n + 16) * U * size).all()


def test_nan_comes_out(multiply: Multiply) -> None:
    a, x = normal(40, 32), normal(32, 20)
    a[17, 29] = torch.nan
    assert multiply(a, x).isnan().any(1).nonzero().tolist() == [[17]]
