"""Cholesky QR panels: ``A^H A = R^H R``, ``Q = A R^-1``.

Two products and one small factorization: the least communication a QR can have. Orthogonality is lost with
the square of the condition number times the precision of the Gram matrix, hence double precision for it, or
a second pass, or a shift (Fukaya, Kannan, Nakatsukasa, Yamamoto, Yanagisawa, "Shifted Cholesky QR for
computing the QR factorization of ill-conditioned matrices", SIAM J. Sci. Comput. 42, 2020).
"""

from __future__ import annotations

import math

import torch

from neula.algorithms.elimination.lu_panels import blocks
from neula.algorithms.orthogonal.wide_panels import wide_cholesky_qr32_in_place
from neula.engines import Engine
from neula.engines.formats import in_double
from neula.engines.reduction import HERE, Reduction
from neula.kernels.cholesky.cholesky import MAX_COLUMNS, CholeskyFactors, cholesky_inverse
from neula.kernels.cholesky.cholesky_tiles import lower_factor
from neula.kernels.precision import exact_matmul
from neula.kernels.qr.panel_gram import PanelGram, eliminate, multiply_half_panel, panel_gram
from neula.kernels.qr.tall import half_gram, multiply_panel

MOST_LOST = 2.0**-7
"""Of the orthogonality by one pass, that a second one restores."""

GRAM_PARTS = 4
"""Blocks of rows in which the lower triangle of a Gram matrix is computed: ``(1 + 1/4) m n^2`` operations."""


