"""Pivot rows of a few columns by a tournament, with the factors of the block that they form.

Partial pivoting looks for the largest element of each column among all rows, and all of a GPU has to wait for
it each time. In a tournament tiles of rows are eliminated with partial pivoting, each for itself, and the
pivot rows of some tiles form the tiles of the next round, until one is left (Grigori, Demmel, Xiang, "CALU: A
Communication Optimal LU Factorization Algorithm", SIAM J. Matrix Anal. Appl. 32, 2011). In CUDA C++ a thread
keeps its rows in registers, and a column is one maximum over a warp, one barrier, and the subtraction of a
row from the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.dispatch import kernel, trial
from neula.kernels.triangular_inverse import triangular_inverses

WIDTH = 32
"""Columns that are decided together: a row is kept in the registers of one thread."""

TILE = 256
"""Rows that a thread block eliminates in, one in each thread: a round takes an H200 11 us, and one of 1024
rows 25. So three rounds, up to 16384 rows, take less time than two with larger tiles."""

ELSEWHERE = 1 << 30
"""The place of rows that are not to be touched."""


@dataclass(frozen=True)
class PanelFactors:
    """Factors of a panel of m rows and r columns, factorized :data:`WIDTH` columns at a time."""

    # Shape (m,): int32: which pivot row each row has become, -1 where it has become none, and ELSEWHERE where
    # the row is none of the panel's.
    places: torch.Tensor
    pivots: torch.Tensor  # shape (r,): int32: the rows of the panel that have become pivot rows
    # Shape (ceil(r / WIDTH), WIDTH, WIDTH): float32: blocks of L and U on the diagonal, in one matrix,
    # rounded to the low format; the last is bordered by an identity.
    factors: torch.Tensor
    # l_inverses, u_inverses, shape (ceil(r / WIDTH), WIDTH, WIDTH): float32: inverses of what was rounded, so
    # that what is solved for makes good what rounding has lost.
    l_inverses: torch.Tensor
    u_inverses: torch.Tensor
    workspace: torch.Tensor  # int32, of zeros: what the rounds need
    low: torch.dtype  # format of the factors

    @classmethod
    def for_panel(cls, panel: torch.Tensor, low: torch.dtype, places: torch.Tensor | None = None) -> Self:
        """For a panel of which no column is factorized yet; all rows are candidates except by ``places``."""
        m, r = panel.shape
        factors, l_inverses, u_inverses = panel.new_empty(
            3, -(-r // WIDTH), WIDTH, WIDTH, dtype=torch.float32
        )
        return cls(
            places=panel.new_full((m,), -1, dtype=torch.int32) if places is None else places,
            pivots=panel.new_zeros(r, dtype=torch.int32),
            factors=factors,
            l_inverses=l_inverses,
            u_inverses=u_inverses,
            workspace=panel.new_zeros(2 * workspace_of_rounds(m), dtype=torch.int32),
            low=low,
        )


def workspace_of_rounds(m: int) -> int:
    """Numbers of the candidate rows of all rounds except the first, in whole tiles."""
    tiles, workspace = -(-m // TILE), 0
    while tiles > 1:
        tiles = -(-tiles * WIDTH // TILE)
        workspace += tiles * TILE
    return workspace


@trial("The kernel of pivot rows", "matrices that need pivoting are left to the library")
def _tried(device: torch.device) -> None:
    block = torch.eye(WIDTH, dtype=torch.float32, device=device)
    find_pivots.kernel(block, PanelFactors.for_panel(block, torch.float16), 0, WIDTH)


@kernel("find_pivots_cuda", trial=_tried)
def find_pivots(block: torch.Tensor, found: PanelFactors, start: int, count: int) -> None:
    """Find the next ``count`` pivot rows of a panel, and write them, their factors, and the inverses into
    ``found``.

    ``block`` (m, WIDTH), float32 and contiguous, has the columns, updated; those from ``count`` on are zero.
    On a GPU by a kernel in CUDA C++, which compares 16 bits of a significand. Elements of L are not bounded
    by one, as they are with partial pivoting, but hardly exceed it. A pivot is zero only where a column is;
    NaN comes before all numbers.
    """
    find_pivots_reference(block, found, start, count)


def find_pivots_reference(
    block: torch.Tensor, found: PanelFactors, start: int, count: int, tile: int = TILE
) -> None:
    """:func:`find_pivots` in plain torch, on any device, with tiles of any number of rows."""
    rows = (found.places < 0).nonzero()[:, 0]
    while len(rows) > tile:
        tiles = torch.nn.functional.pad(rows, (0, -len(rows) % tile), value=-1).view(-1, tile)
        winners, _ = _eliminate(block[tiles], tiles >= 0, count)
        won = tiles.gather(1, winners.clamp(min=0))
        rows = won[winners >= 0]
    winners, eliminated = _eliminate(block[rows][None], torch.ones_like(rows, dtype=torch.bool)[None], count)
    pivots, index = rows[winners[0]], start // WIDTH
    found.pivots[start : start + count] = pivots.int()
    found.places[pivots] = torch.arange(start, start + count, dtype=torch.int32, device=block.device)
    factors = found.factors[index].copy_(torch.eye(WIDTH, dtype=torch.float32, device=block.device))
    factors[:count, :count] = eliminated[0, winners[0], :count]
    l_inverse, u_inverse = triangular_inverses(factors.copy_(factors.to(found.low)))
    found.l_inverses[index], found.u_inverses[index] = l_inverse, u_inverse


def _eliminate(x: torch.Tensor, active: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Elimination with partial pivoting in some tiles, without interchanges.

    Returns the pivot rows of each tile, -1 where it has fewer, and what x has become: L, and U in pivot rows.
    """
    each = torch.arange(len(x), device=x.device)
    winners = torch.full((len(x), count), -1, device=x.device)
    for j in range(count):
        size = x[:, :, j].abs().nan_to_num(torch.inf).masked_fill(~active, -1.0)
        largest, best = size.max(1)
        found = largest >= 0
        winners[:, j] = torch.where(found, best, -1)
        row = x[each, best]
        active[each[found], best[found]] = False
        # A zero pivot has only zeros below it.
        multipliers = torch.where(row[:, j, None] == 0, 0.0, x[:, :, j] / row[:, j, None])
        x[:, :, j] = torch.where(active, multipliers, x[:, :, j])
        changed = x[:, :, j + 1 :] - multipliers[:, :, None] * row[:, None, j + 1 :]
        x[:, :, j + 1 :] = torch.where(active[:, :, None], changed, x[:, :, j + 1 :])
    return winners, x


MACROS = f"#define TILE {TILE}\n"


def find_pivots_cuda(block, found, start, count):
    tensors, numbers = arguments(block, found, start)
    kernel = compiled("tournament", "tournament", block.device, MACROS)
    kernel((-(-len(block) // TILE), 1, 1), (TILE, 1, 1), [*tensors, *numbers, count])


def arguments(
    block: torch.Tensor, found: PanelFactors, start: int
) -> tuple[list[torch.Tensor], tuple[int, int, int]]:
    """Arguments of the kernel, except for the number of pivots."""
    index = start // block.shape[1]
    candidates, arrived = found.workspace.chunk(2)
    dropped = round(math.log2(torch.finfo(found.low).eps / torch.finfo(torch.float32).eps))
    blocks = [found.factors[index], found.l_inverses[index], found.u_inverses[index]]
    return [block, found.places, found.pivots, *blocks, candidates, arrived], (dropped, len(block), start)
