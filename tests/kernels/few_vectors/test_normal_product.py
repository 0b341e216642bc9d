"""``A X`` and ``A^T A X`` together: the reference by definition, and the kernel against the same bound."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, normal, variants

from neula.kernels.few_vectors.normal_product import normal_product, transposed_product

EPS = torch.finfo(torch.float64).eps

Multiply = Callable[..., tuple[torch.Tensor, torch.Tensor]]


multiply = variants(normal_product)


# One element, rows that all thread blocks go through twice, a ragged column.
@pytest.mark.usefixtures("uninitialized_is_nan")
@pytest.mark.parametrize(
    ("m", "n", "k", "with_b"), [(1, 1, 5, True), (300, 20, 5, True), (300, 20, 1, False), (70, 129, 1, True)]
)
def test_errors_are_those_of_float64(multiply: Multiply, m: int, n: int, k: int, with_b: bool) -> None:
    a, x = normal(m, n), normal(n, k)
    b = normal(k, m).T if with_b else None
    y, z = multiply(a, x, b)
    assert (y.shape, z.shape) == ((m, k), (n, k))
    expected, size = a @ x, a.abs() @ x.abs()
    if b is not None:
        expected, size = b - expected, b.abs() + size
    # gamma_n |A| |x| (Higham 2002, section 3.5), and the same of the product with the transpose.
    assert ((y - expected).abs() <= (n + 2) * EPS * size).all()
    assert ((z - a.T @ y).abs() <= (m + 2) * EPS * (a.abs().T @ y.abs())).all()


@pytest.mark.usefixtures("uninitialized_is_nan")
@pytest.mark.parametrize(("m", "n"), [(1, 1), (130, 129)])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_transposed_products(multiply: Multiply, m: int, n: int, k: int) -> None:
    a, y = normal(m, n), normal(k, m).T
    by_definition = multiply is normal_product.reference
    z = (transposed_product.reference if by_definition else transposed_product.kernel)(a, y)
    assert ((z - a.T @ y).abs() <= (m + 2) * EPS * (a.abs().T @ y.abs())).all()


def test_views(multiply: Multiply) -> None:
    whole, x = normal(400, 90), normal(60, 2)
    view = whole[5:395:3, 7:37]
    b = normal(130, 3)[:, 1:]
    y, z = multiply(view, x[::2], b)
    assert torch.allclose(y, b - view @ x[::2], rtol=0, atol=1e-12)
    assert torch.allclose(z, view.T @ y, rtol=0, atol=1e-11)


def test_nan_comes_out(multiply: Multiply) -> None:
    a, x = normal(40, 30), normal(30, 1)
    a[17, 29] = torch.nan
    y, z = multiply(a, x)
    assert y.isnan().any(1).nonzero().tolist() == [[17]]
    assert z.isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n"), [(20000, 1024), (20001, 2047), (9000, 4096), (9000, 4097)])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_what_a_gpu_takes(m: int, n: int, k: int) -> None:
    a, x, b = normal(m, n), normal(n, k), normal(m, k)
    y, z = normal_product(a, x, b)
    assert ((y - (b - a @ x)).abs() <= (n + 2) * EPS * (b.abs() + a.abs() @ x.abs())).all()
    assert ((z - a.T @ y).abs() <= (m + 2) * EPS * (a.abs().T @ y.abs())).all()
    again = normal_product(a, x, b)
    assert torch.equal(y, again[0])
    assert torch.equal(z, again[1])
    z = transposed_product(a, b)
    assert ((z - a.T @ b).abs() <= (m + 2) * EPS * (a.abs().T @ b.abs())).all()


@pytest.mark.parametrize("k", [1, 3, 9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("by_columns", [False, True])
def test_a_narrower_matrix_is_multiplied_as_if_it_were_copied(
    k: int, dtype: torch.dtype, by_columns: bool
) -> None:
    generator = torch.Generator().manual_seed(k)
    a = torch.randn(70, 40, generator=generator).to(dtype).to(DEVICE)
    a = a.T.contiguous().T if by_columns else a
    x = torch.randn(40, k, generator=generator, dtype=torch.float64).to(DEVICE)
    b = torch.randn(70, k, generator=generator, dtype=torch.float64).to(DEVICE)
    wide = a.double()
    y, z = normal_product(a, x, b)
    assert y.dtype == z.dtype == torch.float64
    bound = 2 * 40 * EPS * (b.abs() + wide.abs() @ x.abs())
    assert ((y - (b - wide @ x)).abs() <= bound).all()
    assert ((z - wide.T @ y).abs() <= 2 * 70 * EPS * (wide.abs().T @ y.abs())).all()
    assert ((transposed_product(a, b) - wide.T @ b).abs() <= 2 * 70 * EPS * (wide.abs().T @ b.abs())).all()
