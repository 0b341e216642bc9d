"""What happens to a panel of a low format once pivot rows are known, and how rows are moved.

Rows of a panel stay where they are until all of it is factorized: U is kept beside it.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from neula.engines.precision import exact_matmul
from neula.kernels.availability import can_run
from neula.kernels.tournament import WIDTH, PanelFactors


def rows_of_u(panel: torch.Tensor, upper: torch.Tensor, found: PanelFactors, start: int) -> None:
    """``L_kk U_kj = A_kj - L_ki U_ij`` for the pivot rows k found last, and all columns j to their right.

    Parameters
    ----------
    panel : Tensor, shape (m, r)
        Row-major, of a low format: L in the first ``start`` columns, A in the others.
    upper : Tensor, shape (r, r)
        In the same format: U, whose rows from ``start`` to ``start + WIDTH`` are written.
    found : PanelFactors
    start : int
    """
    if _takes(panel):
        from neula.kernels.calu_triton import rows_of_u_triton

        rows_of_u_triton(panel, upper, found, start)
    else:
        rows_of_u_reference(panel, upper, found, start)


def eliminate(
    panel: torch.Tensor, block: torch.Tensor, upper: torch.Tensor, found: PanelFactors, start: int
) -> None:
    """``L_ik U_kk = B_ik`` for all rows i that play, and the next columns, ``B_ij = A_ij - L_ik U_kj``.

    Parameters
    ----------
    panel : Tensor, shape (m, r)
        Row-major, of a low format: A; L is written to the columns from ``start`` to ``start + WIDTH``.
    block : Tensor, shape (m, WIDTH)
        float32, contiguous: these columns, updated; overwritten with the next ones, and zeros beyond the last.
    upper : Tensor, shape (r, r)
        In the format of the panel: U.
    found : PanelFactors
    start : int
    """
    if _takes(panel):
        from neula.kernels.calu_triton import eliminate_triton

        eliminate_triton(panel, block, upper, found, start)
    else:
        eliminate_reference(panel, block, upper, found, start)


def move_rows(matrix: torch.Tensor, to: torch.Tensor, origin: torch.Tensor) -> None:
    """``matrix[to] = matrix[origin]``, on a GPU without a copy of them.

    Parameters
    ----------
    matrix : Tensor, shape (m, n)
        Of any strides; row-major, it is moved at the speed of memory.
    to, origin : Tensor, shape (k,)
        Rows; those that occur twice in ``to`` have the same origin.
    """
    if matrix.numel() == 0:
        return
    if _takes(matrix):
        from neula.kernels.calu_triton import move_rows_triton

        move_rows_triton(matrix, to, origin)
    else:
        matrix[to] = matrix[origin]


def rows_of_u_reference(panel: torch.Tensor, upper: torch.Tensor, found: PanelFactors, start: int) -> None:
    """:func:`rows_of_u` in plain torch, on any device."""
    done, k, right = slice(0, start), slice(start, start + WIDTH), slice(start + WIDTH, None)
    rows = panel[found.pivots[k]].float()
    rest = rows[:, right] - exact_matmul(rows[:, done], upper[done, right].float())
    n = len(rows)
    upper[k, right] = exact_matmul(found.l_inverses[start // WIDTH, :n, :n], rest).to(upper.dtype)


def eliminate_reference(
    panel: torch.Tensor, block: torch.Tensor, upper: torch.Tensor, found: PanelFactors, start: int
) -> None:
    """:func:`eliminate` in plain torch, on any device."""
    known, k, following = slice(0, start + WIDTH), slice(start, start + WIDTH), slice(start + WIDTH, None)
    old, places = panel[:, k], found.places[:, None]
    lower = exact_matmul(block, found.u_inverses[start // WIDTH])[:, : old.shape[1]].to(panel.dtype)
    panel[:, k] = torch.where((places < 0) | (places >= start) & (places < start + WIDTH), lower, old)
    columns = panel[:, following][:, :WIDTH]
    if columns.numel() == 0:
        return
    u = upper[known, following][:, :WIDTH]
    block.zero_()[:, : columns.shape[1]] = columns.float() - exact_matmul(
        panel[:, known].float(), u.float()
    )


def _takes(matrix: torch.Tensor) -> bool:
    return matrix.is_cuda and matrix.dtype.itemsize == 2 and kernels_run(matrix.device)


@lru_cache
def kernels_run(device: torch.device) -> bool:
    """Whether the kernels can run, tried once a device."""

    def attempt() -> None:
        from neula.kernels.calu_triton import eliminate_triton, move_rows_triton, rows_of_u_triton

        panel = torch.eye(WIDTH, dtype=torch.float16, device=device)
        found, upper = PanelFactors.of(panel), panel.clone()
        rows_of_u_triton(panel, upper, found, 0)
        eliminate_triton(panel, panel.float(), upper, found, 0)
        move_rows_triton(panel, found.pivots, found.pivots)

    what = f"the kernels of pivoted panels on {device}"
    return can_run(attempt, what, "matrices that need pivoting are left to the library")
