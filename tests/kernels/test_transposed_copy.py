"""Copies that change the order of storage: the kernel in the interpreter or on a GPU, and what chooses it."""

from __future__ import annotations

import pytest
import torch
from tests.devices import DEVICE, KERNEL, variants

from neula.kernels.transposed_copy import transpose_in_place, transposed_copy

copy = variants(transposed_copy, "dispatch", KERNEL)
transpose = variants(transpose_in_place, "dispatch", KERNEL)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (64, 64), (100, 70), (3, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scaled", [False, True])
def test_copies_are_scaled_and_rounded(copy, m: int, n: int, dtype: torch.dtype, scaled: bool) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(m)
    a = torch.randn(m, n, dtype=dtype, generator=generator).to(DEVICE)
    scales = 2.0 ** torch.randint(-4, 4, (n,), generator=generator).double().to(DEVICE)
    out = torch.full((n, m), torch.nan, dtype=torch.float16, device=DEVICE).T
    assert copy(out, a, scales if scaled else None) is out
    expected = a.double() * scales if scaled else a.double()
    # One rounding, or two where float64 goes through float32; or below the normal numbers half the smallest.
    assert ((out.double() - expected).abs() <= 2.0**-11 * (1 + 2.0**-12) * expected.abs() + 2.0**-25).all()


def test_infinite_where_the_format_ends() -> None:
    a = torch.full((300, 300), 1e6, device=DEVICE)
    a[7, 5] = torch.nan
    out = transposed_copy(torch.empty(300, 300, dtype=torch.float16, device=DEVICE).T, a)
    assert bool(out[7, 5].isnan())
    assert int(out.isinf().sum()) == a.numel() - 1


@pytest.mark.parametrize("orders", ["rows to columns", "columns to columns", "columns to rows"])
@pytest.mark.parametrize("into", [torch.float32, torch.float64])
def test_scaled_copies_of_every_order(copy, orders: str, into: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    before, after = orders.split(" to ")
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(130, 70, generator=generator).to(DEVICE)
    a = a if before == "rows" else a.mT.contiguous().mT
    out = torch.full((70, 130), torch.nan, dtype=into, device=DEVICE).mT
    out = out.contiguous() if after == "rows" else out
    scales = torch.rand(70, generator=generator, dtype=torch.float64).to(DEVICE)
    assert torch.equal(copy(out, a, scales), (a.double() * scales).to(into))


def test_scaled_in_place(copy) -> None:  # type: ignore[no-untyped-def]
    a = torch.arange(300.0 * 290, device=DEVICE).reshape(290, 300).mT
    scales = 2.0 ** torch.arange(290, device=DEVICE).remainder(40)
    expected = a * scales
    assert torch.equal(copy(a, a, scales), expected)


@pytest.mark.parametrize("n", [1, 64, 100, 200])
def test_in_place(transpose, n: int) -> None:  # type: ignore[no-untyped-def]
    whole = torch.randn(n + 3, n + 8, generator=torch.Generator().manual_seed(n)).half().to(DEVICE).T
    before = whole.clone()
    a = whole[5 : n + 5, 2 : n + 2]
    turned = transpose(a)
    turned = a.T if turned is None else turned  # of the kernel
    assert turned.data_ptr() == a.data_ptr()
    assert torch.equal(turned, before[5 : n + 5, 2 : n + 2])
    whole[5 : n + 5, 2 : n + 2] = before[5 : n + 5, 2 : n + 2]
    assert torch.equal(whole, before)
