"""Update a panel once its pivot rows are known by tournaments, and move rows.

Rows of a panel stay where they are until all of it is factorized: L and U are kept separately, in a low
format. Everything else is in single precision. Within a block of :data:`~neula.kernels.lu.tournament.WIDTH`
columns the second half is solved for when the first one has been rounded, so that it makes good what rounding
has lost. The width r of a panel is a multiple of that.

Updates run concurrently with tournaments, like rows of U. Elimination by the last 32 pivots is latency:
columns are solved for and the next ones updated in one launch, since a row needs nothing of the others but
rows of U, which each thread block finds for itself.

At the end of a panel rows move to their places: two dozen launches of a few numbers each, 50 us on an H200.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import ceil_div, multiprocessors, next_power_of_2
from neula.kernels.lu.lu_block import PRECISION, products
from neula.kernels.lu.tournament import ELSEWHERE, WIDTH, PanelFactors
from neula.kernels.precision import exact_matmul
from neula.kernels.triton_source import jit, tl

HALF = WIDTH // 2


@trial("The kernels of pivoted panels", "matrices that need pivoting are left to the library")
def _tried(device: torch.device) -> None:
    panel = torch.zeros(WIDTH, 3 * WIDTH, dtype=torch.float32, device=device)
    found, lower = PanelFactors.for_panel(panel, torch.float16), panel.half()
    block, upper = panel[:, WIDTH : 2 * WIDTH].contiguous(), lower.new_zeros(3 * WIDTH, 3 * WIDTH)
    rows_of_u.kernel(panel, lower, upper, found, 0)
    update.kernel(panel, lower, upper, 0, block)
    eliminate.kernel(block.clone(), block, lower, upper, found, 0)
    move_rows.kernel(lower, found.pivots, found.pivots)


@kernel("rows_of_u_triton", trial=_tried, when=lambda panel, lower, *_: lower.dtype.itemsize == 2)
def rows_of_u(
    panel: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, found: PanelFactors, start: int
) -> None:
    """``L_kk U_kj = A_kj - L_ki U_ij`` for the pivot rows k found last, and all columns j but the next ones.

    A is the panel (m, r), float32; L the first ``start`` columns of ``lower`` (m, r), and U, whose rows from
    ``start`` to ``start + WIDTH`` are written in columns from ``start + 2 WIDTH`` on, ``upper`` (r, r):
    row-major, of a low format.
    """
    rows = found.pivots[start : start + WIDTH].long()
    done, k, right = slice(0, start), slice(start, start + WIDTH), slice(start + 2 * WIDTH, None)
    rest = panel[rows, right] - exact_matmul(lower[rows, done].float(), upper[done, right].float())
    upper[k, right] = _rows_of_upper(rest, found, start, upper.dtype)


@kernel("update_triton", trial=_tried, when=lambda panel, lower, *_: lower.dtype.itemsize == 2)
def update(
    panel: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, start: int, out: torch.Tensor
) -> None:
    """``A_ij - L_ik U_kj`` for all rows i, the first ``start`` pivots k, and columns j after the next ones:
    into ``out`` (m, WIDTH), contiguous, with zeros beyond the last column.

    It does not need the pivots of the next columns, and runs concurrently with the tournament that finds
    them.
    """
    done, columns = slice(0, start), slice(start + WIDTH, start + 2 * WIDTH)
    beside = panel[:, columns]
    known = exact_matmul(lower[:, done].float(), upper[done, columns].float())
    out.zero_()[:, : beside.shape[1]] = beside - known


@kernel("eliminate_triton", trial=_tried, when=lambda block, following, lower, *_: lower.dtype.itemsize == 2)
def eliminate(
    block: torch.Tensor,
    following: torch.Tensor,
    lower: torch.Tensor,
    upper: torch.Tensor,
    found: PanelFactors,
    start: int,
) -> None:
    """``L_ik U_kk = B_ik`` for all candidate rows i, ``L_kk U_kj = C_kj`` for the next columns j, and ``C_ij
    - L_ik U_kj``, which overwrites B.

    B is ``block`` (m, WIDTH), float32 and contiguous, the columns from ``start`` on; C is ``following``, from
    :func:`update`, not read behind the last columns. L and U are written as for :func:`rows_of_u`.
    """
    k, following_columns = slice(start, start + WIDTH), slice(start + WIDTH, start + 2 * WIDTH)
    index, n = start // WIDTH, lower[:, k].shape[1]
    inverse, factors = found.u_inverses[index, :n, :n], found.factors[index, :n, :n]
    columns = _solved(inverse.T, factors.triu().T, block[:, :n].T, lower.dtype).T
    places = found.places[:, None]
    candidates = (places < 0) | (places >= start) & (places < start + WIDTH)
    lower[:, k] = torch.where(candidates, columns, lower[:, k])
    width = lower[:, following_columns].shape[1]
    if width == 0:
        return
    u = _rows_of_upper(following[found.pivots[k].long(), :width], found, start, upper.dtype)
    upper[k, following_columns] = u
    block.zero_()[:, :width] = following[:, :width] - exact_matmul(columns.float(), u.float())


def _rows_of_upper(rest: torch.Tensor, found: PanelFactors, start: int, low: torch.dtype) -> torch.Tensor:
    """Rows of U of the pivots from ``start`` on, once they are updated."""
    n, index = len(rest), start // WIDTH
    return _solved(found.l_inverses[index, :n, :n], found.factors[index, :n, :n].tril(-1), rest, low)


@kernel(
    "move_rows_triton",
    trial=_tried,
    when=lambda matrix, *_: matrix.numel() > 0 and matrix.dtype.itemsize <= 4,
)
def move_rows(matrix: torch.Tensor, to: torch.Tensor, origin: torch.Tensor) -> None:
    """``matrix[to] = matrix[origin]``, on a GPU without a copy of them, at the speed of memory if row-major;
    rows that occur twice in ``to`` have the same origin.
    """
    matrix[to] = matrix[origin]


def _solved(inverse: torch.Tensor, triangle: torch.Tensor, b: torch.Tensor, low: torch.dtype) -> torch.Tensor:
    """``T X = B`` with a lower triangle, the second half of X from the first one as it is rounded."""
    first, second = slice(0, HALF), slice(HALF, None)
    x = exact_matmul(inverse, b)
    lost = x[first] - x[first].to(low).float()
    x[second] += exact_matmul(inverse[second, second], exact_matmul(triangle[second, first], lost))
    return x.to(low)


ROWS, FEW_ROWS = 128, 64
"""Rows of L in a thread block; fewer if multiprocessors would be idle."""

COLUMNS = 32
"""Columns of U in a thread block."""

DEPTH, STAGES, WARPS = WIDTH, 4, 4

MOVED = 32
"""Columns that a thread block moves."""


def rows_of_u_triton(panel, lower, upper, found, start):
    (m, r), index = panel.shape, start // WIDTH
    if start + 2 * WIDTH >= r:
        return
    _rows_of_u_kernel[(ceil_div(r - start - 2 * WIDTH, COLUMNS),)](
        *(panel, *panel.stride(), lower, *lower.stride(), upper, *upper.stride()),
        *(found.pivots, found.l_inverses[index], found.factors[index], start, m, r),
        *(COLUMNS, WIDTH, DEPTH, PRECISION, STAGES),
        num_warps=WARPS,
    )


def update_triton(panel, lower, upper, start, out):
    (m, r), rows = panel.shape, _rows_of(panel)
    if start + WIDTH >= r:
        return
    _update_kernel[(ceil_div(m, rows),)](
        *(panel, *panel.stride(), lower, *lower.stride(), upper, *upper.stride()),
        *(out, start, m, r, rows, WIDTH, DEPTH, STAGES),
        num_warps=WARPS,
    )


def eliminate_triton(block, following, lower, upper, found, start):
    (m, r), index, rows = lower.shape, start // WIDTH, _rows_of(lower)
    _eliminate_kernel[(ceil_div(m, rows),)](
        *(block, following, lower, *lower.stride(), upper, *upper.stride()),
        *(found.places, found.pivots, found.l_inverses[index], found.u_inverses[index]),
        *(found.factors[index], start, m, r, rows, WIDTH, PRECISION),
        num_warps=WARPS,
    )


def _rows_of(x: torch.Tensor) -> int:
    """How many rows of a matrix a thread block has."""
    return ROWS if len(x) >= ROWS * multiprocessors(x.device) else FEW_ROWS


def move_rows_triton(matrix, to, origin):
    n, count = matrix.shape[1], len(to)
    _move_kernel[(ceil_div(n, MOVED),)](
        *(matrix, *matrix.stride(), n, to, origin, count), *(MOVED, next_power_of_2(count)), num_warps=8
    )


@jit
def _rows(inverse, factors, rest, w, low: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """Rows of U of the last pivots, given ``L^-1``, L and what is left of A."""
    lower = tl.where(w[:, None] > w[None, :], factors, 0.0)
    rows = tl.dot(inverse, rest, input_precision=PRECISION)
    first = (w < WIDTH // 2)[:, None]
    lost = tl.where(first, rows - rows.to(low).to(tl.float32), 0.0)
    rows += tl.dot(inverse, tl.where(first, 0.0, tl.dot(lower, lost)))
    return rows.to(low)


@jit
def _rows_of_u_kernel(
    a, a_row, a_column, left, left_row, left_column, u, u_row, u_column, pivots, inverse, factors, start, m,
    r,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Some columns of the rows of U that belong to the last pivots."""
    w = tl.arange(0, WIDTH)
    k = start + w
    j = start + 2 * WIDTH + tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.load(pivots + k, mask=k < r, other=m).to(tl.int64)
    known = products(
        left, left_row, left_column, u, u_row, u_column, i, j, m, r, start, WIDTH, COLUMNS, DEPTH, STAGES
    )
    inside = (i < m)[:, None] & (j < r)[None, :]
    rest = tl.load(a + i[:, None] * a_row + j[None, :] * a_column, mask=inside, other=0.0) - known
    square = w[:, None] * WIDTH + w[None, :]
    rows = _rows(
        tl.load(inverse + square), tl.load(factors + square), rest, w, u.dtype.element_ty, WIDTH, PRECISION
    )
    tl.store(u + k.to(tl.int64)[:, None] * u_row + j[None, :] * u_column, rows, mask=inside)


