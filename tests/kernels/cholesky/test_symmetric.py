"""Symmetric copies: reference and kernel give the same numbers, and read one triangle."""

from __future__ import annotations

import math

import pytest
import torch
from tests.devices import DEVICE, variants

from neula.kernels.cholesky.symmetric import hermitian_from_lower, symmetric_copy, unscaled_triangle

copied = variants(symmetric_copy)
unscaled = variants(unscaled_triangle)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "n", "rows"), [(1, 1, 0), (3, 33, 40), (1, 64, 0)])
def test_one_triangle_becomes_two(copied, count: int, n: int, rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(n)
    g = torch.randn(count, n, n, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)
    wide = torch.promote_types(dtype, torch.float32)
    scales = torch.ldexp(torch.ones(n, dtype=wide), torch.arange(n) % 5 - 2).expand(count, n).to(DEVICE)
    above = torch.ones(n, n, dtype=torch.bool, device=DEVICE).triu(1)
    lower = g.to(wide).tril()
    expected = (lower + lower.tril(-1).mT) * scales[:, :, None] * scales[:, None]
    for a in (g.masked_fill(above, math.nan), g.mT.masked_fill(above.T, math.nan).mT):
        before = a.clone()
        assert torch.equal(copied(a, scales, whole=False).tril(), expected.tril()), "nobody reads the rest"
        found = copied(a, scales, rows=rows)
        assert found.dtype == wide
        assert torch.equal(found, expected)
        assert found.stride()[1:] == (1, max(n, rows))
        assert torch.equal(a.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "n", "rows"), [(1, 1, 0), (3, 33, 40), (1, 64, 0)])
def test_a_triangle_in_the_units_that_were_given(
    unscaled, count: int, n: int, rows: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(n)
    g = torch.randn(count, n, max(n, rows), generator=generator).to(dtype).to(DEVICE).mT[:, :n]
    scales = torch.ldexp(torch.ones(n), torch.arange(n) % 5 - 2).expand(count, n).to(DEVICE)
    expected = g.tril().float() / scales[:, :, None]
    g.masked_fill_(torch.ones(n, n, dtype=torch.bool, device=DEVICE).triu(1), math.nan)
    for target in (torch.float32, torch.float64):
        t = g.clone()
        found = unscaled(t, scales, target)
        assert (found.dtype, found.stride()) == (target, t.stride())
        assert (found.data_ptr() == t.data_ptr()) == (target == dtype)
        assert torch.equal(found, expected.to(target))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_hermitian_matrices_from_one_triangle(dtype: torch.dtype) -> None:
    """The other triangle, and imaginary parts of the diagonal, are not read, as LAPACK does not read them."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(2, 4, 4, generator=generator, dtype=dtype)
    whole = a.tril(-1) + a.tril(-1).mH + torch.diag_embed(a.diagonal(0, 1, 2).real)
    given = a.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), math.nan)
    if dtype.is_complex:
        given.diagonal(0, 1, 2).imag.fill_(math.nan)
    assert torch.equal(hermitian_from_lower(given), whole)
