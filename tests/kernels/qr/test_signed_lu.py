"""LU of blocks less signs by kernel and by reference: against the definition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, variants

from neula.kernels.qr.signed_lu import signed_lu

compute = variants(signed_lu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [1, 7, 16, 32])
def test_factors_signs_and_inverses(n: int, dtype: torch.dtype, compute: Callable) -> None:
    """Of a view with gaps, a block of an orthonormal matrix."""
    generator = torch.Generator().manual_seed(n)
    q = torch.linalg.qr(torch.randn(3, 40, 40, generator=generator, dtype=torch.float64))[0].to(DEVICE, dtype)
    q[1] = 0.0
    block = q[:, :n, :n]
    before = block.clone()
    signs, l_inverse, u_inverse = compute(block)
    identity = torch.eye(n, dtype=dtype, device=DEVICE)
    lower, upper = block.tril(-1) + identity, block.triu()
    assert (signs.abs() == 1).all()
    assert (block.diagonal(dim1=1, dim2=2).abs() >= 1).all()
    assert torch.equal(signs[1], -torch.ones_like(signs[1]))
    # Factors of what is at most 2, whose elements do not grow beyond that.
    bound = 8 * n * torch.finfo(dtype).eps
    assert float((lower @ upper - before + torch.diag_embed(signs)).abs().max()) <= bound
    for inverse, factor in ((l_inverse, lower), (u_inverse, upper)):
        size = float((inverse.abs() @ factor.abs()).max())
        assert float((inverse @ factor - identity).abs().max()) <= bound * size


def test_nan_stays_in_its_block(compute: Callable) -> None:
    block = torch.zeros(2, 5, 5, device=DEVICE)
    block[0, 2, 1] = torch.nan
    found = compute(block)
    assert block[0].isnan().any()
    assert all(x[1].isfinite().all() for x in (block, *found))
