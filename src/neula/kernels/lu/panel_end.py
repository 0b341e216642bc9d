"""The last steps of a panel factorized by tournaments: move rows to their places, and compute rows of U.

As operations of torch these are two dozen launches of a few numbers each, one after the other, while nothing
else of the factorization can continue: 50 us for each panel on an H200, and three launches by kernels.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import ceil_div, next_power_of_2
from neula.kernels.lu.calu import move_rows, move_rows_triton
from neula.kernels.lu.tournament import ELSEWHERE, WIDTH, PanelFactors
from neula.kernels.triton_source import jit, tl


@trial("The kernels that end a panel", "a few dozen of the library's take their place")
def _tried(device: torch.device) -> None:
    lower = torch.eye(WIDTH, device=device, dtype=torch.float16)
    found = PanelFactors.for_panel(lower.float(), torch.float16)
    end_panel.kernel(lower, lower.clone(), found)


@kernel("end_panel_triton", trial=_tried)
def end_panel(
    lower: torch.Tensor, upper: torch.Tensor, found: PanelFactors
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the rows of L, and write U above them.

    ``lower`` (m, r) is L, rows where they were; overwritten with both factors, pivot rows on top of those
    that take part. ``upper`` has U in its first r rows and columns, without the diagonal blocks, which
    ``found`` has. Rows that are ``ELSEWHERE`` lie above all others. Returns the moves: rows ``to`` of L come
    from ``origin``, (2 r,), int64; where fewer are needed the first one is repeated.
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

    ``top`` are the first r rows of the panel that take part, in order. The rows that were there take the
    places of the pivot rows from further down.
    """
    pivots = pivots.long()
    displaced, vacated = places[top] < 0, pivots > top[-1]
    # The i-th of those goes to the i-th of these; whatever is neither comes to index 0.
    numbered = top.new_zeros(len(top) + 1)
    numbered.scatter_(0, torch.where(displaced, displaced.cumsum(0), 0), top)
    to = torch.where(vacated, pivots, top[0])
    origin = torch.where(vacated, numbered[vacated.cumsum(0)], pivots[0])
    return torch.cat([top, to]), torch.cat([pivots, origin])


COUNTED = 4096
"""Rows that are counted at a time."""

WARPS = 8


def end_panel_triton(
    lower: torch.Tensor, upper: torch.Tensor, found: PanelFactors
) -> tuple[torch.Tensor, torch.Tensor]:
    m, r = lower.shape
    to, origin, numbered = (torch.empty(2 * r, dtype=torch.int64, device=lower.device) for _ in range(3))
    blocks = ceil_div(r, WIDTH)
    _moves_kernel[(1,)](
        *(found.pivots, found.places, to, origin, numbered, m, r),
        *(ELSEWHERE, COUNTED, next_power_of_2(r)),
        num_warps=WARPS,
    )
    move_rows_triton(lower, to, origin)
    _upper_kernel[(blocks, blocks)](
        *(lower, *lower.stride(), upper, *upper.stride(), found.factors, to, r, WIDTH)
    )
    return to, origin


@jit
def _moves_kernel(
    pivots, places, to, origin, numbered, m, r,
    ELSEWHERE: tl.constexpr, COUNTED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Targets of r pivot rows, and of the rows that they displace."""
    rows = tl.arange(0, COUNTED)
    above = tl.zeros((COUNTED,), tl.int32)
    for start in range(0, m, COUNTED):
        above += (tl.load(places + start + rows, mask=start + rows < m, other=0) == ELSEWHERE).to(tl.int32)
    i = tl.arange(0, COUNT)
    inside = i < r
    first = tl.sum(above)
    top = (first + i).to(tl.int64)
    pivot = tl.load(pivots + i, mask=inside, other=0).to(tl.int64)
    displaced = inside & (tl.load(places + top, mask=inside, other=0) < 0)
    vacated = inside & (pivot >= first + r)
    # The n-th of those goes to the n-th of these.
    tl.store(numbered + tl.cumsum(displaced.to(tl.int32)), top, mask=displaced)
    tl.debug_barrier()
    number = tl.cumsum(vacated.to(tl.int32))
    tl.store(to + i, top, mask=inside)
    tl.store(origin + i, pivot, mask=inside)
    tl.store(to + r + i, tl.where(vacated, pivot, first), mask=inside)
    moved = tl.load(numbered + number, mask=vacated, other=0)
    tl.store(origin + r + i, tl.where(vacated, moved, tl.load(pivots).to(tl.int64)), mask=inside)


@jit
def _upper_kernel(
    lower, lower_row, lower_column, upper, upper_row, upper_column, factors, to, r, WIDTH: tl.constexpr
):
    """A block of U, to rows that begin where the first pivot row has gone to."""
    down, across = tl.program_id(0), tl.program_id(1)
    if across >= down:
        w = tl.arange(0, WIDTH).to(tl.int64)
        i, j = down * WIDTH + w, across * WIDTH + w
        inside = (i < r)[:, None] & (j < r)[None, :]
        if across == down:
            block = tl.load(factors + down * WIDTH * WIDTH + w[:, None] * WIDTH + w[None, :])
        else:
            place = upper + i[:, None] * upper_row + j[None, :] * upper_column
            block = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        place = lower + (tl.load(to) + i)[:, None] * lower_row + j[None, :] * lower_column
        tl.store(place, block.to(lower.dtype.element_ty), mask=inside)
