"""Elimination in panels whose rows stay where they are: reference and kernels against the same bounds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.devices import DEVICE, HAS_GPU, KERNEL

from neula.io.matrices import random_matrix
from neula.kernels.lu import calu
from neula.kernels.lu.tournament import WIDTH, PanelFactors, find_pivots_reference

U16, U32 = 2.0**-11, 2.0**-24


@pytest.fixture(params=["reference", KERNEL])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The functions in plain torch, or their kernels: in Triton's interpreter with small blocks."""
    if request.param == "kernel":
        pytest.importorskip("triton")
    if request.param == "kernel" and not HAS_GPU:
        for name, size in (("FEW_ROWS", 32), ("ROWS", 64), ("COLUMNS", 16)):
            monkeypatch.setattr(calu, name, size)
    functions = (calu.rows_of_u, calu.update, calu.eliminate, calu.move_rows)
    return SimpleNamespace(**{x.reference.__name__: getattr(x, request.param) for x in functions})


@pytest.mark.parametrize(("m", "r"), [(32, 32), (71, 64), (130, 96)])
def test_a_panel(m: int, r: int, steps: SimpleNamespace) -> None:
    """``|A - L U| <= (2 u + r u32) |L| |U|`` (Lopez and Mary, Table 2), rows where they are."""
    panel = random_matrix("normal", m, r, dtype=torch.float32, seed=m).to(DEVICE)
    before = panel.clone()
    whole = torch.full((m + 5, r + 3), torch.nan, dtype=torch.float16, device=DEVICE)
    lower, upper = whole[2 : m + 2, 1 : r + 1], torch.full_like(whole[:r, :r], torch.nan)
    found = PanelFactors.for_panel(panel, torch.float16)
    block = panel[:, :WIDTH].clone(memory_format=torch.contiguous_format)
    following = torch.empty_like(block)
    for start in range(0, r, WIDTH):
        find_pivots_reference(block, found, start, WIDTH)
        if start > 0:
            steps.rows_of_u(panel, lower, upper, found, start - WIDTH)
        steps.update(panel, lower, upper, start, following)
        steps.eliminate(block, following, lower, upper, found, start)
        k = slice(start, start + WIDTH)
        upper[k, k] = found.factors[start // WIDTH]
    assert torch.equal(panel, before)
    a, u = panel.double().cpu(), upper.double().cpu().triu()
    places, number = found.places.cpu(), torch.arange(r)
    is_pivot = places >= 0
    # Of a pivot row there are as many blocks of L as it took to become one.
    written = number < (places[:, None] // WIDTH + 1) * WIDTH
    written[~is_pivot] = True
    assert torch.equal(lower.cpu().isnan(), ~written)
    assert int(whole.isnan().sum()) == whole.numel() - int(written.sum()), "nothing beside L"
    lower = lower.double().cpu()
    lower[is_pivot] = torch.where(number < places[is_pivot, None], lower[is_pivot], 0.0)
    lower[is_pivot, places[is_pivot].long()] = 1.0
    size = a.abs() + lower.abs() @ u.abs()
    # In each product with an inverse there are 32 sums more, and sums of the unit are truncated; elements of
    # L may be subnormal.
    bound = (2.1 * U16 + 2 * (r + WIDTH) * U32) * size + 2.0**-25 * (2 + u.abs().sum(0))
    assert ((lower @ u - a).abs() <= bound).all()


@pytest.mark.parametrize(("m", "n", "k"), [(5, 1, 1), (40, 9, 12), (300, 70, 130)])
def test_moves(m: int, n: int, k: int, steps: SimpleNamespace) -> None:
    generator = torch.Generator().manual_seed(k)
    rows = torch.randperm(m, generator=generator)[:k]
    to, origin = rows, rows[torch.randperm(k, generator=generator)]
    # A move may be said twice.
    to, origin = (torch.cat([x, x[:1]]).to(DEVICE) for x in (to, origin))
    for dtype in (torch.float16, torch.int32):
        whole = torch.arange((m + 3) * (n + 2), device=DEVICE).reshape(n + 2, m + 3).T.to(dtype)
        matrix = whole[1 : m + 1, 1 : n + 1]
        expected = whole.clone()
        expected[1 : m + 1, 1 : n + 1][to] = matrix[origin]
        steps.move_rows(matrix, to, origin)
        assert torch.equal(whole, expected)
    calu.move_rows(matrix[:, :0], to, origin)