@jit
def _update_kernel(
    a, a_row, a_column, left, left_row, left_column, u, u_row, u_column, out, start, m, r,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some rows of the columns that come after the next ones."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w = tl.arange(0, WIDTH).to(tl.int64)
    j = start + WIDTH + w
    known = products(
        left, left_row, left_column, u, u_row, u_column, i, j, m, r, start, ROWS, WIDTH, DEPTH, STAGES
    )
    inside = (i < m)[:, None] & (j < r)[None, :]
    rest = tl.load(a + i[:, None] * a_row + j[None, :] * a_column, mask=inside, other=0.0)
    tl.store(out + i[:, None] * WIDTH + w[None, :], rest - known, mask=(i < m)[:, None])


@jit
def _eliminate_kernel(
    block, following, left, left_row, left_column, u, u_row, u_column, places, pivots, l_inverse, u_inverse,
    factors, start, m, r,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some rows of L, and of the columns that come next; each program finds the rows of U that it needs."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w = tl.arange(0, WIDTH).to(tl.int64)
    k = start + w
    rows = (i < m)[:, None]
    place = block + i[:, None] * WIDTH + w[None, :]
    square = w[:, None] * WIDTH + w[None, :]
    solve, both = tl.load(u_inverse + square), tl.load(factors + square)
    upper = tl.where(w[:, None] < w[None, :], both, 0.0)
    columns = tl.dot(tl.load(place, mask=rows, other=0.0), solve, input_precision=PRECISION)
    first = (w < WIDTH // 2)[None, :]
    lost = tl.where(first, columns - columns.to(left.dtype.element_ty).to(tl.float32), 0.0)
    columns += tl.dot(tl.where(first, 0.0, tl.dot(lost, upper)), solve)
    low = columns.to(left.dtype.element_ty)
    ended = tl.load(places + i, mask=i < m, other=0)
    candidates = (ended < 0) | ((ended >= start) & (ended < start + WIDTH))
    inside = rows & candidates[:, None] & (k < r)[None, :]
    tl.store(left + i[:, None] * left_row + k[None, :] * left_column, low, mask=inside)
    if start + WIDTH < r:
        j = k + WIDTH
        pivot = tl.load(pivots + k, mask=k < r, other=0).to(tl.int64)
        updated = tl.load(following + pivot[:, None] * WIDTH + w[None, :])
        beside = _rows(tl.load(l_inverse + square), both, updated, w, u.dtype.element_ty, WIDTH, PRECISION)
        if tl.program_id(0) == 0:
            tl.store(u + k[:, None] * u_row + j[None, :] * u_column, beside, mask=(j < r)[None, :])
        rest = tl.load(following + i[:, None] * WIDTH + w[None, :], mask=rows, other=0.0)
        tl.store(place, rest - tl.dot(low, beside, input_precision=PRECISION), mask=rows)


@jit
def _move_kernel(a, a_row, a_column, n, to, origin, count, COLUMNS: tl.constexpr, COUNT: tl.constexpr):
    """``A[to] = A[origin]`` in some columns."""
    j = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, COUNT)
    inside = (k < count)[:, None] & (j < n)[None, :]
    source = tl.load(origin + k, mask=k < count, other=0).to(tl.int64)
    target = tl.load(to + k, mask=k < count, other=0).to(tl.int64)
    moved = tl.load(a + source[:, None] * a_row + j[None, :] * a_column, mask=inside)
    # A barrier: all threads have read what is overwritten now.
    tl.debug_barrier()
    tl.store(a + target[:, None] * a_row + j[None, :] * a_column, moved, mask=inside)


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
