"""What happens to a panel once pivot rows are known, and how rows are moved.

Rows of a panel stay where they are until all of it is factorized: L and U are kept beside it, in a low
format. Everything else is in single precision. Within a block of
:data:`~neula.kernels.tournament.WIDTH` columns the second half is solved for when the first one has been
rounded, so that it makes good what rounding has lost. The width r of a panel is a multiple of that.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.precision import exact_matmul
from neula.kernels.tournament import WIDTH, PanelFactors

HALF = WIDTH // 2


@trial("The kernels of pivoted panels", "matrices that need pivoting are left to the library")
def _tried(device: torch.device) -> None:
    panel = torch.zeros(WIDTH, 2 * WIDTH, device=device)
    found, lower = PanelFactors.of(panel, torch.float16), panel.half()
    block, upper = panel[:, WIDTH:].contiguous(), lower.new_zeros(2 * WIDTH, 2 * WIDTH)
    rows_of_u.kernel(panel, lower, upper, found, 0)
    eliminate.kernel(panel, block, lower, upper, found, 0)
    move_rows.kernel(lower, found.pivots, found.pivots)


@kernel(
    "neula.kernels.calu_triton:rows_of_u_triton",
    trial=_tried,
    when=lambda panel, lower, *_: lower.dtype.itemsize == 2,
)
def rows_of_u(
    panel: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor, found: PanelFactors, start: int
) -> None:
    """``L_kk U_kj = A_kj - L_ki U_ij`` for the pivot rows k found last, and all columns j to their right.

    Parameters
    ----------
    panel : Tensor, shape (m, r)
        A: float32.
    lower : Tensor, shape (m, r)
        Row-major, of a low format: L, in the first ``start`` columns.
    upper : Tensor, shape (r, r)
        Row-major, in the same format: U, whose rows from ``start`` to ``start + WIDTH`` are written.
    found : PanelFactors
    start : int
    """
    rows = found.pivots[start : start + WIDTH].long()
    done, k, right = slice(0, start), slice(start, start + WIDTH), slice(start + WIDTH, None)
    rest = panel[rows, right] - exact_matmul(lower[rows, done].float(), upper[done, right].float())
    n, index = len(rows), start // WIDTH
    upper[k, right] = _solved(
        found.l_inverses[index, :n, :n], found.factors[index, :n, :n].tril(-1), rest, upper.dtype
    )


@kernel(
    "neula.kernels.calu_triton:eliminate_triton",
    trial=_tried,
    when=lambda panel, block, lower, *_: lower.dtype.itemsize == 2,
)
def eliminate(
    panel: torch.Tensor,
    block: torch.Tensor,
    lower: torch.Tensor,
    upper: torch.Tensor,
    found: PanelFactors,
    start: int,
) -> None:
    """``L_ik U_kk = B_ik`` for all rows i that play, and the next columns, ``B_ij = A_ij - L_ik U_kj``.

    Parameters
    ----------
    panel : Tensor, shape (m, r)
        A: float32.
    block : Tensor, shape (m, WIDTH)
        float32, contiguous: B, in the columns from ``start`` on; overwritten with the next ones, and zeros
        beyond the last.
    lower : Tensor, shape (m, r)
        Row-major, of a low format: L, whose columns from ``start`` to ``start + WIDTH`` are written.
    upper : Tensor, shape (r, r)
        Row-major, in the same format: U.
    found : PanelFactors
    start : int
    """
    known, k, following = slice(0, start + WIDTH), slice(start, start + WIDTH), slice(start + WIDTH, None)
    index, n = start // WIDTH, lower[:, k].shape[1]
    inverse, factors = found.u_inverses[index, :n, :n], found.factors[index, :n, :n]
    columns = _solved(inverse.T, factors.triu().T, block[:, :n].T, lower.dtype).T
    places = found.places[:, None]
    playing = (places < 0) | (places >= start) & (places < start + WIDTH)
    lower[:, k] = torch.where(playing, columns, lower[:, k])
    beside = panel[:, following][:, :WIDTH]
    if beside.numel() == 0:
        return
    u = upper[known, following][:, :WIDTH].float()
    block.zero_()[:, : beside.shape[1]] = beside - exact_matmul(lower[:, known].float(), u)


@kernel(
    "neula.kernels.calu_triton:move_rows_triton",
    trial=_tried,
    when=lambda matrix, *_: matrix.numel() > 0 and matrix.dtype.itemsize == 2,
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
