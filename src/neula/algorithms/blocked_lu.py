"""Right-looking blocked LU factorization with products on a neural engine (Lopez and Mary, algorithm 3.1).

``PA = LU`` with factors in the storage precision; only the operands of products are rounded to the low
format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from neula.algorithms.factorization import growth_of
from neula.engines import Engine

PANEL = 256
"""Width of a panel."""


@dataclass(frozen=True)
class LUFactors:
    """``A[order] = L U``, about.

    Attributes
    ----------
    lu : Tensor, shape (n, n)
        U in the upper triangle, L with unit diagonal below it.
    order : Tensor, shape (n,), or None
        Rows of A in the order of the pivots; None without pivoting.
    growth : float
    """

    lu: torch.Tensor
    order: torch.Tensor | None
    growth: float

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        x = (b if self.order is None else b[self.order]).to(self.lu.dtype)
        x = torch.linalg.solve_triangular(self.lu, x, upper=False, unitriangular=True)
        return torch.linalg.solve_triangular(self.lu, x, upper=True).double()

    def in_double(self) -> LUFactors:
        return replace(self, lu=self.lu.double())


def blocked_lu(a: torch.Tensor, engine: Engine, *, pivot: bool, panel: int = PANEL) -> LUFactors:
    """Factorize A in place; factors with NaN or Inf where a pivot vanishes or the format overflows.

    Parameters
    ----------
    a : Tensor, shape (n, n)
        Column-major, in the engine's storage precision.
    engine : Engine
    pivot : bool
        Partial pivoting, or none.
    panel : int
        Width of a panel.
    """
    n, largest = a.shape[0], engine.column_max(a.T).amax()
    orders: list[torch.Tensor] = []
    for k in range(0, n, panel):
        block, rest = slice(k, min(k + panel, n)), slice(min(k + panel, n), n)
        column = a[k:, block]
        orders.append(_pivoted(column) if pivot else _unpivoted(column))
        if rest.start == n:
            break
        right = a[k:, rest]
        if pivot:
            _permute(right, orders[-1])
        u = torch.linalg.solve_triangular(a[block, block], a[block, rest], upper=False, unitriangular=True)
        a[block, rest] = u
        engine.gemm(engine.operand(a[rest, block]), engine.operand(u), a[rest, rest], alpha=-1.0, beta=1.0)
    order = _permute_left(a, orders, panel) if pivot else None
    return LUFactors(a, order, growth_of(a, largest, engine))


def _pivoted(column: torch.Tensor) -> torch.Tensor:
    """Factorize a panel; the order of its rows."""
    factors, pivots, _ = torch.linalg.lu_factor_ex(column)
    column.copy_(factors)
    order = list(range(len(column)))
    for i, j in enumerate((pivots - 1).tolist()):
        order[i], order[j] = order[j], order[i]
    return torch.tensor(order, device=column.device)


def _unpivoted(column: torch.Tensor) -> torch.Tensor:
    width = column.shape[1]
    for j in range(width):
        column[j + 1 :, j] /= column[j, j]
        column[j + 1 :, j + 1 :].addr_(column[j + 1 :, j], column[j, j + 1 :], alpha=-1.0)
    return torch.arange(len(column), device=column.device)


def _permute(rows: torch.Tensor, order: torch.Tensor) -> None:
    """Reorder the rows of a column-major block; only those that move are touched."""
    moved = (order != torch.arange(len(order), device=order.device)).nonzero()[:, 0]
    shape = (rows.shape[1], len(moved))
    rows.T.scatter_(1, moved.expand(shape), rows.T.gather(1, order[moved].expand(shape)))


def _permute_left(a: torch.Tensor, orders: list[torch.Tensor], panel: int) -> torch.Tensor:
    """Bring the multipliers of all panels in the final order, once at the end; the order of all rows."""
    later = torch.arange(len(a), device=a.device)
    for step in reversed(range(len(orders))):
        k = step * panel
        if step < len(orders) - 1:
            stop = k + panel
            _permute(a[stop:, k:stop], later[stop:] - stop)
        later[k:] = orders[step][later[k:] - k] + k
    return later