# item: Q mixed CholQR
def cholesky_qr(a: torch.Tensor, engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """One pass with the Gram matrix in float64, without synchronizing.

    Orthogonal to the storage precision times ``cond(A)`` up to a condition of about 1e7. Where the Gram
    matrix is not positive definite, Q and R are NaN: the caller's certificate notices.

    Parameters
    ----------
    a : Tensor, shape (m, n), m >= n
    """
    factor, info = upper_cholesky(gram64(a, engine.over_rows))
    r = factor.masked_fill(info > 0, math.nan)
    return _apply_inverse(a, r, engine), r.to(a.dtype)


def cholesky_qr32(a: torch.Tensor, engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """One pass with everything as accurate as in float32, which on a GPU is a few kernels.

    Orthogonal to ``u cond(A)^2``. Beyond a condition of about ``u**-0.5`` some columns of Q are too short,
    and A is QR all the same (``cholesky``); or, where that kernel does not run or there are too
    many columns for it, Q and R are NaN. In float64 :func:`cholesky_qr`.

    Parameters
    ----------
    a : Tensor, shape (m, n), m >= n
    """
    if a.dtype != torch.float32:
        return cholesky_qr(a, engine)
    m, n = a.shape
    q, r = engine.empty(m, n).copy_(a), engine.empty(n, n).zero_()
    cholesky_qr32_in_place(q, r, engine)
    return q, r


def cholesky_qr32_in_place(
    a: torch.Tensor, r: torch.Tensor, engine: Engine, low: torch.Tensor | None = None, *, twice: bool = False
) -> None:
    """:func:`cholesky_qr32` with Q in place of A, and rounded to a narrower type in ``low``.

    A is float32, or float16 if it has up to 256 columns. So many go in two blocks, of one Gram matrix.
    Elements of R below the diagonal blocks are not written.

    With ``twice`` there is a second pass over the last block, or all columns if they are more: orthogonal to
    ``u`` beyond a condition of 1e5.
    """
    if a.shape[1] > 2 * MAX_COLUMNS:
        factorize, last = wide_cholesky_qr32_in_place, slice(0, a.shape[1])
    else:
        factorize, last = _in_two_blocks, slice((a.shape[1] - 1) // MAX_COLUMNS * MAX_COLUMNS, a.shape[1])
    factorize(a, r, engine, low)
    if twice:
        step = torch.zeros_like(r[last, last])
        factorize(a[:, last], step, engine, None if low is None else low[:, last])
        r[last, last] = exact_matmul(step, r[last, last])


def _in_two_blocks(a: torch.Tensor, r: torch.Tensor, engine: Engine, low: torch.Tensor | None = None) -> None:
    """Factorize two blocks of up to 128 columns."""
    gram = (
        panel_gram(a)
        if a.dtype == torch.float16
        else PanelGram.from_gram(engine.over_rows.total(half_gram(a)))
    )
    left, right = slice(0, len(gram.first)), slice(len(gram.first), a.shape[1])
    low1, low2 = (None, None) if low is None else (low[:, left], low[:, right])
    first = cholesky_inverse(gram.first, out=r[left, left])
    if right.start == right.stop:
        _multiply(a, first, low)
        return
    rest = eliminate(first.inverse, gram.across, gram.second, r[left, right])

    def multiply() -> None:
        _multiply(a[:, left], first, low1)
        engine.subtract(engine.operand(a[:, left]) if low1 is None else low1, r[left, right], a[:, right])

    # One multiprocessor factorizes what is left of the Gram matrix meanwhile.
    _, second = engine.beside(multiply, lambda: cholesky_inverse(rest, out=r[right, right]))
    _multiply(a[:, right], second, low2)


def _multiply(a: torch.Tensor, factors: CholeskyFactors, low: torch.Tensor | None) -> None:
    """``Q = A R^-1`` in place."""
    if a.dtype == torch.float16:
        multiply_half_panel(a, factors.inverse, factors.norms)
    else:
        multiply_panel(a, factors.inverse, factors.norms, low)


def cholesky_qr_low(
    a: torch.Tensor, engine: Engine, columns: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One pass with both products in the engine's low format; without synchronizing.

    As accurate as a pass of recursive Gram-Schmidt in that format up to a condition number of about 10, and
    twice as fast where A is so tall that its Cholesky factor costs nothing; NaN beyond ``u**-0.5``.

    Parameters
    ----------
    a : Tensor, shape (m, n), m >= n
        An operand of the engine (:meth:`neula.engines.Engine.operand`).
    columns : int, optional
        Those to factorize, if the others are zeros: products may be faster with them.
    """
    n = a.shape[1] if columns is None else columns
    factor, info = upper_cholesky(engine.inner(a, a)[:n, :n])
    r = factor.masked_fill(info > 0, math.nan)
    inverse = engine.empty(a.shape[1], a.shape[1], dtype=engine.operand_dtype).zero_()
    engine.round(_inverse(r), inverse[:n, :n])
    return engine.gemm(a, inverse)[:, :n], r.triu()


def cholesky_qr2(a: torch.Tensor, engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """Two passes with the Gram matrix as the engine likes it.

    Where that breaks down, three passes with it in float64, the first one shifted if it must be.

    Orthogonal to the storage precision up to a condition of about ``u**-0.5``, and with the shift up to
    about ``1/u`` (paper above, algorithms 2.1 and 4.2).

    Parameters
    ----------
    a : Tensor, shape (m, n), m >= n
    """
    first, info = upper_cholesky(engine.gram(a))
    if bool(engine.over_rows.agree((info > 0) | _is_graded(first, a.dtype))):
        return _three_passes(a, engine)
    return _second_pass(_apply_inverse(a, first, engine), first, engine)


def solved_cholesky_qr(a: torch.Tensor, out: torch.Tensor) -> torch.Tensor | None:
    """One pass by calls of the library in the precision of A, after which Q is solved for.

    Its rows are found by substitution, so that the residual is that of reflections whatever the condition
    number; orthogonality is lost to ``u cond(A)^2``.

    Parameters
    ----------
    a : Tensor, shape (m, n), m >= n
    out : Tensor, shape (m, n)
        Room for Q; it may be A.

    Returns
    -------
    r : Tensor, shape (n, n), or None
        None where a pivot shows that orthogonality is lost, or that something is not finite.

    Examples
    --------
    >>> import torch
    >>> a = torch.tensor([[3.0], [4.0]])
    >>> r = solved_cholesky_qr(a, out=a)
    >>> round(r.item(), 6), round(a[1].item(), 6)
    (5.0, 0.8)
    """
    n = a.shape[1]
    gram = a.new_empty(n, n)
    for k in blocks(slice(0, n), -(-n // GRAM_PARTS)):
        torch.mm(a[:, k].mH, a[:, : k.stop], out=gram[k, : k.stop])
    r, info = upper_cholesky(gram)
    left = (
        r.diagonal().real.square() / gram.diagonal().real
    )  # of the square of a column, beyond those before it
    if int(info) > 0 or not bool((torch.finfo(a.dtype).eps / 2 < MOST_LOST * left).all()):
        return None
    torch.linalg.solve_triangular(r.mT, a.mT, upper=False, out=out.mT)
    return r


def shifted_cholesky_r(w: torch.Tensor, gram: torch.Tensor, over_rows: Reduction = HERE) -> torch.Tensor:
    """R of a shifted Gram matrix, which always has one unless ``w`` holds NaN.

    The shift is ``11 (m n + n (n + 1)) u ||w||^2`` as in the paper, u that of the Gram matrix, and at most a
    thousandth of ``||w||^2``.
    """
    m, n = over_rows.count(w.shape[0]), w.shape[1]
    u = torch.finfo(gram.dtype).eps / 2
    norm2 = gram.diagonal().real.sum()
    shift = norm2 * min(11 * (m * n + n * (n + 1)) * u, 1e-3)
    factor, info = upper_cholesky(gram + shift * torch.eye(n, dtype=gram.dtype, device=gram.device))
    return factor.masked_fill(info > 0, math.nan)


def _three_passes(a: torch.Tensor, engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    gram = gram64(a, engine.over_rows)
    r, info = upper_cholesky(gram)
    if bool(engine.over_rows.agree(info > 0)):
        r = shifted_cholesky_r(a, gram, engine.over_rows)
    q = _apply_inverse(a, r, engine)
    for _ in range(2):
        q, step = cholesky_qr(q, engine)
        r = in_double(step) @ r
    return q, r.to(a.dtype)


def _second_pass(q: torch.Tensor, first: torch.Tensor, engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    second, info = upper_cholesky(engine.gram(q))
    second = second.masked_fill(info > 0, math.nan)
    return _apply_inverse(q, second, engine), (second @ first).to(q.dtype)


def _is_graded(r: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Whether the Gram matrix may have lost its small eigenvalues to rounding.

    They are lost below ``u ||G||``; the diagonal of R is up to ``sqrt(n)`` larger than the singular value
    behind it.
    """
    diagonal = r.diagonal().real
    return diagonal.min() < 10 * (len(diagonal) * torch.finfo(dtype).eps) ** 0.5 * diagonal.max()


def gram64(a: torch.Tensor, over_rows: Reduction = HERE) -> torch.Tensor:
    """``A^H A`` of a tall matrix in double precision."""
    wide = in_double(a)
    return over_rows.total(wide.mH @ wide)


def upper_cholesky(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper triangular R with ``R^H R = G``, and LAPACK's info, of a matrix or each of a batch.

    The lower factor is what libraries compute without extra copies: R is a view of its conjugate transpose.
    """
    factor, info = lower_factor(gram)
    return factor.mH, info


def _apply_inverse(a: torch.Tensor, r: torch.Tensor, engine: Engine) -> torch.Tensor:
    """``A R^-1`` as a product with the explicit inverse: R is small, and products are what is fast."""
    return engine.gemm(engine.operand(a), engine.operand(_inverse(r).to(a.dtype)))


def _inverse(r: torch.Tensor) -> torch.Tensor:
    identity = torch.eye(r.shape[0], dtype=r.dtype, device=r.device)
    return torch.linalg.solve_triangular(r.T, identity, upper=False).T
