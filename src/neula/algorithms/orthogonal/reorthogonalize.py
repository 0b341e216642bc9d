"""Re-orthogonalization: second passes that bring back the orthogonality that a first one lost.

*Twice is enough*: a second Gram-Schmidt pass over Q brings orthogonality back to the working precision
(section 3.3 of the HPDC 2020 paper; Giraud, Langou, Rozloznik, van den Eshof, Numer. Math. 101, 2005).

*A series*: where Q is nearly orthonormal already, Cholesky QR of Q is re-orthogonalization by a few products,
most of them in a low format, since what they add is small.

*Cholesky QR of* ``A R^-1``: a low-precision R is a preconditioner, ``A R^-1`` is well conditioned, and
Cholesky QR in double precision is safe on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from neula.algorithms.elimination.lu_panels import blocks
from neula.algorithms.orthogonal.batched_qr import PRODUCT_BLOCKS
from neula.algorithms.orthogonal.cholesky_qr import shifted_cholesky_r, upper_cholesky
from neula.algorithms.orthogonal.r_only import lower_gram
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.spectra.gram import GramTuning, gram
from neula.engines import Engine
from neula.engines.formats import in_double
from neula.engines.reduction import HERE, Reduction
from neula.kernels.phases import with_real_diagonal

MAX_PASSES = 5
FULL_RANK = 0.5  # smallest diagonal element of the second R for which the first Q spanned all directions

ROW_BLOCKS, FEWEST_ROWS = 4, 8192
"""Blocks of rows that are rounded at a time, of so many rows at least, which fill the matrix unit."""

NEARLY_ORTHONORMAL = 0.25
"""``||I - Q^H Q||_F / sqrt(2)`` up to which :func:`correct` changes anything by default."""

LIFT = 2.0**12  # elements of U lie between rounding errors and one: so scaled, fp16 holds them up to 1e-11

WELL_CONDITIONED = 0.5
"""``||I - W^H W||_F`` below which ``cond(W)^2 <= 3``: one more pass leaves only rounding errors."""


# item: Q re-orthogonalization
def reorthogonalize(
    q: torch.Tensor,
    r: torch.Tensor,
    engine: Engine,
    *,
    columns: int | None = None,
    panel: str | None = None,
    cutoff: int | None = None,
    overwrite_q: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RGSQRF of Q: returns an orthonormal Q and the R that belongs to it (``R_2 R``).

    Once is enough if Q was of full rank to the precision of the products. A small number on the diagonal of
    ``R_2`` says that it was not (a condition number beyond ``1/u``), and that another pass is needed.

    ``columns``: how many are the last, where all others are orthonormal and stay what they are: what the last
    ones have in the range of the others is projected out first. Other options are those of :func:`rgsqrf`.
    """
    passes = second_passes(q, r, engine, columns=columns, panel=panel, cutoff=cutoff, overwrite_q=overwrite_q)
    return deque(passes, maxlen=1).pop()


