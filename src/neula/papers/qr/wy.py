"""Householder reflectors in blocks: the compact WY representation ``Q = I - Y T Y^T``.

Schreiber and Van Loan, "A Storage-Efficient WY Representation for Products of Householder Transformations",
SIAM J. Sci. Stat. Comput. 10, 1989. The reflectors ``I - tau_j y_j y_j^T`` of a panel become one matrix
that is applied with products, all of them in the engine's low format. Y, T and sums are kept in the storage
precision.

Rounding changes Q by a small multiple of the unit roundoff, whatever the condition number of the matrix that
was factorized: there is no R to divide by. That is what Gram-Schmidt lacks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neula.engines import Engine
from neula.kernels.precision import exact_matmul


@dataclass(frozen=True)
class BlockReflector:
    """The orthogonal matrix ``Q = I - Y T Y^T``, applied to a C in the engine's storage precision.

    Attributes
    ----------
    y : Tensor, shape (m, k)
        Unit lower trapezoidal: the Householder vectors, with explicit zeros and ones.
    t : Tensor, shape (k, k)
        Upper triangular.
    """

    y: torch.Tensor
    t: torch.Tensor

    def apply(self, c: torch.Tensor, engine: Engine) -> torch.Tensor:
        """``C = Q C``, in place, for an m x p matrix C."""
        y, t = engine.operand(self.y), engine.operand(self.t)
        return apply_wy(y, t, c, engine.operand(c), engine)

    def apply_transpose(self, c: torch.Tensor, engine: Engine) -> torch.Tensor:
        """``C = Q^T C``, in place."""
        y, t = engine.operand(self.y), engine.operand(self.t)
        return apply_wy(y, t.T, c, engine.operand(c), engine)

    def apply_to_bordered(self, c: torch.Tensor, engine: Engine) -> torch.Tensor:
        """``C = Q C`` in place for ``C = diag(I, C2)`` with an identity of order k: a step of LAPACK's orgqr.

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
    """``A = Q R`` with Q as a product of block reflectors.

    Attributes
    ----------
    reflectors : tuple of BlockReflector
        ``Q = Q_1 Q_2 ...``, each acting on the last rows, as many as its Y has.
    r : Tensor, shape (n, n)
        Upper triangular. Its diagonal keeps the signs that the library's reflectors give it, so it can be
        negative; the columns of Q go with them.
    """

    reflectors: tuple[BlockReflector, ...]
    r: torch.Tensor

    def q(self, engine: Engine) -> torch.Tensor:
        """The explicit m x n matrix Q: the reflectors applied backwards to the first columns of the identity.

        It is column-major, in the storage precision of an engine that may have another format than the one
        of the factorization.
        """
        m, n = self.reflectors[0].y.shape[0], self.r.shape[0]
        q = engine.empty(m, n).zero_()
        q.fill_diagonal_(1.0)
        for reflector in reversed(self.reflectors):
            start = m - reflector.y.shape[0]
            reflector.apply_to_bordered(q[start:, start:], engine)
        return q


def householder_wy(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Householder QR of the library (LAPACK's or cuSOLVER's geqrf) in WY form; nothing is in a low format.

    ``T = (I + diag(tau) striu(Y^T Y))^-1 diag(tau)`` rather than the column-by-column recurrence of LAPACK's
    larft, since products are what is fast (Puglisi, "Modification of the Householder Method Based on the
    Compact WY Representation", SIAM J. Sci. Stat. Comput. 13, 1992). Written so, nothing is divided by tau,
    which is 0 where a column needs no reflector.

    Parameters
    ----------
    a : Tensor, shape (m, n), m >= n
        float32 or float64.

    Returns
    -------
    Y : Tensor, shape (m, n)
        Unit lower trapezoidal.
    T : Tensor, shape (n, n)
        Upper triangular.
    R : Tensor, shape (n, n)
        Upper triangular; its diagonal keeps the library's signs.
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
    """``C - Y (T (Y^T C))`` in place; ``T^T`` for T gives ``Q^T C``.

    Y, T and ``low``, a copy of C, are operands of the engine; C is in its storage precision.
    """
    return _subtract(y, t, engine.gemm(y.T, low), c, engine)


def _subtract(
    y: torch.Tensor, t: torch.Tensor, w: torch.Tensor, c: torch.Tensor, engine: Engine
) -> torch.Tensor:
    """``C - Y (T W)``, in place."""
    tw = engine.gemm(t, engine.operand(w))
    return engine.gemm(y, engine.operand(tw), c, alpha=-1.0, beta=1.0)
