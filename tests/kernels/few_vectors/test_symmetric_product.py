"""Products with symmetric matrices: the kernel on a CPU or on a GPU within the bound of a product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, GPU, HAS_GPU

from neula.engines import FP64
from neula.kernels.few_vectors import symmetric_product as module
from neula.kernels.few_vectors.symmetric_product import symmetric_product

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(name="multiply", params=[pytest.param(way, marks=GPU) for way in (True, False)])
def _multiply(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Multiply:
    if request.param and not HAS_GPU:
        monkeypatch.setattr(module, "compiled", request.getfixturevalue("compiled_on_host"))
    return module.symmetric_product_cuda if request.param else symmetric_product


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
