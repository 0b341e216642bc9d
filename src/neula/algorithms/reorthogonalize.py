"""Second passes that repair what a first one lost.

*Twice is enough*: a second Gram-Schmidt pass over Q brings orthogonality back to the working precision
(section 3.3 of the HPDC 2020 paper; Giraud, Langou, Rozloznik, van den Eshof, Numer. Math. 101, 2005).

*Cholesky QR of* ``A R^-1``: a low-precision R is a preconditioner, ``A R^-1`` is well conditioned, and
Cholesky QR in double precision is safe on it.
"""

from __future__ import annotations

import math

import torch

from neula.algorithms.cholesky_qr import shifted_cholesky_r, upper_cholesky
from neula.algorithms.rgsqrf import rgsqrf
from neula.engines import Engine

MAX_PASSES = 5

ORTHONORMAL = 1e-14
"""``||I - W^T W||_F / sqrt(n)`` below which W is as orthonormal as double precision makes it."""

PRECONDITIONED = 0.1
"""The same measure, below which R is as good as CGLS needs it."""


def reorthogonalize(
    q: torch.Tensor, r: torch.Tensor, engine: Engine, *, panel: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """RGSQRF of Q: returns an orthonormal Q and the R that belongs to it (``R_2 R``).

    Parameters
    ----------
    q : Tensor, shape (m, n)
        Overwritten.
    r : Tensor, shape (n, n)
    engine : Engine
    panel : str, optional
        Panel of the second pass.
    """
    q, r2 = rgsqrf(q, engine, panel=panel, overwrite_a=True)
    return q, (r2.double() @ r.double()).triu_().to(r.dtype)


def refine_r(
    a: torch.Tensor, r: torch.Tensor, *, enough: float = PRECONDITIONED
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make R accurate to double precision: ``R <- chol((A R^-1)^T (A R^-1)) R``.

    A pass squares the distance of ``W = A R^-1`` from orthogonality, so one or two do; a Gram matrix that is
    not definite is shifted first.

    Parameters
    ----------
    a : Tensor, shape (m, n)
        float64.
    r : Tensor, shape (n, n)
        Upper triangular, of any precision.
    enough : float
        Stop when ``||I - W^T W||_F / sqrt(n)`` is this small: :data:`ORTHONORMAL` for ``W`` to serve as Q.

    Returns
    -------
    W : Tensor, shape (m, n)
        ``A R^-1``: the orthonormal factor, as far as ``enough`` says.
    R : Tensor, shape (n, n)
        float64. Both hold NaN where A is too close to rank-deficient for this.
    """
    w, step = a, r.double()
    r = step
    for passes_left in reversed(range(MAX_PASSES)):
        w = torch.linalg.solve_triangular(step, w, upper=True, left=False)
        gram = w.T @ w
        if not _deviation(gram) > enough or not passes_left:
            break
        step, info = upper_cholesky(gram)
        if bool(info > 0):
            step = shifted_cholesky_r(w, gram)
        r = (step @ r).triu_()
    return w, r


def _deviation(gram: torch.Tensor) -> float:
    """``||G - I||_F / sqrt(n)``; NaN when a factorization has broken down."""
    n = gram.shape[0]
    identity = torch.eye(n, dtype=gram.dtype, device=gram.device)
    return float(torch.linalg.matrix_norm(gram - identity)) / math.sqrt(n)
