"""LU with tournament pivoting, for a unit that rounds the sum of all updates once.

Grigori, Demmel, Xiang, "CALU: A Communication Optimal LU Factorization Algorithm", SIAM J. Matrix Anal.
Appl. 32, 2011, in the arithmetic of Algorithm 5.2 of Lopez and Mary with inner panels by 5.1: the matrix and
both factors are in a low format, updates are summed in single precision, and so are inner panels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from neula.algorithms.lu_panels import blocks
from neula.engines import Engine
from neula.kernels.calu import eliminate, move_rows, rows_of_u
from neula.kernels.lu_block import lower_inverses, solve_upper
from neula.kernels.tournament import WIDTH, PanelFactors, play


def by_pivoted_blocks(
    matrix: torch.Tensor, engine: Engine, r: int, on_columns: Callable[[int], None] | None = None
) -> torch.Tensor:
    """Algorithm 5.2 with tournament pivoting, in place; nothing waits for the device.

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
    n = matrix.shape[0]
    permutation = torch.arange(n, dtype=torch.int32, device=matrix.device)
    for k in blocks(slice(0, n), r):
        done, rest, below = slice(0, k.start), slice(k.stop, n), slice(k.start, n)
        if k.start > 0:
            engine.gemm_low(matrix[below, done], matrix[done, k], matrix[below, k])
        to, origin, l_inverses = factor_panel(matrix[below, k])
        for moved in (matrix[below, done], matrix[below, rest], permutation[below, None]):
            move_rows(moved, to, origin)
        if k.start > 0 and k.stop < n:
            engine.gemm_low(matrix[k, done], matrix[done, rest], matrix[k, rest])
        solve_upper(matrix[k, rest].T, matrix[k, k].T, l_inverses.mT)
        if on_columns is not None:
            on_columns(k.stop)
    return permutation


def factor_panel(panel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Overwrite updated columns with their factors, rows in their new order.

    Parameters
    ----------
    panel : Tensor, shape (m, r), r <= m
        Column-major, of a low format.

    Returns
    -------
    to, origin : Tensor, shape (2 r,)
        The moves of rows: ``panel[to] = panel[origin]``.
    l_inverses : Tensor
        Inverses of blocks on the diagonal of L, see :func:`neula.kernels.lu_block.lower_inverses`.
    """
    m, r = panel.shape
    found = PanelFactors.of(panel)
    # Whole blocks on the diagonal.
    whole = panel.new_empty(2 * [WIDTH * len(found.factors)])
    upper = whole[:r, :r]
    block = panel.new_zeros(m, WIDTH, dtype=torch.float32)
    block[:, : min(r, WIDTH)] = panel[:, :WIDTH]
    for start in range(0, r, WIDTH):
        play(block, found, start, min(WIDTH, r - start))
        rows_of_u(panel, upper, found, start)
        eliminate(panel, block, upper, found, start)
    to, origin = moves(found)
    move_rows(panel, to, origin)
    whole.unflatten(1, (-1, WIDTH)).unflatten(0, (-1, WIDTH)).diagonal(dim1=0, dim2=2).copy_(
        found.factors.permute(1, 2, 0)
    )
    # Rows of U are not where they were: what elimination left there is nothing but rounding errors.
    number = torch.arange(r, device=panel.device) // WIDTH
    diagonal = panel[:r]
    diagonal.copy_(torch.where(number[:, None] > number, diagonal, upper))
    return to, origin, lower_inverses(diagonal, found.l_inverses)


def moves(found: PanelFactors) -> tuple[torch.Tensor, torch.Tensor]:
    """Where rows go, and where from, once a panel is done: pivot rows to the top, in their order.

    The rows that were at the top take the places of the pivot rows from further down.

    Returns
    -------
    to, origin : Tensor, shape (2 r,)
        int64; a move that is not needed is the first one, once more.
    """
    pivots = found.pivots.long()
    r = len(pivots)
    top = torch.arange(r, device=pivots.device)
    displaced, vacated = found.places[:r] < 0, pivots >= r
    # The i-th of those goes to the i-th of these; whatever is neither comes to index 0.
    numbered = torch.zeros(r + 1, dtype=torch.int64, device=pivots.device)
    numbered.scatter_(0, torch.where(displaced, displaced.cumsum(0), 0), top)
    to = torch.where(vacated, pivots, 0)
    origin = torch.where(vacated, numbered[vacated.cumsum(0)], pivots[0])
    return torch.cat([top, to]), torch.cat([pivots, origin])
