"""Panels of LU factorizations: what is done with r columns once they are updated.

A panel takes the updated columns, factorizes them into L and U in its own arithmetic, leaves both in the
matrix, and returns the function that later solves for the rows of U to the right. A panel that consists of
inner panels is a left-looking factorization itself, which is why that algorithm is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch

from neula.engines import Engine
from neula.kernels.lu.lu_block import lu_unpivoted
from neula.kernels.triangular_inverse import triangular_inverses

MOVED_ELEMENTS = 1 << 20
"""Elements that are copied at a time: interchanges shall not need the memory of another panel."""


@dataclass
class Interchanges:
    """Rows that were interchanged, as LAPACK records them."""

    # Shape (..., n): int64, on the CPU: row i was interchanged with row pivots[i], in this order.
    pivots: torch.Tensor

    @classmethod
    def none(cls, n: int) -> Self:
        """Identity permutation of n rows."""
        return cls(torch.arange(n, device="cpu"))

    @classmethod
    def leading_to(cls, permutation: torch.Tensor) -> Self:
        """The only ones, each with a row further down, that put rows in this order."""
        order = permutation.tolist()
        rows, places = list(range(len(order))), list(range(len(order)))
        pivots = []
        for i, row in enumerate(order):
            pivots.append(places[row])
            rows[places[row]], places[rows[i]] = rows[i], places[row]
        return cls(torch.tensor(pivots, dtype=torch.int64, device="cpu"))

    def permutation(self) -> torch.Tensor:
        """Original places of the rows in their new order, shape (..., n), on the CPU."""
        if self.pivots.ndim > 1:
            return self._permutations()
        rows, pivots = list(range(len(self.pivots))), self.pivots.tolist()
        if pivots != rows:  # else there is nothing to go through, which would take as long as a solve
            for i, pivot in enumerate(pivots):
                rows[i], rows[pivot] = rows[pivot], rows[i]
        return torch.from_numpy(np.array(rows, np.int64))  # torch.tensor takes longer for lists

    def _permutations(self) -> torch.Tensor:
        """Those of a batch, a row of all matrices at a time."""
        n = self.pivots.shape[-1]
        pivots = self.pivots.reshape(-1, n).T.numpy()
        rows, members = np.repeat(np.arange(n)[:, None], pivots.shape[1], 1), np.arange(pivots.shape[1])
        for i, pivot in enumerate(pivots):
            moved = rows[pivot, members]
            rows[pivot, members] = rows[i]
            rows[i] = moved
        return torch.from_numpy(rows.T.copy()).reshape(self.pivots.shape)

    def apply(self, matrix: torch.Tensor, start: int, pivots: list[int], done: slice) -> None:
        """Record the pivots of rows ``start, start + 1, ...``, rows of the matrix, and interchange its rows.

        Those of the columns ``done`` have been interchanged already.
        """
        self.pivots[start : start + len(pivots)] = torch.tensor(pivots, device="cpu")
        moved: dict[int, int] = {}
        for i, pivot in enumerate(pivots, start):
            moved[i], moved[pivot] = moved.get(pivot, pivot), moved.get(i, i)
        # In order: memory is read and written in the order in which it lies, as far as that goes.
        moves = sorted((to, origin) for to, origin in moved.items() if to != origin)
        if not moves:
            return
        to, origin = torch.tensor(moves, device=matrix.device).T
        width = max(1, MOVED_ELEMENTS // len(moves))
        for side in (matrix[:, : done.start], matrix[:, done.stop :]):
            for columns in side.split(width, 1):
                _move_rows(columns, to, origin)


def _move_rows(columns: torch.Tensor, to: torch.Tensor, origin: torch.Tensor) -> None:
    """``columns[to] = columns[origin]``, two to four times as fast on columns that are contiguous."""
    columns.T.index_copy_(1, to, columns.T.gather(1, origin.expand(columns.shape[1], -1)))


Solve = Callable[[torch.Tensor, slice], None]
"""Turns updated rows of the given columns into rows of U, and leaves them in the matrix."""


# item: L (4.1) to (4.3)
@dataclass(frozen=True)
class Workspace:
    """The matrix that turns into L and U, and how its blocks are updated: shared by all steps."""

    matrix: torch.Tensor  # shape (n, n): column-major, in the storage precision
    engine: Engine  # multiplies
    low: bool  # whether the matrix is in the engine's low format: then its blocks are operands as they are
    buffer: torch.Tensor | None  # workspace where updates are summed; None to sum them in the matrix
    interchanges: Interchanges | None  # record of the row interchanges; None without pivoting

    @property
    def wide(self) -> Engine:
        """The engine in the precision in which sums are kept."""
        return self.engine.using("fp64" if self.engine.storage.to_real() == torch.float64 else "fp32")

    def panel(self, columns: slice) -> torch.Tensor:
        """The columns from the diagonal block downwards, in the matrix."""
        return self.matrix[columns.start :, columns]

    def update(self, rows: slice, columns: slice, done: slice) -> torch.Tensor:
        """``B = A - L U`` with the L and U that are ``done``: in the buffer, or in place."""
        block, left, right = self.matrix[rows, columns], self.matrix[rows, done], self.matrix[done, columns]
        if self.buffer is not None:
            m, n = block.shape
            block = self.buffer[: m * n].view(n, m).T.copy_(block)
        if left.shape[1] == 0:
            return block
        if self.buffer is None and self.low:
            self.engine.gemm_low(left, right, block)
            return block
        if not self.low:
            left, right = self.engine.operand(left), self.engine.operand(right)
        return self.engine.gemm(left, right, block, alpha=-1.0, beta=1.0)

    def fits_twice(self, width: int) -> bool:
        """Whether two blocks of this width fit."""
        return self.buffer is None or 2 * self.matrix.shape[0] * width <= self.buffer.numel()

    def second_workspace(self, block: torch.Tensor) -> torch.Tensor:
        """Room for another matrix of the shape of an updated block."""
        m, n = block.shape
        if self.buffer is None:
            return self.wide.empty(m, n)
        return self.buffer[m * n : 2 * m * n].view(n, m).T

    def store(self, block: torch.Tensor, place: torch.Tensor) -> None:
        """Convert a block to the format of the matrix; nothing where it was updated in place."""
        if block.data_ptr() == place.data_ptr():
            return
        if self.low:
            self.engine.round(block, place)
        else:
            place.copy_(block)


Panel = Callable[[Workspace, torch.Tensor, slice], Solve]
"""Factorizes updated columns, from the diagonal block downwards."""


def blocks(whole: slice, width: int) -> Iterator[slice]:
    """The partition of a range; the last block is what is left."""
    return (slice(start, min(start + width, whole.stop)) for start in range(whole.start, whole.stop, width))


def halves(whole: slice, leaf: int) -> tuple[slice, slice]:
    """Two parts, the first a power of two times a leaf: blocks of few different sizes."""
    half = leaf
    while 2 * half < whole.stop - whole.start:
        half *= 2
    return slice(whole.start, whole.start + half), slice(whole.start + half, whole.stop)


# item: L Algorithm 2.2
def left_looking(work: Workspace, columns: slice, width: int, factor: Panel) -> Iterator[tuple[slice, Solve]]:
    """Algorithms 2.2, 4.1, 5.1 and 5.2 on the given columns: update a panel, then factorize it.

    The columns to the left of ``columns`` have been dealt with by who calls this. Yields each panel with the
    function that solves for its rows of U.
    """
    below = work.matrix.shape[0]
    for k in blocks(columns, width):
        done, right = slice(columns.start, k.start), slice(k.stop, columns.stop)
        # B_ik <- A_ik - L_ij U_jk for i >= k, then L_kk U_kk = B_kk and L_ik U_kk = B_ik.
        solve = factor(work, work.update(slice(k.start, below), k, done), k)
        # B_ki <- A_ki - L_kj U_ji for i > k, then L_kk U_ki = B_ki: after interchanges, in the same buffer.
        if right.start < right.stop:
            solve(work.update(k, right, done), right)
        yield k, solve


def right_looking(
    work: Workspace, columns: slice, width: int, factor: Panel
) -> Iterator[tuple[slice, Solve]]:
    """Algorithms 2.1 and 3.1: factorize a panel, then update the whole trailing matrix."""
    for k in blocks(columns, width):
        right, below = slice(k.stop, columns.stop), slice(k.stop, work.matrix.shape[0])
        solve = factor(work, work.panel(k), k)  # L_kk U_kk = A_kk, L_ik U_kk = A_ik
        if right.start < right.stop:
            solve(work.matrix[k, right], right)  # L_kk U_ki = A_ki
            work.update(below, right, k)  # A_ij <- A_ij - L_ik U_kj
        yield k, solve


def low_panel(work: Workspace, block: torch.Tensor, columns: slice) -> Solve:
    """Convert first, factorize in the low format: every operation is rounded to it (Algorithm 4.1)."""
    panel, width = work.panel(columns), columns.stop - columns.start
    work.store(block, panel)
    for j in range(width):
        if work.interchanges is not None:
            pivot = columns.start + j + int(panel[j:, j].abs().argmax())
            work.interchanges.apply(work.matrix, columns.start + j, [pivot], done=slice(0, 0))
        column, rest = panel[j + 1 :, j], panel[j + 1 :, j + 1 :]
        # Where the matrix is stored in its format, rounding once more changes nothing and costs nothing.
        work.engine.round(column.div_(panel[j, j]), column)
        _eliminate(work, rest, column, panel[j, j + 1 :])

    def solve(block: torch.Tensor, right: slice) -> None:
        u = work.matrix[columns, right]
        work.store(block, u)
        for j in range(width - 1):
            _eliminate(work, u[j + 1 :], panel[j + 1 : width, j], u[j])

    return solve


def _eliminate(work: Workspace, rest: torch.Tensor, column: torch.Tensor, row: torch.Tensor) -> None:
    work.engine.round(rest.addcmul_(column[:, None], row[None, :], value=-1), rest)


WIDEST_INVERSE = 256
"""Triangles up to this width are inverted: products are faster than substitution, and the inverse of a small
triangle costs little and loses little."""


def wide_panel(work: Workspace, block: torch.Tensor, columns: slice) -> Solve:
    """Factorize in the precision of the buffer, convert afterwards (Algorithm 5.1)."""
    width = columns.stop - columns.start
    inverted = width <= WIDEST_INVERSE and work.fits_twice(width)
    diagonal, below, panel = block[:width], block[width:], work.panel(columns)
    if work.interchanges is not None:
        work.interchanges.apply(work.matrix, columns.start, _factorize_pivoted(block, columns), done=columns)
        factors = diagonal.clone()
        l_inverse, u_inverse = triangular_inverses(factors) if inverted else (factors, factors)
    elif inverted:
        factors, l_inverse, u_inverse = _factors_and_inverses(diagonal, work.engine)
    else:
        factors = l_inverse = u_inverse = lu_unpivoted(diagonal).clone()
    if work.interchanges is None and below.numel() > 0:
        if inverted:
            below = work.wide.gemm(below, u_inverse, work.second_workspace(block)[width:])
        else:
            # With the rows of the diagonal block, which are not read again: without gaps it needs no copy.
            torch.linalg.solve_triangular(factors, block, upper=True, left=False, out=block)
    work.store(factors, panel[:width])
    work.store(below, panel[width:])

    def solve(block: torch.Tensor, right: slice) -> None:
        if inverted:
            block = work.wide.gemm(l_inverse, block, work.second_workspace(block))
        else:
            torch.linalg.solve_triangular(factors, block, upper=False, unitriangular=True, out=block)
        work.store(block, work.matrix[columns, right])

    return solve


def _factors_and_inverses(block: torch.Tensor, engine: Engine) -> tuple[torch.Tensor, ...]:
    """Factors of a diagonal block, which take its place, and their inverses: dozens of launches of
    microseconds, replayed from a CUDA graph.
    """

    def factorized(columns: torch.Tensor) -> tuple[torch.Tensor, ...]:
        factors = lu_unpivoted(columns.T)
        return columns, *triangular_inverses(factors)

    columns, *inverses = engine.replay(factorized, (block.T.contiguous(),), ("lu and inverses",))
    return block.copy_(columns.T), *inverses


def _factorize_pivoted(block: torch.Tensor, columns: slice) -> list[int]:
    """Overwrite a panel with its factors, and return the pivots as rows of the matrix."""
    pivots = torch.empty(0, dtype=torch.int32, device=block.device)
    info = torch.empty(0, dtype=torch.int32, device=block.device)
    torch.linalg.lu_factor_ex(block, out=(block, pivots, info))
    return [columns.start + pivot - 1 for pivot in pivots.tolist()]


def partitioned_panel(width: int, inner: Panel, *, buffered: bool = True) -> Panel:
    """A panel that is partitioned again (Algorithm 5.2), and factorized by Algorithm 4.1 or 5.1.

    Not buffered it is factorized by Algorithm 3.1, whose updates are rounded to the low format each time.
    """
    algorithm = left_looking if buffered else right_looking

    def factor(work: Workspace, block: torch.Tensor, columns: slice) -> Solve:
        work.store(block, work.panel(columns))
        # From here on the buffer is free for the updates inside the panel.
        work = work if buffered else replace(work, buffer=None)
        rows_of_u = list(algorithm(work, columns, width, inner))

        def solve(block: torch.Tensor, right: slice) -> None:
            work.store(block, work.matrix[columns, right])
            for rows, solve_inner in rows_of_u:
                solve_inner(work.update(rows, right, slice(columns.start, rows.start)), right)

        return solve

    return factor


def single_panel(width: int) -> Panel:
    """A panel that stays in float32, partitioned again and factorized by Algorithm 3.1 (Algorithm 5.2).

    The low format has the operands of its updates, and L and U once they are done.
    """

    def factor(work: Workspace, block: torch.Tensor, columns: slice) -> Solve:
        r, rows = columns.stop - columns.start, None
        if work.interchanges is not None:
            rows = Interchanges.none(block.shape[0])
        inner = replace(work, matrix=block, low=False, buffer=None, interchanges=rows)
        list(right_looking(inner, slice(0, r), width, wide_panel))
        if work.interchanges is not None and rows is not None:
            pivots = [columns.start + pivot for pivot in rows.pivots[:r].tolist()]
            work.interchanges.apply(work.matrix, columns.start, pivots, done=columns)
        lower = block[:r].clone()
        work.store(block, work.panel(columns))

        def solve(block: torch.Tensor, right: slice) -> None:
            for k in blocks(slice(0, r), width):
                u, rest = block[k], slice(k.stop, r)
                torch.linalg.solve_triangular(lower[k, k], u, upper=False, unitriangular=True, out=u)
                left = work.engine.operand(lower[rest, k])
                work.engine.gemm(left, work.engine.operand(u), block[rest], alpha=-1.0, beta=1.0)
            work.store(block, work.matrix[columns, right])

        return solve

    return factor
