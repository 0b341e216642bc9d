"""Products with symmetric matrices: the kernel on a CPU or on a GPU within the bound of a product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, GPU, HAS_GPU

from neula.engines import FP64
from neula.kernels.few_vectors import symmetric_product as module
from neula.kernels.few_vectors.symmetric_product import symmetric_product, symmetric_sizes

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Sizes = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(name="by_kernel", params=[pytest.param(way, marks=GPU) for way in (True, False)])
def _by_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not HAS_GPU:
        monkeypatch.setattr(module, "compiled", request.getfixturevalue("compiled_on_host"))
    return request.param


@pytest.fixture(name="multiply")
def _multiply(by_kernel: bool) -> Multiply:
    return module.symmetric_product_cuda if by_kernel else symmetric_product


@pytest.fixture(name="sizes")
def _sizes(by_kernel: bool) -> Sizes:
    return module.symmetric_sizes_cuda if by_kernel else symmetric_sizes


def matrices(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A symmetric one, and some vectors."""
    generator = torch.Generator().manual_seed(n)
    a = torch.randn(n, n, dtype=torch.float64, generator=generator)
    return a + a.T, torch.randn(n, k, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (31, 2), (256, 2), (257, 1)])
@pytest.mark.parametrize("layout", ["rows", "columns", "part"])
def test_within_the_bound_of_a_product(multiply: Multiply, n: int, k: int, layout: str) -> None:
    a, x = matrices(n, k)
    room = torch.full((n, n + 3), torch.nan, dtype=a.dtype, device=DEVICE)[:, :n]
    given = {"rows": a, "columns": a.T.contiguous().T, "part": room.copy_(a)}[layout].to(DEVICE)
    vectors = torch.full((k + 1, n), torch.nan, dtype=a.dtype, device=DEVICE).T[:, :k].copy_(x)
    found = multiply(given, vectors).cpu()
    bound = (n + 1) * FP64.u * (a.abs() @ x.abs())  # Higham 2002, section 3.5, in any order of the sum
    assert bool(((found - a @ x).abs() <= 2 * bound).all())


def test_the_same_bits_each_time(multiply: Multiply) -> None:
    a, x = (y.to(DEVICE) for y in matrices(700, 2))
    assert torch.equal(multiply(a, x), multiply(a, x))


def test_nan_comes_through(multiply: Multiply) -> None:
    a, x = matrices(300, 1)
    a[299, 7] = a[7, 299] = torch.nan
    found = multiply(a.to(DEVICE), x.to(DEVICE)).cpu()[:, 0]
    assert found.isnan().nonzero()[:, 0].tolist() == [7, 299]


@pytest.mark.parametrize("n", [1, 31, 257])
@pytest.mark.parametrize("layout", ["rows", "columns", "part"])
def test_sizes_of_rows(sizes: Sizes, n: int, layout: str) -> None:
    a, _ = matrices(n, 1)
    room = torch.full((n, n + 3), torch.nan, dtype=a.dtype, device=DEVICE)[:, :n]
    given = {"rows": a, "columns": a.T.contiguous().T, "part": room.copy_(a)}[layout].to(DEVICE)
    sums, norms = (x.cpu() for x in sizes(given))
    u = (n + 1) * FP64.u
    assert bool(((sums - a.abs().sum(1)).abs() <= 2 * u * a.abs().sum(1)).all())
    exact = torch.linalg.vector_norm(a, dim=1)
    assert bool(((norms - exact).abs() <= 2 * u * exact).all())


def test_sizes_that_are_not_finite_show(sizes: Sizes) -> None:
    a, _ = matrices(300, 1)
    a[299, 7] = a[7, 299] = torch.nan
    a[5, 5] = 1e200
    sums, norms = (x.cpu() for x in sizes(a.to(DEVICE)))
    assert sums.isnan().nonzero()[:, 0].tolist() == [7, 299]
    assert (~norms.isfinite()).nonzero()[:, 0].tolist() == [5, 7, 299]
