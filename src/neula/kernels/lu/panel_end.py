"""The last steps of a panel factorized by tournaments: move rows to their places, and compute rows of U.

As operations of torch these are two dozen launches of a few numbers each, one after the other, while nothing
else of the factorization can continue: 50 us for each panel on an H200, and three launches by kernels.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.lu.calu import move_rows
from neula.kernels.lu.tournament import ELSEWHERE, WIDTH, PanelFactors


@trial("The kernels that end a panel", "a few dozen of the library's take their place")
def _tried(device: torch.device) -> None:
    lower = torch.eye(WIDTH, device=device, dtype=torch.float16)
    found = PanelFactors.for_panel(lower.float(), torch.float16)
    end_panel.kernel(lower, lower.clone(), found)


@kernel("neula.kernels.lu.panel_end_triton:end_panel_triton", trial=_tried)
def end_panel(
    lower: torch.Tensor, upper: torch.Tensor, found: PanelFactors
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the rows of L, and write U above them.

    Parameters
    ----------
    lower : Tensor, shape (m, r)
        L, rows where they were; overwritten with both factors, pivot rows on top of those that take part.
    upper : Tensor, shape (s, s)
        U in its first r rows and columns, without the diagonal blocks, which ``found`` has.
    found : PanelFactors
        Of r pivots. Rows that are ``ELSEWHERE`` lie above all others.

    Returns
    -------
    to, origin : Tensor, shape (2 r,)
        int64: rows ``to`` of L come from ``origin``; where fewer moves are needed the first one is repeated.
    """
    r = lower.shape[1]
    rows = torch.arange(r, device=lower.device)
    top = (found.places == ELSEWHERE).sum() + rows
    to, origin = moves(found.pivots[:r], found.places, top)
    move_rows(lower, to, origin)
    on_diagonal = upper.unflatten(1, (-1, WIDTH)).unflatten(0, (-1, WIDTH)).diagonal(dim1=0, dim2=2)
    on_diagonal.copy_(found.factors.permute(1, 2, 0))
    number = rows // WIDTH
    lower[top] = torch.where(number[:, None] > number, lower[top], upper[:r, :r])
    return to, origin


def moves(pivots: torch.Tensor, places: torch.Tensor, top: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets and sources of row moves after a panel: pivot rows go to the top, in their order.

    The rows that were at the top take the places of the pivot rows from further down.

    Parameters
    ----------
    pivots : Tensor, shape (r,)
    places : Tensor, shape (m,)
        As in ``PanelFactors``.
    top : Tensor, shape (r,)
        The first r rows of the panel that take part, in order.

    Returns
    -------
    to, origin : Tensor, shape (2 r,)
        int64; where fewer moves are needed the first one is repeated.
    """
    pivots = pivots.long()
    displaced, vacated = places[top] < 0, pivots > top[-1]
    # The i-th of those goes to the i-th of these; whatever is neither comes to index 0.
    numbered = top.new_zeros(len(top) + 1)
    numbered.scatter_(0, torch.where(displaced, displaced.cumsum(0), 0), top)
    to = torch.where(vacated, pivots, top[0])
    origin = torch.where(vacated, numbered[vacated.cumsum(0)], pivots[0])
    return torch.cat([top, to]), torch.cat([pivots, origin])
