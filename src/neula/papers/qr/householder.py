"""Householder QR with products in a low format, blocked and recursive: comparators for Gram-Schmidt.

Zhang, Baharlouei, Wu, "High Accuracy Low Precision QR Factorization and Least Square Solver on GPU with
TensorCore" (arXiv, 2019), sections 3.1.1 and 3.1.2. The reflectors ``I - tau_j y_j y_j^T`` of a panel become
one matrix ``Q = I - Y T Y^T`` (Schreiber and Van Loan, "A Storage-Efficient WY Representation for Products of
Householder Transformations", SIAM J. Sci. Stat. Comput. 10, 1989), which is applied with products in the
engine's low format. Y, T and sums are kept in the storage precision. Backward error and orthogonality of Q
are small multiples of the format's unit roundoff, whatever the condition number. Columns should be scaled to
the range of the format (:mod:`neula.algorithms.scaling`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neula.algorithms.orthogonal.rgsqrf import split_columns
from neula.engines import Engine
from neula.kernels.precision import exact_matmul


@dataclass(frozen=True)
class BlockReflector:
    """The orthogonal matrix ``Q = I - Y T Y^T``, applied in place to a C in the engine's storage."""

    # Shape (m, k): unit lower trapezoidal: the Householder vectors, with explicit zeros and ones.
    y: torch.Tensor
    t: torch.Tensor  # shape (k, k): upper triangular

    def apply(self, c: torch.Tensor, engine: Engine, *, transposed: bool = False) -> torch.Tensor:
        """``C = Q C``, or ``C = Q^T C``, for an m x p matrix C."""
        y, t = engine.operand(self.y), engine.operand(self.t)
        return apply_wy(y, t.T if transposed else t, c, engine.operand(c), engine)

    def apply_to_bordered(self, c: torch.Tensor, engine: Engine) -> torch.Tensor:
        """``C = Q C`` for ``C = diag(I, C2)`` with an identity of order k: a step of LAPACK's orgqr.

        ``Y^T C = [Y1^T, Y2^T C2]``, Y1 being the first k rows of Y, so that k columns need no first product.
        """
        k = self.t.shape[0]
        y, t = engine.operand(self.y), engine.operand(self.t)
        w = engine.empty(k, c.shape[1])
        w[:, :k] = self.y[:k].T
        if c.shape[1] > k:
            engine.gemm(y[k:].T, engine.operand(c[k:, k:]), w[:, k:])
        return _subtract(y, t, w, c, engine)


@dataclass(frozen=True)
class HouseholderQR:
    """``A = Q R`` with Q as a product of block reflectors."""

    # Q = Q_1 Q_2 ..., each acting on the last rows, as many as its Y has.
    reflectors: tuple[BlockReflector, ...]
    r: torch.Tensor  # shape (n, n): upper triangular; its diagonal can be negative

    def q(self, engine: Engine) -> torch.Tensor:
        """The explicit m x n matrix Q, column-major: reflectors applied backwards to columns of the identity.

        The engine may have another format than the one of the factorization.
        """
        m, n = self.reflectors[0].y.shape[0], self.r.shape[0]
        q = engine.empty(m, n).zero_()
        q.fill_diagonal_(1.0)
        for reflector in reversed(self.reflectors):
            start = m - reflector.y.shape[0]
            reflector.apply_to_bordered(q[start:, start:], engine)
        return q


