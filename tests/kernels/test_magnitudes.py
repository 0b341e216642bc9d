"""Sizes of rows and columns: against their definitions, in one block and in many."""

from __future__ import annotations

import pytest
import torch

from neula.kernels import magnitudes
from neula.kernels.magnitudes import largest_magnitude, two_norms


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
    one, b = (torch.ones(1, 4, columns, dtype=torch.float64) for columns in (4, 1))
    for x in (one, b):
        x[0, 1, 0] = value
        assert not magnitudes.ends_of(magnitudes.magnitudes(one), b).ends.isfinite().all()
        x[0, 1, 0] = 1.0


def test_largest_magnitudes_along_dimensions() -> None:
    a = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(2))
    for dim in (0, 1, 2, (1, 2)):
        for keepdim in (False, True):
            expected = torch.linalg.vector_norm(a, torch.inf, dim=dim, keepdim=keepdim)
            assert torch.equal(largest_magnitude(a, dim, keepdim=keepdim), expected)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (30, 3)])
def test_sizes_of_systems(n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(n)
    a, b = (torch.randn(1, n, columns, dtype=torch.float64, generator=generator) for columns in (n, k))
    b[..., 1:2] = 0.0
    found = magnitudes.ends_of(magnitudes.magnitudes(a), b)
    rows, columns, of_b = a.abs().amax(2), a.abs().amax(1), b.abs().amax(1)
    torch.testing.assert_close(found.of_a, a.abs().sum(2).amax(1, keepdim=True), rtol=1e-14, atol=0)
    assert torch.equal(found.of_b, of_b)
    torch.testing.assert_close(found.frobenius, a.square().sum((1, 2)).sqrt(), rtol=1e-14, atol=0)
    of_b[of_b == 0] = 1.0
    ends = [rows.min(), columns.min(), rows.max(), columns.max(), of_b.min(), of_b.max()]
    assert torch.equal(found.ends, torch.stack(ends))


@pytest.mark.parametrize("size", [1e-200, 1.0, 1e200])
def test_norms_of_one_complex_number_need_no_square(size: float) -> None:
    x = torch.tensor([[3 + 4j], [-5j]], dtype=torch.complex128, device="cpu") * size
    for part in (x, x.conj()):
        assert torch.allclose(two_norms(part, 1), torch.tensor([5.0, 5.0], device="cpu").double() * size)
        assert two_norms(part, -1, keepdim=True).shape == (2, 1)


@pytest.mark.parametrize("dims", [(), (0,), (-1,), (0, 2)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_norms_of_complex_numbers(dims: tuple[int, ...], keepdim: bool) -> None:
    g = torch.Generator(device="cpu").manual_seed(3)
    x = torch.randn(3, 4, 5, dtype=torch.complex128, generator=g, device="cpu")
    for part in (x, x.mH, x[:, ::2], x[:0]):
        expected = torch.linalg.vector_norm(part, dim=dims or None, keepdim=keepdim)
        assert torch.allclose(two_norms(part, *dims, keepdim=keepdim), expected)
