"""Householder QR of the library (LAPACK's or cuSOLVER's geqrf), as a panel and as the last resort."""

from __future__ import annotations

import torch

from neula.algorithms.orthogonal.cholesky_qr import factor_or_nan
from neula.algorithms.spectra.condition import solve_normal, solve_r
from neula.engines import Engine
from neula.engines.reduction import HERE, Reduction
from neula.kernels.phases import with_nonnegative_diagonal
from neula.kernels.precision import exact_matmul


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

    >>> a = torch.tensor([[3.0, 0.0], [4.0, 0.0], [0.0, 2.0]])
    >>> solve_by_householder(a, a @ torch.tensor([[1.0], [3.0]]))[0].round(decimals=4).T
    tensor([[1., 3.]])
    """
    n = a.shape[1]
    packed, tau = torch.geqrf(a)
    r = packed.mT[:, :n].tril().mT  # column by column, as LAPACK has it
    image = torch.ormqr(packed, tau, b, transpose=True)[:n]
    return torch.linalg.solve_triangular(r, image, upper=True), r


# item: Q (3); V Algorithm 1
def qr_solve(q: torch.Tensor, r: torch.Tensor, b: torch.Tensor, over_rows: Reduction = HERE) -> torch.Tensor:
    """``x = R^-1 (Q^H b)``: the direct solver of the papers (formula 3), in the precision of the factors."""
    return solve_r(r, over_rows.total(exact_matmul(q.mH, b)))


# item: Q (2)
def normal_equations(a: torch.Tensor, b: torch.Tensor, engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """``x = (A^H A)^-1 A^H b`` by Cholesky, and the factor R: half the operations of QR, twice the
    sensitivity.

    A is in the storage precision of the engine, which multiplies ``A^H A``. Both results are NaN where that
    is not numerically positive definite.
    """
    operand = engine.operand(a)
    r = factor_or_nan(engine.inner(operand, operand))
    return solve_normal(r, engine.over_rows.total(exact_matmul(a.mH, b))), r
