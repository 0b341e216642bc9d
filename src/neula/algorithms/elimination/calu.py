"""LU with tournament pivoting, for a unit that rounds the sum of all updates once.

Grigori, Demmel, Xiang, "CALU: A Communication Optimal LU Factorization Algorithm", SIAM J. Matrix Anal.
Appl. 32, 2011, in the arithmetic of Algorithm 5.2 of Lopez and Mary with inner panels by 5.1: the matrix and
both factors are in a low format, updates are summed in single precision, and so are inner panels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import pad

from neula.algorithms.elimination.lu_panels import blocks
from neula.engines import Engine
from neula.kernels.calu import eliminate, move_rows, rows_of_u
from neula.kernels.lu_block import solve_upper
from neula.kernels.tournament import ELSEWHERE, WIDTH, PanelFactors, play
from neula.kernels.transposed_copy import transpose_in_place


def by_pivoted_blocks(
    matrix: torch.Tensor, engine: Engine, r: int, on_columns: Callable[[int], None] | None = None
) -> torch.Tensor:
    """Algorithm 5.2 with tournament pivoting, in place, without synchronizing.

    Parameters
    ----------
    matrix : Tensor, shape (n, n)
        Column-major in the engine's low format; overwritten.
    engine : Engine
    r : int
        Width of the panels.
    on_columns : callable, optional

    Returns
    -------
    Tensor, shape (n,)
        int32: the original places of the rows in their new order.
    """
    # Row-major, so that a row that moves is contiguous.
    matrix = transpose_in_place(matrix)
    permutation = eliminate_rows(matrix, engine, r, on_columns)
    transpose_in_place(matrix)
    return permutation


def eliminate_rows(
    matrix: torch.Tensor, engine: Engine, r: int, on_columns: Callable[[int], None] | None = None
) -> torch.Tensor:
    """:func:`by_pivoted_blocks` of a row-major matrix of shape (n, k), k <= n."""
    n, width = matrix.shape
    # ``shown`` are the rows of the panel and some above it, so that panels of few different heights occur;
    # those ``above`` take no part in the tournament.
    permutation = torch.arange(n, dtype=torch.int32, device=matrix.device)
    for k in blocks(slice(0, width), r):
        done, rest, below = slice(0, k.start), slice(k.stop, width), slice(k.start, n)
        shown = slice(n - height(n - k.start, n), n)
        above = k.start - shown.start
        panel = torch.empty(n - shown.start, k.stop - k.start, dtype=engine.storage, device=matrix.device)
        panel.copy_(matrix[shown, k])
        if k.start > 0:
            engine.gemm(matrix[below, done], matrix[done, k], panel[above:], alpha=-1.0, beta=1.0)
        lu, to, origin, l_inverses = _replayed(panel, above, engine)
        matrix[below, k] = lu[above:]
        for moved in (matrix[shown, done], matrix[shown, rest], permutation[shown, None]):
            move_rows(moved, to, origin)
        if k.start > 0 and k.stop < width:
            engine.gemm_low(matrix[k, done], matrix[done, rest], matrix[k, rest])
        solve_upper(matrix[k, rest].T, matrix[k, k].T, l_inverses.mT)
        if on_columns is not None:
            on_columns(k.stop)
    return permutation


def height(m: int, n: int) -> int:
    """Rows to which a panel of m rows is extended: few different heights need few CUDA graphs.

    The rows on top of the panel take no part in the tournament.
    """
    octave = 1 << (m - 1).bit_length()
    return min(n, octave if 4 * m > 3 * octave else 3 * octave // 4)


def _replayed(panel: torch.Tensor, above: int, engine: Engine) -> tuple[torch.Tensor, ...]:
    """:func:`factor_panel`, a hundred launches of microseconds each, from one CUDA graph if possible."""
    places = torch.full(panel.shape[:1], -1, dtype=torch.int32, device=panel.device)
    places[:above] = ELSEWHERE
    low = engine.operand_dtype
    return engine.replay(partial(factor_panel, low=low), (panel, places), ("panel by tournaments", low))


def factor_panel(panel: torch.Tensor, places: torch.Tensor, low: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Factors of updated columns, rows in their new order.

    Parameters
    ----------
    panel : Tensor, shape (m, r)
        float32, row-major.
    places : Tensor, shape (m,)
        int32: -1, or ``ELSEWHERE`` for rows on top that take no part. At least r rows do.
    low : torch.dtype
        Format of the factors.

    Returns
    -------
    lu : Tensor, shape (m, r)
        Undefined in rows that take no part.
    to, origin : Tensor, shape (2 r,)
        The moves of rows: ``panel[to] = panel[origin]``.
    l_inverses : Tensor, shape (ceil(r / WIDTH), WIDTH, WIDTH)
        Inverses of the blocks on the diagonal of L.
    """
    r = panel.shape[1]
    top = (places == ELSEWHERE).sum() + torch.arange(r, device=panel.device)
    # In whole blocks, the last one bordered by an identity.
    if r % WIDTH:
        panel = pad(panel, (0, -r % WIDTH))
    width = panel.shape[1]
    found = PanelFactors.of(panel, low, places.clone())
    lower, upper = torch.zeros_like(panel, dtype=low), panel.new_empty(width, width, dtype=low)
    block = panel[:, :WIDTH].clone(memory_format=torch.contiguous_format)
    for start in range(0, r, WIDTH):
        play(block, found, start, min(WIDTH, r - start))
        rows_of_u(panel, lower, upper, found, start)
        eliminate(panel, block, lower, upper, found, start)
    lower = lower[:, :r]
    to, origin = moves(found.pivots[:r], found.places, top)
    move_rows(lower, to, origin)
    blocks_on_diagonal = upper.unflatten(1, (-1, WIDTH)).unflatten(0, (-1, WIDTH)).diagonal(dim1=0, dim2=2)
    blocks_on_diagonal.copy_(found.factors.permute(1, 2, 0))
    number = torch.arange(r, device=panel.device) // WIDTH
    lower[top] = torch.where(number[:, None] > number, lower[top], upper[:r, :r])
    return lower, to, origin, found.l_inverses


def moves(pivots: torch.Tensor, places: torch.Tensor, top: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where rows go, and where from, once a panel is done: pivot rows to the top, in their order.

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
