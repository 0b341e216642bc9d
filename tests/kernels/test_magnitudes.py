"""Sizes of rows and columns: against their definitions, in one block and in many."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, KERNEL

from neula.kernels import magnitudes
from neula.kernels.magnitudes import largest_magnitude


@pytest.fixture(params=[KERNEL])
def sizes_by_kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[..., magnitudes.Magnitudes]:
    """The kernel, on the GPU where there is one, in Triton's interpreter elsewhere."""
    pytest.importorskip("triton")
    from neula.kernels import magnitudes as module

    monkeypatch.setattr(module, "TILES", 2)
    return module.magnitudes_triton


@pytest.mark.parametrize("block", [1, 50, 1 << 16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 7, 5), (3, 40, 40), (1, 13, 1)])
def test_sizes(block: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(magnitudes, "BLOCK", block)
    a = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for x in (a, a.mT.contiguous().mT, a[:, ::2]):
        found = magnitudes.magnitudes(x)
        assert torch.equal(found.rows, x.abs().amax(2, keepdim=True))
        assert torch.equal(found.columns, x.abs().amax(1, keepdim=True))
        torch.testing.assert_close(found.sums, x.abs().sum(2), rtol=1e-14, atol=0)
        norms = x.square().sum(1).sqrt()[..., None]
        torch.testing.assert_close(found.norms, norms, rtol=1e-14, atol=0)
        assert torch.equal(a, a.clone())


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_what_is_not_finite_comes_through(value: float) -> None:
    a = torch.ones(1, 3, 4, dtype=torch.float64)
    a[0, 1, 2] = value
    found = magnitudes.magnitudes(a)
    assert not found.rows[0, 1].isfinite()
    assert not found.columns[0, 0, 2].isfinite()
    assert not largest_magnitude(a, (1, 2)).isfinite()
    assert largest_magnitude(a, 1).isfinite().sum() == 3


def test_largest_magnitudes_along_dimensions() -> None:
    a = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(2))
    for dim in (0, 1, 2, (1, 2)):
        for keepdim in (False, True):
            expected = torch.linalg.vector_norm(a, torch.inf, dim=dim, keepdim=keepdim)
            assert torch.equal(largest_magnitude(a, dim, keepdim=keepdim), expected)


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (129, 65)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_pass_on_a_gpu(
    sizes_by_kernel: Callable[..., magnitudes.Magnitudes], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    a = torch.randn(1, *shape, dtype=dtype, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    for x in (a, a.mT.contiguous().mT):
        found, expected = sizes_by_kernel(x), magnitudes.magnitudes.reference(x.double())
        assert torch.equal(found.rows.double(), expected.rows)
        assert torch.equal(found.columns.double(), expected.columns)
        rounding = 2 * max(shape) * torch.finfo(dtype).eps
        torch.testing.assert_close(found.sums.double(), expected.sums, rtol=rounding, atol=0)
        torch.testing.assert_close(found.norms.double(), expected.norms, rtol=rounding, atol=0)


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_what_is_not_finite_comes_through_the_kernel(
    sizes_by_kernel: Callable[..., magnitudes.Magnitudes], value: float
) -> None:
    a = torch.ones(1, 3, 4, dtype=torch.float64, device=DEVICE)
    a[0, 1, 2] = value
    found = sizes_by_kernel(a)
    for sizes, place in zip(found, (1, 2, 1, 2), strict=True):
        assert (~sizes.isfinite()).flatten().nonzero().tolist() == [[place]]


@pytest.mark.parametrize(("n", "k"), [(1, 1), (300, 3), (1100, 1)])
def test_sizes_of_systems(sizes_by_kernel: Callable[..., magnitudes.Magnitudes], n: int, k: int) -> None:
    from neula.kernels.magnitudes import ends_of_triton

    generator = torch.Generator().manual_seed(n)
    a, b = (torch.randn(1, n, columns, dtype=torch.float64, generator=generator) for columns in (n, k))
    b[..., 1:2] = 0.0
    for x, right in ((a, b), (a.mT, b.mT.contiguous().mT)):
        x, right = x.to(DEVICE), right.to(DEVICE)
        expected = magnitudes.ends_of.reference(magnitudes.magnitudes.reference(x), right)
        for one, other in zip(ends_of_triton(sizes_by_kernel(x), right), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-13, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_systems_that_are_not_finite_are_not_near_one(
    sizes_by_kernel: Callable[..., magnitudes.Magnitudes], value: float
) -> None:
    from neula.kernels.magnitudes import ends_of_triton

    a, b = (torch.ones(1, 4, columns, dtype=torch.float64, device=DEVICE) for columns in (4, 1))
    for x in (a, b):
        x[0, 1, 0] = value
        ends = ends_of_triton(sizes_by_kernel(a), b).ends
        assert not ends.isfinite().all()
        x[0, 1, 0] = 1.0
