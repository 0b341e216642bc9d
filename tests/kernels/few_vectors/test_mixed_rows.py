"""Rows that are mixed in fours: the kernel in the interpreter or on a GPU, and the reference."""

from __future__ import annotations

import pytest
import torch
from tests.devices import DEVICE, KERNEL, variants

from neula.kernels.lu.butterfly import mixed

mix = variants(mixed, "dispatch", KERNEL)


def expected(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """By the matrix itself."""
    matrix = torch.cat([torch.cat([torch.diag(w) for w in row], 1) for row in weights.double()])
    return matrix[:, : len(x)] @ x.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
# Tiles are 128 elements along memory and 4 across: one, and more than one in either direction.
@pytest.mark.parametrize(
    ("h", "k", "by_columns"), [(1, 1, False), (130, 3, False), (5, 130, False), (130, 6, True)]
)
@pytest.mark.parametrize("lacking", [0, 3])
def test_rows_are_mixed(mix, dtype: torch.dtype, h: int, k: int, by_columns: bool, lacking: int) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(h)
    x = torch.randn(4 * h - lacking, k, dtype=dtype, generator=generator).to(DEVICE)
    x = x.T.contiguous().T if by_columns else x
    weights = torch.randn(4, 4, h, dtype=torch.float64, generator=generator).to(DEVICE)
    wanted = expected(x, weights)
    # Three sums and a product, or the rounding of the weights to the format first.
    size = expected(x.abs(), weights.abs())
    bound = 6 * torch.finfo(dtype).eps * size
    for rows in (4 * h, 4 * h - lacking):
        out = torch.full((rows, k), torch.nan, dtype=dtype, device=DEVICE)
        assert mix(out, x, weights) is out
        assert ((out.double() - wanted[:rows]).abs() <= bound[:rows]).all()
    if lacking == 0:
        assert mix(x, x, weights) is x
        assert ((x.double() - wanted).abs() <= bound).all()


def test_narrow_formats_are_mixed_too() -> None:
    x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).half().to(DEVICE)
    weights = torch.ones(4, 4, 2, dtype=torch.float64, device=DEVICE)
    found = mixed(x.clone(), x, weights)
    assert ((found.double() - expected(x, weights)).abs() <= 6 * 2.0**-10 * expected(x.abs(), weights)).all()
