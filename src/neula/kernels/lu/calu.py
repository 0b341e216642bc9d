"""Update a panel once its pivot rows are known, and move rows.

Rows of a panel stay where they are until all of it is factorized: L and U are kept beside it, in a low
format. Everything else is in single precision. Within a block of
:data:`~neula.kernels.lu.tournament.WIDTH` columns the second half is solved for when the first one has been
rounded, so that it makes good what rounding has lost. The width r of a panel is a multiple of that.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.lu.tournament import WIDTH, PanelFactors
from neula.kernels.precision import exact_matmul

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


@kernel(
    "neula.kernels.lu.calu_triton:rows_of_u_triton",
    trial=_tried,
    when=lambda panel, lower, *_: lower.dtype.itemsize == 2,
)
def rows_of_u(
    panel: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, found: PanelFactors, start: int
) -> None:
    """``L_kk U_kj = A_kj - L_ki U_ij`` for the pivot rows k found last, and all columns j but the next ones.

    Parameters
    ----------
    panel : Tensor, shape (m, r)
        A: float32.
    lower : Tensor, shape (m, r)
        Row-major, of a low format: L, in the first ``start`` columns.
    upper : Tensor, shape (r, r)
        Row-major, in the same format: U, whose rows from ``start`` to ``start + WIDTH`` are written, in
        columns from ``start + 2 WIDTH`` on.
    found : PanelFactors
    start : int
    """
    rows = found.pivots[start : start + WIDTH].long()
    done, k, right = slice(0, start), slice(start, start + WIDTH), slice(start + 2 * WIDTH, None)
    rest = panel[rows, right] - exact_matmul(lower[rows, done].float(), upper[done, right].float())
    upper[k, right] = _rows(rest, found, start, upper.dtype)


@kernel(
    "neula.kernels.lu.calu_triton:update_triton",
    trial=_tried,
    when=lambda panel, lower, *_: lower.dtype.itemsize == 2,
)
def update(
    panel: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, start: int, out: torch.Tensor
) -> None:
    """``A_ij - L_ik U_kj`` for all rows i, the first ``start`` pivots k, and columns j after the next ones.

    It does not need the pivots of the next columns, and runs concurrently with the tournament that finds
    them.

    Parameters
    ----------
    panel, lower, upper
        As for :func:`rows_of_u`.
    start : int
    out : Tensor, shape (m, WIDTH)
        float32, contiguous: columns from ``start + WIDTH`` on, and zeros beyond the last.
    """
    done, columns = slice(0, start), slice(start + WIDTH, start + 2 * WIDTH)
    beside = panel[:, columns]
    known = exact_matmul(lower[:, done].float(), upper[done, columns].float())
    out.zero_()[:, : beside.shape[1]] = beside - known


@kernel(
    "neula.kernels.lu.calu_triton:eliminate_triton",
    trial=_tried,
    when=lambda block, following, lower, *_: lower.dtype.itemsize == 2,
)
def eliminate(
    block: torch.Tensor,
    following: torch.Tensor,
    lower: torch.Tensor,
    upper: torch.Tensor,
    found: PanelFactors,
    start: int,
) -> None:
    """``L_ik U_kk = B_ik`` for all rows i that play, ``L_kk U_kj = C_kj`` for the next columns j, and
    ``C_ij - L_ik U_kj``.

    Parameters
    ----------
    block : Tensor, shape (m, WIDTH)
        float32, contiguous: B, in the columns from ``start`` on; overwritten with the next ones.
    following : Tensor, shape (m, WIDTH)
        float32, contiguous: C, from :func:`update`; not read behind the last columns.
    lower : Tensor, shape (m, r)
        Row-major, of a low format: L, whose columns from ``start`` to ``start + WIDTH`` are
        written.
    upper : Tensor, shape (r, r)
        Row-major, in the same format: U, whose rows from ``start`` on are written in the next columns.
    found : PanelFactors
    start : int
    """
    k, following_columns = slice(start, start + WIDTH), slice(start + WIDTH, start + 2 * WIDTH)
    index, n = start // WIDTH, lower[:, k].shape[1]
    inverse, factors = found.u_inverses[index, :n, :n], found.factors[index, :n, :n]
    columns = _solved(inverse.T, factors.triu().T, block[:, :n].T, lower.dtype).T
    places = found.places[:, None]
    playing = (places < 0) | (places >= start) & (places < start + WIDTH)
    lower[:, k] = torch.where(playing, columns, lower[:, k])
    width = lower[:, following_columns].shape[1]
    if width == 0:
        return
    u = _rows(following[found.pivots[k].long(), :width], found, start, upper.dtype)
    upper[k, following_columns] = u
    block.zero_()[:, :width] = following[:, :width] - exact_matmul(columns.float(), u.float())


def _rows(rest: torch.Tensor, found: PanelFactors, start: int, low: torch.dtype) -> torch.Tensor:
    """Rows of U of the pivots from ``start`` on, once they are updated."""
    n, index = len(rest), start // WIDTH
    return _solved(found.l_inverses[index, :n, :n], found.factors[index, :n, :n].tril(-1), rest, low)


@kernel(
    "neula.kernels.lu.calu_triton:move_rows_triton",
    trial=_tried,
    when=lambda matrix, *_: matrix.numel() > 0 and matrix.dtype.itemsize <= 4,
)
def move_rows(matrix: torch.Tensor, to: torch.Tensor, origin: torch.Tensor) -> None:
    """``matrix[to] = matrix[origin]``, on a GPU without a copy of them.

    Parameters
    ----------
    matrix : Tensor, shape (m, n)
        Of any strides; row-major, it is moved at the speed of memory.
    to, origin : Tensor, shape (k,)
        Rows; those that occur twice in ``to`` have the same origin.
    """
    matrix[to] = matrix[origin]


def _solved(inverse: torch.Tensor, triangle: torch.Tensor, b: torch.Tensor, low: torch.dtype) -> torch.Tensor:
    """``T X = B`` with a lower triangle, the second half of X from the first one as it is rounded."""
    first, second = slice(0, HALF), slice(HALF, None)
    x = exact_matmul(inverse, b)
    lost = x[first] - x[first].to(low).float()
    x[second] += exact_matmul(inverse[second, second], exact_matmul(triangle[second, first], lost))
    return x.to(low)
