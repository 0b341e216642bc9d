"""Second passes that repair what a first one lost.

*Twice is enough*: a second Gram-Schmidt pass over Q brings orthogonality back to the working precision
(section 3.3 of the HPDC 2020 paper; Giraud, Langou, Rozloznik, van den Eshof, Numer. Math. 101, 2005).

*Cholesky QR of* ``A R^-1``: a low-precision R is a preconditioner, ``A R^-1`` is well conditioned, and
Cholesky QR in double precision is safe on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from neula.algorithms.cholesky_qr import shifted_cholesky_r, upper_cholesky
from neula.algorithms.rgsqrf import rgsqrf
from neula.engines import Engine

MAX_PASSES = 5

FULL_RANK = 0.5
"""Smallest diagonal element of the second R for which the first Q spanned all directions."""

PRODUCT_BLOCKS = 8
"""Blocks of columns in a product of two triangular matrices: the last one has an eighth of the columns."""

WELL_CONDITIONED = 0.5
"""``||I - W^T W||_F`` below which ``cond(W)^2 <= 3``: one more pass leaves nothing but rounding errors."""


def reorthogonalize(
    q: torch.Tensor,
    r: torch.Tensor,
    engine: Engine,
    *,
    panel: str | None = None,
    cutoff: int | None = None,
    overwrite_q: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RGSQRF of Q: returns an orthonormal Q and the R that belongs to it (``R_2 R``).

    Once is enough if Q was of full rank to the precision of the products. A small number on the diagonal of
    ``R_2`` says that it was not (a condition number beyond ``1/u``), and that another pass is needed.

    Parameters
    ----------
    q : Tensor, shape (m, n)
    r : Tensor, shape (n, n)
    engine : Engine
    panel, cutoff : optional
        Those of the second pass, see :func:`rgsqrf`.
    overwrite_q : bool
        Let the result take the place of ``q``, as in :func:`rgsqrf`.
    """
    passes = second_passes(q, r, engine, panel=panel, cutoff=cutoff, overwrite_q=overwrite_q)
    return deque(passes, maxlen=1).pop()


def second_passes(
    q: torch.Tensor,
    r: torch.Tensor,
    engine: Engine,
    *,
    panel: str | None = None,
    cutoff: int | None = None,
    overwrite_q: bool = False,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Q and R after each of the passes of :func:`reorthogonalize`: at least one, at most five."""
    for _ in range(MAX_PASSES):
        q, r, smallest = second_pass(q, r, engine, panel=panel, cutoff=cutoff, overwrite_q=overwrite_q)
        yield q, r
        if not bool(smallest < FULL_RANK):
            return


def second_pass(
    q: torch.Tensor,
    r: torch.Tensor,
    engine: Engine,
    *,
    panel: str | None = None,
    cutoff: int | None = None,
    overwrite_q: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One pass of :func:`reorthogonalize`: Q, R, and the smallest diagonal element of ``R_2``."""
    q, step = rgsqrf(q, engine, panel=panel, cutoff=cutoff, overwrite_a=overwrite_q)
    smallest = step.diagonal().min()
    return q, _multiply_triangular(step, r, engine), smallest


def _multiply_triangular(step: torch.Tensor, r: torch.Tensor, engine: Engine) -> torch.Tensor:
    """``R_2 R_1`` as ``R_1 + (R_2 - I) R_1``; overwrites ``step`` with ``R_2 - I``.

    The correction is as small as the first Q was orthogonal, so the engine's format is accurate enough for
    it. Blocks of columns leave out what is zero below them: a third of the operations of a square product.
    """
    step.diagonal().sub_(1.0)
    low, product = engine.operand(step), r.clone()
    n = r.shape[1]
    width = -(-n // PRODUCT_BLOCKS)
    for start in range(0, n, width):
        stop = min(start + width, n)
        block = engine.operand(r[:stop, start:stop])
        engine.gemm(low[:stop, :stop], block, product[:stop, start:stop], beta=1.0)
    return product.triu_()


def refine_qr(a: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """QR in double precision from an R of low precision: Cholesky QR of ``W = A R^-1``.

    A pass squares the distance of W from orthogonality, so one or two do; a Gram matrix that is not definite
    is shifted first.

    Parameters
    ----------
    a : Tensor, shape (m, n)
        float64.
    r : Tensor, shape (n, n)
        Upper triangular, of any precision.

    Returns
    -------
    Q : Tensor, shape (m, n)
    R : Tensor, shape (n, n)
        Both float64; NaN where A is too close to rank-deficient for this.
    """
    w, step = a, r.double()
    r = step
    for _ in range(MAX_PASSES):
        w = torch.linalg.solve_triangular(step, w, upper=True, left=False)
        gram = w.T @ w
        step, info = upper_cholesky(gram)
        definite = not bool(info > 0)
        if not definite:
            step = shifted_cholesky_r(w, gram)
        r = (step @ r).triu_()
        if definite and not _deviation(gram) > WELL_CONDITIONED:
            break
    return torch.linalg.solve_triangular(step, w, upper=True, left=False), r


def _deviation(gram: torch.Tensor) -> float:
    """``||G - I||_F``; NaN when a factorization has broken down."""
    identity = torch.eye(gram.shape[0], dtype=gram.dtype, device=gram.device)
    return float(torch.linalg.matrix_norm(gram - identity))
