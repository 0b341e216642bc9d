"""Householder QR of the library (LAPACK's or cuSOLVER's geqrf), as a panel and as the last resort."""

from __future__ import annotations

import torch

from neula.engines import Engine
from neula.kernels.phases import with_nonnegative_diagonal


def householder(a: torch.Tensor, engine: Engine | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduced QR of matrices, shape (*batch, m, n) with m >= n, the diagonal of R made nonnegative.

    The engine says whose rows they are; nothing is multiplied in a low format.
    """
    return _reflected(a) if engine is None else engine.over_rows.merged(a, _reflected)


def _reflected(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return with_nonnegative_diagonal(*torch.linalg.qr(a))


def solve_by_householder(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x = R^-1 (Q^H b)`` without Q itself, and R: backward stable, half the operations of a QR.

    Where R is singular, x is NaN or Inf.

    Examples
    --------
    >>> a = torch.tensor([[3.0, 0.0], [4.0, 0.0], [0.0, 2.0]])
    >>> solve_by_householder(a, a @ torch.tensor([[1.0], [3.0]]))[0].round(decimals=4).T
    tensor([[1., 3.]])
    """
    n = a.shape[1]
    packed, tau = torch.geqrf(a)
    r = packed.mT[:, :n].tril().mT  # column by column, as LAPACK has it
    image = torch.ormqr(packed, tau, b, transpose=True)[:n]
    return torch.linalg.solve_triangular(r, image, upper=True), r