def second_passes(
    q: torch.Tensor,
    r: torch.Tensor,
    engine: Engine,
    *,
    columns: int | None = None,
    panel: str | None = None,
    cutoff: int | None = None,
    overwrite_q: bool = False,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Q and R after each of the passes of :func:`reorthogonalize`: at least one, at most five."""
    n = r.shape[1]
    first = slice(0, 0 if columns is None else n - columns)
    last = slice(first.stop, n)
    m = len(q)
    if first.stop > 0:
        r = engine.empty(*r.shape).copy_(r)
        if not overwrite_q:  # with as many rows as panels want
            given, q, overwrite_q = q, engine.padded(*q.shape), True
            q[:m].copy_(given)
    for _ in range(MAX_PASSES):
        if first.stop > 0:
            s = engine.empty(first.stop, n - first.stop)
            engine.project_out(engine.operand(q[:, first]), q[:, last], s)
            engine.gemm(engine.operand(s), engine.operand(r[last, last]), r[first, last], beta=1.0)
        q_last, step = rgsqrf(q[:, last], engine, panel=panel, cutoff=cutoff, overwrite_a=overwrite_q)
        smallest = step.diagonal().real.min()
        r_last = _multiply_triangular(step, r[last, last], engine)
        if first.stop > 0:
            r[last, last] = r_last
        else:
            q, r = q_last, r_last
        yield q[:m], r
        if not bool(engine.over_rows.agree(smallest) < FULL_RANK):
            return


def _multiply_triangular(step: torch.Tensor, r: torch.Tensor, engine: Engine) -> torch.Tensor:
    """``R_2 R_1`` as ``R_1 + (R_2 - I) R_1``; overwrites ``step`` with ``R_2 - I``.

    ``R_2 - I`` is as small as the first Q was orthogonal, so the engine's format is accurate enough for it.
    Blocks of columns leave out what is zero below them: a third of the operations of a square product. Where
    the first Q had lost a direction, the difference cancels on the diagonal: that is a product of diagonals.
    """
    diagonal = step.diagonal() * r.diagonal()
    step.diagonal().sub_(1.0)
    low, product = engine.operand(step), r.clone()
    n = r.shape[1]
    width = -(-n // PRODUCT_BLOCKS)
    for start in range(0, n, width):
        stop = min(start + width, n)
        block = engine.operand(r[:stop, start:stop])
        engine.gemm(low[:stop, :stop], block, product[:stop, start:stop], beta=1.0)
    product.mT.tril_()  # by rows, which is three times as fast
    product.diagonal().copy_(diagonal)
    return product


def correct(
    q: torch.Tensor, r: torch.Tensor, engine: Engine, *, largest: float = NEARLY_ORTHONORMAL
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cholesky QR of a Q that is nearly orthonormal, by its series: Q and ``R_2 R`` in the places of Q and R.

    With ``Q^H Q = I + E`` the Cholesky factor is ``R_2 = I + U``, where ``U + U^H = E - U^H U``: half of E's
    upper triangle, and once more with that in place of U, is U up to ``|E|^3``. Up to that ``I - U + U^2`` is
    the inverse of ``R_2``. Only E needs the engine's format, and half of a product; products with U are in
    the cheapest one, with errors of ``|E|`` times its unit roundoff. Nothing synchronizes: where E is not
    small, which the caller's certificate notices, finite Q and R stay as they are.

    ``q``, shape (m, n): column-major, in the engine's storage precision. ``r``, shape (n, n): column-major as
    well. ``largest``: ``||I - Q^H Q||_F / sqrt(2)`` up to which anything is changed. ``A = Q R`` errs by
    ``|U^3|`` then, which for random E is far less than the third power of the norm, and for one of rank one
    is that.
    """
    n = q.shape[1]
    low = engine.using(engine.formats[0])
    width = max(engine.tuning[GramTuning].correction_block, -(-n // PRODUCT_BLOCKS))
    columns = list(blocks(slice(0, n), width))

    # Lower triangles, which are what the Gram matrix has.
    u_t = with_real_diagonal(gram(engine.operand(q), engine))
    u_t.diagonal().sub_(1.0).mul_(0.5)
    u_t.mT.triu_()
    small = torch.linalg.matrix_norm(u_t) < largest
    scales = torch.where(small, LIFT, 0.0).to(u_t.dtype).repeat(n)

    first = _rounded(u_t, low, scales)
    half = u_t.diagonal().clone()
    for k in columns:
        low.gemm(first[k.start :, : k.stop], first[k, : k.stop].mH, u_t[k.start :, k], -(LIFT**-2), 1.0)
    u_t.diagonal().add_(half).mul_(0.5)
    u_t.mT.triu_()

    second = low.fill(first, u_t, scales)
    for k in columns:
        low.gemm(second[k.start :, k.start :], second[k.start :, k], u_t[k.start :, k], -(LIFT**-2), 1.0)
    for k in columns:
        old_r = _rounded(r[: k.stop, k], low)
        low.gemm(second[: k.stop, : k.stop].mH, old_r, r[: k.stop, k], 1.0 / LIFT, 1.0)
    with_real_diagonal(r)
    less = low.fill(second, with_real_diagonal(u_t), scales)
    del u_t  # large matrices: its memory is used again
    for rows in _blocks_of_rows(len(q), low):
        old_q = _rounded(q[rows], low)
        for k in columns:
            low.gemm(old_q[:, : k.stop], less[k, : k.stop].mH, q[rows, k], -1.0 / LIFT, 1.0)
    return q, r


def correct_last(
    q: torch.Tensor, r: torch.Tensor, engine: Engine, columns: int, *, largest: float = NEARLY_ORTHONORMAL
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`correct` of the last columns of a Q whose others are orthonormal: of a square matrix.

    Gram-Schmidt loses orthogonality with the condition number of the columns so far. As long as these are a
    part of those of a matrix without structure, that is a small number (14 for three quarters of a square
    one); the loss is in the last columns. They are projected out of the others' range once more: ``S = Q_1^H
    Q_2`` in the engine's format, ``Q_2 - Q_1 S`` and ``R_12 + S R_22`` in the cheapest one, since S is small.
    Then :func:`correct` takes care of what they have among themselves.

    ``columns``: how many are the last. ``largest``: ``||S||_F``, and what it is in :func:`correct`, up to
    which anything is changed.
    """
    m, n = q.shape
    first, last = slice(0, n - columns), slice(n - columns, n)
    if columns == 0:
        return q, r
    if columns == n:
        return correct(q, r, engine, largest=largest)
    low = engine.using(engine.formats[0])
    s = engine.inner(engine.operand(q[:, first]), engine.operand(q[:, last]))
    small = torch.linalg.matrix_norm(s) < largest
    step = _rounded(s, low, torch.where(small, LIFT, 0.0).to(s.dtype).repeat(columns))
    low.gemm(step, _rounded(r[last, last], low), r[first, last], 1.0 / LIFT, 1.0)
    for rows in _blocks_of_rows(m, low):
        low.gemm(_rounded(q[rows, first], low), step, q[rows, last], -1.0 / LIFT, 1.0)
    correct(q[:, last], r[last, last], engine, largest=largest)
    return q, r


def _blocks_of_rows(m: int, engine: Engine) -> list[slice]:
    return list(blocks(slice(0, m), max(FEWEST_ROWS, engine.rows(-(-m // ROW_BLOCKS)))))


def _rounded(x: torch.Tensor, engine: Engine, scales: torch.Tensor | None = None) -> torch.Tensor:
    """A copy of a matrix, or of its scaled columns, as the engine reads it."""
    workspace = engine.empty(*x.shape, dtype=engine.operand_dtype)
    return engine.round(x, workspace) if scales is None else engine.fill(workspace, x, scales)


def refine_qr(
    a: torch.Tensor, r: torch.Tensor | None = None, over_rows: Reduction = HERE
) -> tuple[torch.Tensor, torch.Tensor]:
    """QR in double precision from an R of low precision, by default the identity: Cholesky QR of ``W = A
    R^-1``.

    A pass squares the distance of W from orthogonality, so one or two do; a Gram matrix that is not definite
    is shifted first. Both factors are float64; NaN where A is too close to rank-deficient for this.
    """
    w, step = a, None if r is None else in_double(r)
    r = step
    for _ in range(MAX_PASSES):
        if step is not None:
            w = torch.linalg.solve_triangular(step, w, upper=True, left=False)
        gram = over_rows.total(lower_gram(w[None])[0])
        step, info = upper_cholesky(gram)
        definite = not bool(over_rows.agree(info > 0))
        if not definite:
            step = shifted_cholesky_r(w, gram, over_rows)
        r = step if r is None else (step @ r).triu_()
        # The Gram matrix, a sum over all rows, is the same on all processes, but perhaps not its norm.
        if definite and not bool(over_rows.agree(_deviation(gram)) > WELL_CONDITIONED):
            break
    assert step is not None
    assert r is not None
    return torch.linalg.solve_triangular(step, w, upper=True, left=False), r


def _deviation(gram: torch.Tensor) -> torch.Tensor:
    """``||G - I||_F`` from the lower triangle of G; NaN when a factorization has broken down."""
    norm = torch.linalg.vector_norm
    below = gram.tril(-1)
    return (2 * norm(below).square() + norm(gram.diagonal() - 1).square()).sqrt()
