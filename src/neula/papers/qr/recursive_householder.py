"""Recursive Householder QR on a neural engine: a comparator for recursive Gram-Schmidt.

Zhang, Baharlouei, Wu, "High Accuracy Low Precision QR Factorization and Least Square Solver on GPU with
TensorCore" (arXiv, 2019), section 3.1.2, Algorithm 3 (RHOUQR), after Elmroth and Gustavson, "Applying
Recursion to Serial and Parallel QR Factorization Leads to Better Performance", IBM J. Res. Dev. 44, 2000.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neula.algorithms.orthogonal.rgsqrf import split_columns
from neula.engines import Engine
from neula.papers.qr.wy import BlockReflector, HouseholderQR, apply_wy, householder_wy


# item: V Algorithm 3
def rhouqr(a: torch.Tensor, engine: Engine, *, cutoff: int | None = None) -> HouseholderQR:
    """Factorize ``A = (I - Y T Y^T) R`` with products in the engine's low format.

    Columns should be scaled to the range of the format (:mod:`neula.algorithms.scaling`). Backward error and
    orthogonality of Q are small multiples of the format's unit roundoff, whatever the condition number. The
    price is the products with T and for it, which Gram-Schmidt
    (:func:`~neula.algorithms.orthogonal.rgsqrf.rgsqrf`) does without.

    Otherwise as :func:`~neula.papers.qr.blocked_householder.blocked_householder`, with one reflector for all
    columns.

    Parameters
    ----------
    cutoff : int, optional
        Width at which the recursion stops and the library's panel starts; the engine's choice by default, 128
        in the paper.
    """
    m, n = a.shape
    if m < n:
        raise ValueError(f"rhouqr needs at least as many rows as columns, got {m} x {n}")
    cutoff = engine.tuning.recursion(engine.storage).cutoff if cutoff is None else cutoff
    if cutoff < 1:
        raise ValueError(f"cutoff must be at least 1, got {cutoff}")
    y = engine.empty(m, n).copy_(a)
    t, r = engine.empty(n, n).zero_(), engine.empty(n, n).zero_()
    _RecursiveHouseholder(engine, cutoff).factorize(y, t, r, engine.operand_buffer(y))
    return HouseholderQR((BlockReflector(y, t),), r)


@dataclass(frozen=True)
class _RecursiveHouseholder:
    """Algorithm 3, in place: the columns of A become those of Y."""

    engine: Engine
    cutoff: int

    def factorize(
        self, a: torch.Tensor, t: torch.Tensor, r: torch.Tensor, low: torch.Tensor | None
    ) -> torch.Tensor:
        """Turn ``a`` into Y, fill T and R, and return Y as an operand, kept in ``low`` where that differs."""
        n = a.shape[1]
        if n <= self.cutoff:
            return self._factorize_panel(a, t, r, low)
        k = split_columns(n, self.cutoff)
        left, right = slice(0, k), slice(k, n)
        low1, low2 = (None, None) if low is None else (low[:, left], low[:, right])

        y1 = self.factorize(a[:, left], t[left, left], r[left, left], low1)
        t1, a2 = self.engine.operand(t[left, left]), a[:, right]
        apply_wy(y1, t1.T, a2, self.engine.operand(a2, low2), self.engine)
        r[left, right] = a2[:k]
        # Above the right half's reflectors Y is zero.
        a2[:k] = 0.0
        if low2 is not None:
            low2[:k] = 0.0
        y2 = self.factorize(a2[k:], t[right, right], r[right, right], None if low2 is None else low2[k:])
        t2 = self.engine.operand(t[right, right])
        self._couple(y1[k:], t1, y2, t2, t[left, right])
        return a if low is None else low

    def _couple(
        self, y1: torch.Tensor, t1: torch.Tensor, y2: torch.Tensor, t2: torch.Tensor, t12: torch.Tensor
    ) -> None:
        """``T12 = -T1 (Y1^T Y2) T2``: two block reflectors become one."""
        gemm, operand = self.engine.gemm, self.engine.operand
        t1_y1_y2 = gemm(t1, operand(gemm(y1.T, y2)))
        gemm(operand(t1_y1_y2), t2, t12, alpha=-1.0)

    def _factorize_panel(
        self, a: torch.Tensor, t: torch.Tensor, r: torch.Tensor, low: torch.Tensor | None
    ) -> torch.Tensor:
        for target, factor in zip((a, t, r), householder_wy(a), strict=True):
            target.copy_(factor)
        return self.engine.operand(a, low)