def householder_wy(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Y, T and R of the library's Householder QR (LAPACK's or cuSOLVER's geqrf); nothing is in a low format.

    ``T = (I + diag(tau) striu(Y^T Y))^-1 diag(tau)`` rather than the column-by-column recurrence of LAPACK's
    larft, since products are what is fast (Puglisi, "Modification of the Householder Method Based on the
    Compact WY Representation", SIAM J. Sci. Stat. Comput. 13, 1992). Written so, nothing is divided by tau,
    which is 0 where a column needs no reflector.
    """
    n = a.shape[1]
    factors, tau = torch.geqrf(a)
    y = factors.tril(-1)
    y.fill_diagonal_(1.0)
    system = tau[:, None] * exact_matmul(y.T, y)
    # Only the strict upper triangle of the system is read.
    t = torch.linalg.solve_triangular(system, tau.diag(), upper=True, unitriangular=True)
    return y, t, factors[:n].triu()


def apply_wy(
    y: torch.Tensor, t: torch.Tensor, c: torch.Tensor, low: torch.Tensor, engine: Engine
) -> torch.Tensor:
    """``C - Y (T (Y^T C))``, in place. Y, T and ``low``, a copy of C, are operands of the engine."""
    return _subtract(y, t, engine.gemm(y.T, low), c, engine)


def _subtract(
    y: torch.Tensor, t: torch.Tensor, w: torch.Tensor, c: torch.Tensor, engine: Engine
) -> torch.Tensor:
    tw = engine.gemm(t, engine.operand(w))
    return engine.gemm(y, engine.operand(tw), c, alpha=-1.0, beta=1.0)


def _checked(name: str, a: torch.Tensor, width: int) -> None:
    m, n = a.shape
    if m < n:
        raise ValueError(f"{name} needs at least as many rows as columns, got {m} x {n}")
    if width < 1:
        raise ValueError(f"{'cutoff' if name == 'rhouqr' else 'block'} must be at least 1, got {width}")


# item: V first attempt
def blocked_householder(a: torch.Tensor, engine: Engine, *, block: int = 128) -> HouseholderQR:
    """Factorize an m x n matrix, m >= n, in panels of ``block`` columns, with a reflector for each.

    The first attempt of the paper: the library factorizes panels, the engine updates the trailing matrix. The
    smallest dimension of a product is the width of a panel, and wider panels take the time that wider
    products save.

    >>> from neula.engines import EmulatedEngine
    >>> engine = EmulatedEngine("cpu", "fp64")
    >>> a = torch.tensor([[3.0, 1.0], [4.0, 2.0]], dtype=torch.float64)
    >>> factors = blocked_householder(a, engine, block=1)
    >>> factors.r
    tensor([[-5.0000, -2.2000],
            [ 0.0000,  0.4000]], dtype=torch.float64)
    >>> torch.allclose(factors.q(engine) @ factors.r, a)
    True
    """
    _checked("blocked_householder", a, block)
    m, n = a.shape
    work, r = engine.empty(m, n).copy_(a), engine.empty(n, n).zero_()
    reflectors = []
    for start in range(0, n, block):
        stop = min(start + block, n)
        columns = slice(start, stop)
        # The reflectors take the place of the columns that they come from.
        y, t, r[columns, columns] = householder_wy(work[start:, columns])
        reflector = BlockReflector(work[start:, columns].copy_(y), t)
        reflectors.append(reflector)
        if stop < n:
            trailing = reflector.apply(work[start:, stop:], engine, transposed=True)
            r[columns, stop:] = trailing[: stop - start]
    return HouseholderQR(tuple(reflectors), r)


# item: V Algorithm 3
def rhouqr(a: torch.Tensor, engine: Engine, *, cutoff: int | None = None) -> HouseholderQR:
    """Factorize an m x n matrix, m >= n, by Algorithm 3 (RHOUQR), with one reflector for all columns.

    After Elmroth and Gustavson, "Applying Recursion to Serial and Parallel QR Factorization Leads to Better
    Performance", IBM J. Res. Dev. 44, 2000. The price of its orthogonality are the products with T and for
    it, which Gram-Schmidt (:func:`~neula.algorithms.orthogonal.rgsqrf.rgsqrf`) does without. The recursion
    stops at ``cutoff`` columns, 128 in the paper; the engine's choice by default.
    """
    cutoff = engine.tuning.recursion(engine.storage).cutoff if cutoff is None else cutoff
    _checked("rhouqr", a, cutoff)
    m, n = a.shape
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
        n, gemm, operand = a.shape[1], self.engine.gemm, self.engine.operand
        if n <= self.cutoff:
            for target, factor in zip((a, t, r), householder_wy(a), strict=True):
                target.copy_(factor)
            return operand(a, low)
        k = split_columns(n, self.cutoff)
        left, right = slice(0, k), slice(k, n)
        low1, low2 = (None, None) if low is None else (low[:, left], low[:, right])

        y1 = self.factorize(a[:, left], t[left, left], r[left, left], low1)
        t1, a2 = operand(t[left, left]), a[:, right]
        apply_wy(y1, t1.T, a2, operand(a2, low2), self.engine)
        r[left, right] = a2[:k]
        # Above the right half's reflectors Y is zero.
        a2[:k] = 0.0
        if low2 is not None:
            low2[:k] = 0.0
        y2 = self.factorize(a2[k:], t[right, right], r[right, right], None if low2 is None else low2[k:])
        # T12 = -T1 (Y1^T Y2) T2: two block reflectors become one.
        coupled = gemm(t1, operand(gemm(y1[k:].T, y2)))
        gemm(operand(coupled), operand(t[right, right]), t[left, right], alpha=-1.0)
        return a if low is None else low
