"""Products of batches: the reference by definition, and the kernel against the same bound."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests import devices
from tests.devices import DEVICE, variants

from neula.kernels.polar.batched_product import batched_product, joined, split

Multiply = Callable[..., torch.Tensor]


multiply = variants(batched_product)


@pytest.fixture
def split_in(multiply: Multiply) -> Callable[..., torch.Tensor]:
    return split.reference if multiply is batched_product.reference else split.kernel


normal = partial(devices.normal, dtype=torch.float32)


def bound(
    a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor, parts: int, dtype: torch.dtype
) -> torch.Tensor:
    """Sums in float32, truncated (``2 k u``), the dropped product of two second parts, and one rounding."""
    unit = torch.finfo(dtype).eps / 2
    kept = unit if parts == 1 else unit**2
    sums = 2 * a.shape[-1] * 2.0**-24 + (0.0 if parts == 1 else 2 * unit**2)
    return sums * (joined(a).abs().double() @ joined(b).abs().double()) + 2 * kept * exact.abs() + 1e-6 * kept


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (33, 70, 64), (64, 31, 40)])
@pytest.mark.parametrize("transposed", [False, True])
def test_products(
    multiply: Multiply, parts: int, dtype: torch.dtype, m: int, k: int, n: int, transposed: bool
) -> None:
    a = split(normal(3, m, k), dtype, parts)
    b = split(normal(3, n, k), dtype, parts).mT if transposed else split(normal(3, k, n), dtype, parts)
    scales = torch.tensor([1.0, 0.3, -2.0], device=DEVICE)
    found = joined(multiply(a, b, factor=0.7, shift=-3.0, scales=scales), torch.float64)
    eye = torch.eye(m, n, device=DEVICE, dtype=torch.float64)
    exact = scales[:, None, None] * (0.7 * (joined(a, torch.float64) @ joined(b, torch.float64)) - 3.0 * eye)
    assert ((found - exact).abs() <= 4 * bound(a, b, exact, parts, dtype) + 2.0**-22).all()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (33, 70, 64), (64, 31, 40)])
def test_products_in_single_precision(multiply: Multiply, parts: int, m: int, k: int, n: int) -> None:
    a = split(normal(3, m, k), torch.float16, parts)
    b = split(normal(3, n, k), torch.float16, parts).mT
    found = multiply(a, b, wide=True)
    assert (found.shape, found.dtype) == ((1, 3, m, n), torch.float32)
    exact = joined(a, torch.float64) @ joined(b, torch.float64)
    size = joined(a).abs().double() @ joined(b).abs().double()
    dropped = 0.0 if parts == 1 else 2.0**-21
    assert ((found[0] - exact).abs() <= (2 * k * 2.0**-24 + dropped + 2.0**-24) * size).all()
    whole = multiply(a, a.mT, wide=True)
    found = multiply(a, a.mT, wide=True, symmetric=True)
    assert torch.equal(found, found.mT)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5 * k)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("m", "k"), [(1, 5), (97, 33), (64, 64)])
def test_symmetric_products(multiply: Multiply, parts: int, m: int, k: int) -> None:
    a = split(normal(2, m, k), torch.float16, parts)
    found = multiply(a, a.mT, factor=0.1, shift=1.5, symmetric=True)
    assert torch.equal(found, found.mT)
    x = joined(a, torch.float64)
    exact = 0.1 * (x @ x.mT) + 1.5 * torch.eye(m, device=DEVICE)
    assert (
        (joined(found, torch.float64) - exact).abs() <= 4 * bound(a, a.mT, exact, parts, torch.float16)
    ).all()


def test_nan_stays_in_its_matrix(multiply: Multiply) -> None:
    a = normal(3, 40, 35)
    a[1, 3, 2] = torch.nan
    parts = split(a, torch.float16)
    found = multiply(parts, parts.mT, symmetric=True)[0].isnan().flatten(1).any(1)
    assert found.tolist() == [False, True, False]


def test_two_parts_are_as_accurate_as_float32() -> None:
    x = normal(2, 30, 20) / 100
    error = (joined(split(x, torch.float16, 2), torch.float64) - x.double()).abs()
    assert (error <= 2.0**-22 * x.abs() + 2.0**-36).all()


@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("parts", [1, 2])
def test_splitting(split_in: Callable[..., torch.Tensor], given: torch.dtype, parts: int) -> None:
    """Scaled by factors that are out of range together, of any strides, to all bits of the parts."""
    x = (normal(2, 70, 37).to(given) * torch.tensor(2.0, dtype=given) ** -12).mT
    wide = torch.promote_types(given, torch.float32)
    scales = torch.tensor([2.0**120, 2.0**100], dtype=wide, device=DEVICE)
    scales[1] = scales[1] * 2.0**20
    found = split_in(x, torch.float16, parts, scales, 2.0**-108)
    exact = x.double() * 2.0**12
    assert found.stride(2) % 8 == 0
    unit = 2.0**-11 if parts == 1 else 2.0**-22
    assert ((joined(found, torch.float64) - exact).abs() <= unit * exact.abs() + 2.0**-25 * unit).all()
    assert torch.equal(found, split.reference(x, torch.float16, parts, scales, 2.0**-108))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("count", "m", "n"), [(2, 65, 7), (1, 1, 1), (3, 64, 64)])
def test_parts_are_joined_in_one_pass(count: int, m: int, n: int, transposed: bool) -> None:
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(count, m, n, generator=generator).to(DEVICE)
    parts = split.reference(x, torch.float16, 2)
    parts = parts.mT if transposed else parts
    assert torch.equal(joined.kernel(parts), joined.reference(parts))
