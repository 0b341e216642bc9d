"""Direct least-squares solvers, as comparators and first approximations."""

from __future__ import annotations

import torch

from neula.algorithms.orthogonal.cholesky_qr import factor_or_nan
from neula.algorithms.spectra.condition import solve_normal, solve_r
from neula.engines import Engine
from neula.engines.reduction import HERE, Reduction
from neula.kernels.precision import exact_matmul


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
