"""Kernels that correct eigenvectors agree with their references."""

from __future__ import annotations

import pytest
import torch
from tests.devices import normal as random

from neula.kernels.spectra.correction import turned


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("count", "m", "n", "offset"), [(2, 70, 48, 0), (1, 1, 41, 8), (3, 5, 7, 8), (1, 64, 16, 0)]
)
def test_blocks_turn_their_columns(count: int, m: int, n: int, offset: int, transposed: bool) -> None:
    pytest.importorskip("triton")
    before = -offset % 16
    blocks = -(-(before + n) // 16)
    turns = random(count, blocks, 16, 16)
    whole = torch.stack([torch.block_diag(*each) for each in turns.unbind()])
    x = random(count, n, m).mT if transposed else random(count, m, n)
    expected = x @ whole[:, before : before + n, before : before + n]
    # Sixteen products and their sums.
    bound = 32 * 2.0**-24 * (x.abs() @ whole.abs()[:, before : before + n, before : before + n])
    assert torch.allclose(turned.reference(x, turns, offset), expected)
    found = turned.kernel(x.float(), turns.float(), offset)
    assert bool(((found.double() - expected).abs() <= bound).all())
