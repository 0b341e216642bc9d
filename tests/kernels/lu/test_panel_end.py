"""The end of a panel, rows go to their places, and U between them."""

from __future__ import annotations

import pytest
import torch
from tests.devices import DEVICE

from neula.kernels.lu.calu import end_panel
from neula.kernels.lu.tournament import ELSEWHERE, WIDTH, PanelFactors


@pytest.mark.parametrize(
    ("m", "r", "above"), [(32, 32, 0), (40, 20, 3), (130, 96, 0), (700, 70, 5), (5000, 64, 4500)]
)
def test_rows_and_u_go_where_they_belong(m: int, r: int, above: int) -> None:
    generator = torch.Generator().manual_seed(m)
    width = -(-r // WIDTH) * WIDTH
    # Half of the pivot rows are at the top already, if not in their order.
    low = above + torch.randperm(r, generator=generator)[: r // 2]
    rest = above + torch.arange(m - above)
    rest = rest[~torch.isin(rest, low)]
    rest = rest[torch.randperm(len(rest), generator=generator)][: r - len(low)]
    pivots = torch.cat([low, rest])[torch.randperm(r, generator=generator)].to(DEVICE)
    whole = torch.randn(m, width, generator=generator).half().to(DEVICE)
    upper = torch.randn(width, width, generator=generator).half().to(DEVICE)
    found = PanelFactors.for_panel(whole.float(), torch.float16)
    found.places[:above] = ELSEWHERE
    found.places[pivots] = torch.arange(r, dtype=torch.int32, device=DEVICE)
    found.pivots[:r] = pivots
    found.factors.copy_(torch.randn(found.factors.shape, generator=generator))
    before = whole.clone()
    to, origin = end_panel(whole[:, :r], upper.clone(), found)

    order = torch.arange(m, device=DEVICE)
    order[to] = origin
    assert torch.equal(order.sort().values, torch.arange(m, device=DEVICE)), "each row once"
    assert torch.equal(order[above : above + r], pivots)
    assert torch.equal(order[:above], torch.arange(above, device=DEVICE))
    stays = torch.arange(above + r, m, device=DEVICE)
    stays = stays[~torch.isin(stays, pivots)]
    assert torch.equal(order[stays], stays), "no more moves than there have to be"
    expected, blocks = before[order], range(width // WIDTH)
    u = upper.clone()
    for i in blocks:
        k = slice(i * WIDTH, (i + 1) * WIDTH)
        u[k, k] = found.factors[i]
    for i in range(r):
        first = i // WIDTH * WIDTH
        expected[above + i, first:r] = u[i, first:r]
    expected[:, r:] = before[:, r:]
    assert torch.equal(whole, expected)
