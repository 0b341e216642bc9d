"""The library's factors on a CPU, in the place of a column-major matrix."""

from __future__ import annotations

import torch


def lu_in_place(a: torch.Tensor, pivots: torch.Tensor) -> bool:
    """LU with partial pivoting; False where a pivot vanishes.

    Parameters
    ----------
    a : Tensor, shape (n, n)
    pivots : Tensor, shape (n,)
        int32, which is written to: in the form of SciPy, counted from 0.
    """
    info = torch.empty((), dtype=torch.int32, device="cpu")
    torch.linalg.lu_factor_ex(a, out=(a, pivots, info))
    pivots -= 1
    return not int(info)


def cholesky_in_place(a: torch.Tensor) -> bool:
    """Cholesky's L in the place of the lower triangle; False where there is none."""
    info = torch.empty((), dtype=torch.int32, device="cpu")
    torch.linalg.cholesky_ex(a, out=(a, info))
    return not int(info)
