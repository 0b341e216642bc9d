"""LU with tournament pivoting, for a unit that rounds the sum of all updates once.

Grigori, Demmel, Xiang, "CALU: A Communication Optimal LU Factorization Algorithm", SIAM J. Matrix Anal.
Appl. 32, 2011, in the arithmetic of Algorithm 5.2 of Lopez and Mary with inner panels by 5.1: the matrix and
both factors are in a low format, updates are summed in single precision, and so are inner panels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Self

import torch
from torch.nn.functional import pad

from neula.algorithms.elimination.lu_panels import blocks
from neula.engines import Engine
from neula.kernels.lu.calu import eliminate, end_panel, move_rows, rows_of_u, update
from neula.kernels.lu.lu_block import solve_upper
from neula.kernels.lu.tournament import ELSEWHERE, WIDTH, PanelFactors, find_pivots
from neula.kernels.transposed_copy import transpose_in_place

SHARE = 1 / 4
"""Part of the multiprocessors that products leave to simultaneous tournaments."""


def by_pivoted_blocks(
    matrix: torch.Tensor, engine: Engine, r: int, on_columns: Callable[[int], None] | None = None
) -> torch.Tensor:
    """Algorithm 5.2 with tournament pivoting and panels of r columns, in place, without synchronizing.

    The matrix is column-major in the engine's low format. Returns the original places of the rows in their
    new order, int32.
    """
    # Row-major, so that a row that moves is contiguous.
    matrix = transpose_in_place(matrix)
    permutation = eliminate_rows(matrix, engine, r, on_columns)
    transpose_in_place(matrix)
    return permutation


def eliminate_rows(
    matrix: torch.Tensor, engine: Engine, r: int, on_columns: Callable[[int], None] | None = None
) -> torch.Tensor:
    """:func:`by_pivoted_blocks` of a row-major matrix of shape (n, k), k <= n.

    Tournaments keep few multiprocessors busy, so what does not wait for their pivots runs concurrently with
    them: rows of U of the panel before, and what these and all others contribute to the next panel.
    """
    stored = _Stored(matrix, engine)
    n, width = matrix.shape
    permutation = torch.arange(n, dtype=torch.int32, device=matrix.device)
    steps = [_PanelStep.for_panel(k, n, width) for k in blocks(slice(0, width), r)]
    if not steps:
        return permutation
    panel = _workspace(n, steps[0].k, stored, 0).copy_(matrix[:, steps[0].k])
    before: _Finished | None = None
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        # The next panel with the rows of this one, which are rows of U there.
        workspace = (
            None if following is None else _workspace(n - step.shown.start, following.k, stored, step.above)
        )
        _, (lu, to, origin, l_inverses) = engine.concurrently(
            partial(_look_ahead, stored, step, before, following, workspace),
            partial(_replayed, panel, step.above, engine),
            SHARE,
        )
        before = _Finished(step, to, origin, l_inverses)
        matrix[step.below, step.k] = lu[step.above :]
        move_rows(permutation[step.shown, None], to, origin)
        if following is not None and workspace is not None:
            move_rows(workspace, to, origin)
            matrix[step.k, following.k] = workspace[step.above :][: step.k.stop - step.k.start]
            stored.solve_updated(step.k, following.k, l_inverses)
            panel = workspace[following.shown.start - step.shown.start :]
            stored.subtract(following.below, step.k, following.k, panel[following.above :])
        if on_columns is not None:
            on_columns(step.k.stop)
    if before is not None:
        before.move(stored, before.step.done)
    return permutation


@dataclass(frozen=True)
class _Stored:
    """A row-major matrix in a low format that turns into L and U."""

    matrix: torch.Tensor  # shape (n, k)
    engine: Engine  # in that format

    def subtract(self, rows: slice, done: slice, columns: slice, out: torch.Tensor) -> None:
        """``out -= A[rows, done] A[done, columns]``, in single precision."""
        self.engine.gemm(self.matrix[rows, done], self.matrix[done, columns], out, alpha=-1.0, beta=1.0)

    def solve(self, k: slice, columns: slice, l_inverses: torch.Tensor) -> None:
        """``L_kk U_kj = A_kj - L_ki U_ij`` for all columns to the left of k, which are done."""
        done, matrix = slice(0, k.start), self.matrix
        if k.start > 0:
            self.engine.gemm_low(matrix[k, done], matrix[done, columns], matrix[k, columns])
        self.solve_updated(k, columns, l_inverses)

    def solve_updated(self, k: slice, columns: slice, l_inverses: torch.Tensor) -> None:
        """``L_kk U_kj = A_kj`` for columns that are updated."""
        solve_upper(self.matrix[k, columns].T, self.matrix[k, k].T, l_inverses.mT)


@dataclass(frozen=True)
class _PanelStep:
    """A panel."""

    k: slice  # its columns, and the rows of its pivots
    shown: slice  # its rows and some above it, so that panels of few different heights occur
    above: int  # how many of them take no part in the tournament
    # done, rest, below: the columns to the left and to the right, and its rows.
    done: slice
    rest: slice
    below: slice

    @classmethod
    def for_panel(cls, k: slice, n: int, width: int) -> Self:
        """For columns k of an n x width matrix."""
        shown = slice(n - height(n - k.start, n), n)
        sides = slice(0, k.start), slice(k.stop, width), slice(k.start, n)
        return cls(k, shown, k.start - shown.start, *sides)


class _Finished(NamedTuple):
    """A panel that is factorized: how its rows move, and what solves for its rows of U."""

    step: _PanelStep
    to: torch.Tensor
    origin: torch.Tensor
    l_inverses: torch.Tensor

    def move(self, stored: _Stored, columns: slice) -> None:
        """Interchange the rows of some other columns."""
        move_rows(stored.matrix[self.step.shown, columns], self.to, self.origin)


def _workspace(rows: int, columns: slice, stored: _Stored, above: int) -> torch.Tensor:
    """For a panel; some rows above it are not written, and have to be finite."""
    shape = rows, columns.stop - columns.start
    workspace = torch.empty(shape, dtype=torch.float32, device=stored.matrix.device)
    workspace[:above] = 0
    return workspace


def _look_ahead(
    stored: _Stored,
    step: _PanelStep,
    before: _Finished | None,
    following: _PanelStep | None,
    workspace: torch.Tensor | None,
) -> None:
    """Updates that do not need the pivots of this panel: row moves and rows of U of the previous panel, and
    most of
    the updates of the next one.
    """
    if before is not None:
        before.move(stored, before.step.done)
        before.move(stored, step.rest)
    if following is None or workspace is None:
        return
    if before is not None:
        stored.solve(before.step.k, step.rest, before.l_inverses)
    out = workspace[step.above :].copy_(stored.matrix[step.below, following.k])
    if step.k.start > 0:
        stored.subtract(step.below, step.done, following.k, out)


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
    function = partial(factor_panel, engine=engine, low=low)
    return engine.replay(function, (panel, places), ("panel by tournaments", low))


def factor_panel(
    panel: torch.Tensor, places: torch.Tensor, engine: Engine, low: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Factors of updated columns, float32 and row-major, rows in their new order, in the format ``low``.

    ``places``, int32, are -1, or ``ELSEWHERE`` for rows on top that take no part; at least r rows do. Returns
    the packed factors, undefined in rows that take no part; the moves of rows ``to`` and ``origin``, shape (2
    r,), ``panel[to] = panel[origin]``; and the inverses of the blocks on the diagonal of L, shape (ceil(r /
    WIDTH), WIDTH, WIDTH).
    """
    r = panel.shape[1]
    # In whole blocks, the last one bordered by an identity.
    if r % WIDTH:
        panel = pad(panel, (0, -r % WIDTH))
    width = panel.shape[1]
    found = PanelFactors.for_panel(panel, low, places.clone())
    lower, upper = torch.zeros_like(panel, dtype=low), panel.new_empty(width, width, dtype=low)
    block = panel[:, :WIDTH].clone(memory_format=torch.contiguous_format)
    following = torch.empty_like(block)

    def look_ahead(start: int) -> None:
        if start > 0:
            rows_of_u(panel, lower, upper, found, start - WIDTH)
        update(panel, lower, upper, start, following)

    for start in range(0, r, WIDTH):
        count = min(WIDTH, r - start)
        engine.concurrently(partial(look_ahead, start), partial(find_pivots, block, found, start, count))
        eliminate(block, following, lower, upper, found, start)
    lower = lower[:, :r]
    to, origin = end_panel(lower, upper, found)
    return lower, to, origin, found.l_inverses
