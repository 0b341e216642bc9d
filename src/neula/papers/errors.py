"""Errors of factorizations and products in double precision, and how they grow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from neula.algorithms.spectra.condition import largest_singular_value
from neula.papers.data import Row

BLOCK_ELEMENTS = 1 << 26
"""Of the blocks of rows that are converted to double precision: half a gigabyte, however tall the matrix."""


# item: Q backward error
def backward_error(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> float:
    """``||A - QR||_F / ||A||_F``."""
    r, norms = r.double(), []
    for x, y in zip(_rows(a), _rows(q), strict=True):
        exact = x.double()
        norms.append(torch.stack(list(map(torch.linalg.matrix_norm, (exact - y.double() @ r, exact)))))
    error, size = torch.stack(norms).norm(dim=0)
    return float(error / size)


def orthogonality_defect(q: torch.Tensor) -> torch.Tensor:
    """``Q^T Q - I``."""
    defect = -torch.eye(q.shape[1], dtype=torch.float64, device=q.device)
    for block in _rows(q):
        exact = block.double()
        defect += exact.T @ exact
    return defect


def norm_of_defect(defect: torch.Tensor) -> float:
    """``||Q^T Q - I||_2`` by the power method, from below, usually within a percent."""
    return largest_singular_value(defect, 30)


def product_error(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> float:
    """``||C - A B||_F / ||A B||_F``."""
    exact = a.double() @ b.double()
    return float((c - exact).norm() / exact.norm())


def optimality(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> float:
    """``||A^T r|| / (||A|| ||r||)``, zero for the exact solution, with ``||A||_2`` by the power method."""
    v = torch.ones(a.shape[1], 1, dtype=a.dtype, device=a.device)
    for _ in range(10):
        v = a.T @ (a @ (v / v.norm()))
    residual = b - a @ x
    return float((a.T @ residual).norm() / (v.norm().sqrt() * residual.norm()))


def growth(rows: Sequence[Row], quantity: str, against: str) -> float:
    """Exponent p of the power law ``against^p`` that fits a quantity best."""
    x, y = ([math.log(row[name]) for row in rows] for name in (against, quantity))
    return float(np.polyfit(x, y, 1)[0])


def _rows(a: torch.Tensor) -> Sequence[torch.Tensor]:
    return a.split(max(1, BLOCK_ELEMENTS // a.shape[1]))
