"""Second passes that repair what a first one lost.

*Twice is enough*: a second Gram-Schmidt pass over Q brings orthogonality back to the working precision
(section 3.3 of the HPDC 2020 paper; Giraud, Langou, Rozloznik, van den Eshof, Numer. Math. 101, 2005).

*Cholesky QR of* ``A R^-1``: a low-precision R is a preconditioner, ``A R^-1`` is well conditioned, and
Cholesky QR in double precision is safe on it.
"""

from __future__ import annotations

import torch

from neula.algorithms.cholesky_qr import shifted_cholesky_r
from neula.algorithms.rgsqrf import rgsqrf
from neula.engines import Engine


MAX_PASSES = 5


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
    a: torch.Tensor, r: torch.Tensor, *, with_q: bool = False
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Make R accurate to double precision: ``R <- chol((A R^-1)^T (A R^-1)) R``.

    A pass squares the distance of ``A R^-1`` from orthogonality, so one or two do; a Gram matrix that is not
    definite is shifted, and the pass counts as one more.

    Parameters
    ----------
    a : Tensor, shape (m, n)
        float64.
    r : Tensor, shape (n, n)
        Upper triangular, of any precision.
    with_q : bool
        Also return the orthonormal Q, which takes a pass more.

    Returns
    -------
    Q : Tensor, shape (m, n), or None
    R : Tensor, shape (n, n)
        float64. Holds NaN where A is too close to rank-deficient for this.
    """
    w, r = a, r.double()
    step = r
    for _ in range(MAX_PASSES):
        w = torch.linalg.solve_triangular(step, w, upper=True, left=False)
        gram = w.T @ w
        step, info = torch.linalg.cholesky_ex(gram, upper=True)
        if bool(info > 0):
            step = shifted_cholesky_r(w, gram)
            deviation = float("inf")
        else:
            deviation = _deviation(gram)
        r = (step @ r).triu_()
        if not deviation > (1e-6 if with_q else 1e-1):
            break
    q = torch.linalg.solve_triangular(step, w, upper=True, left=False) if with_q else None
    return q, r


def _deviation(gram: torch.Tensor) -> float:
    """``||G - I||_F``; NaN when the factorization has broken down."""
    identity = torch.eye(gram.shape[0], dtype=gram.dtype, device=gram.device)
    return float(torch.linalg.matrix_norm(gram - identity))
