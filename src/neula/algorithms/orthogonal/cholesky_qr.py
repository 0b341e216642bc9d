"""Cholesky QR panels: ``A^H A = R^H R``, ``Q = A R^-1``.

Two products and one small factorization: the least communication a QR can have. Orthogonality is lost with
the square of the condition number times the precision of the Gram matrix, hence double precision for it, or
a second pass, or a shift (Fukaya, Kannan, Nakatsukasa, Yamamoto, Yanagisawa, "Shifted Cholesky QR for
computing the QR factorization of ill-conditioned matrices", SIAM J. Sci. Comput. 42, 2020).
"""

from __future__ import annotations

import torch

from neula.algorithms.elimination.lu_panels import blocks
from neula.engines import Engine
from neula.engines.formats import double_gram, in_double
from neula.engines.reduction import HERE, Reduction
from neula.kernels.cholesky.cholesky import MAX_COLUMNS, CholeskyFactors, cholesky_inverse
from neula.kernels.cholesky.cholesky_tiles import lower_factor
from neula.kernels.precision import exact_matmul, exactly
from neula.kernels.products.gemm import corrected_gemm, corrected_gram
from neula.kernels.qr.panel_gram import LOST, PanelGram, eliminate, panel_gram
from neula.kernels.qr.tall import half_gram, multiply_panel

MOST_LOST = 2.0**-7  # of the orthogonality by one pass, that a second one restores

GRAM_PARTS = 4
"""Blocks of rows in which the lower triangle of a Gram matrix is computed: ``(1 + 1/4) m n^2`` operations."""


# item: Q mixed CholQR
def cholesky_qr(a: torch.Tensor, engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """One pass for a tall A with the Gram matrix in float64, without synchronizing.

    Orthogonal to the storage precision times ``cond(A)`` up to a condition of about 1e7. Where the Gram
    matrix is not positive definite, Q and R are NaN: the caller's certificate notices.
    """
    r = factor_or_nan(engine.over_rows.total(double_gram(a)))
    return _apply_inverse(a, r, engine), r.to(a.dtype)


def cholesky_qr32(a: torch.Tensor, engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """One pass for a tall A with everything as accurate as in float32, which on a GPU is a few kernels.

    Orthogonal to ``u cond(A)^2``. Beyond a condition of about ``u**-0.5`` some columns of Q are too short,
    and A is QR all the same (``cholesky``); or, where that kernel does not run or there are too many columns
    for it, Q and R are NaN. In float64 :func:`cholesky_qr`.
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
    gram = (
        panel_gram(a)
        if a.dtype == torch.float16
        else PanelGram.from_gram(engine.over_rows.total(half_gram(a)))
    )
    left, right = slice(0, len(gram.first)), slice(len(gram.first), a.shape[1])
    low1, low2 = (None, None) if low is None else (low[:, left], low[:, right])
    first = cholesky_inverse(gram.first, out=r[left, left])
    if right.start == right.stop:
        multiply_panel(a, first.inverse, first.norms, low)
        return
    rest = eliminate(first.inverse, gram.across, gram.second, r[left, right])

    def multiply() -> None:
        multiply_panel(a[:, left], first.inverse, first.norms, low1)
        engine.subtract(engine.operand(a[:, left]) if low1 is None else low1, r[left, right], a[:, right])

    # One multiprocessor factorizes what is left of the Gram matrix meanwhile.
    _, second = engine.concurrently(multiply, lambda: cholesky_inverse(rest, out=r[right, right]))
    multiply_panel(a[:, right], second.inverse, second.norms, low2)


def wide_cholesky_qr32_in_place(
    a: torch.Tensor, r: torch.Tensor, engine: Engine, low: torch.Tensor | None = None
) -> None:
    """Q in place of a float32 A, and rounded to a narrower type in ``low``; all are column-major.

    Over processes a panel waits for the others, so there is one message for some hundred columns. The Gram
    matrix is factorized by blocks of the 128 columns that the kernel takes. The work before and after the
    message is replayed from two CUDA graphs without the message itself: NCCL does not end a communicator
    while there is a graph that uses it.

    Orthogonal to ``u cond(A)^2``; beyond a condition of about ``u**-0.5`` columns of Q may be too short, or
    NaN.
    """

    def multiplied(a: torch.Tensor, gram: torch.Tensor) -> tuple[torch.Tensor, ...]:
        r, inverse = engine.alone.replay(_factors, (gram,), "factors of a wide panel")
        corrected_gemm(a, inverse, c=a, bound=gram.diagonal().amax().sqrt(), triangular=True)
        return (a, r) if low is None else (a, r, engine.operand(a))

    (gram,) = engine.alone.replay(_gram, (a,), "Gram matrix of a wide panel")
    gram = engine.over_rows.total(gram)
    out = (a, r) if low is None else (a, r, low)
    engine.alone.replay(multiplied, (a, gram), ("wide panel", repr(engine), len(out)), out)


def _gram(a: torch.Tensor) -> tuple[torch.Tensor]:
    """Gram matrix of the rows of this process, in the upper triangle."""
    return (corrected_gram(a).T,)


def _factors(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    factors = cholesky_inverse_in_blocks(gram)
    return factors.r, factors.inverse


def cholesky_inverse_in_blocks(gram: torch.Tensor, width: int = MAX_COLUMNS) -> CholeskyFactors:
    """``kernels.cholesky.cholesky.cholesky_inverse`` by blocks of some columns, without synchronizing.

    The Gram matrix is float32, and its upper triangle is read.

    >>> factors = cholesky_inverse_in_blocks(torch.tensor([[4.0, 2.0], [0.0, 2.0]]), width=1)
    >>> factors.r
    tensor([[2., 1.],
            [0., 1.]])
    >>> factors.inverse
    tensor([[ 0.5000, -0.5000],
            [ 0.0000,  1.0000]])
    """
    n, rest = len(gram), gram.triu()
    rest += rest.triu(1).mH
    diagonal = rest.diagonal().clone()
    smallest = LOST * diagonal
    r, inverse = torch.zeros_like(rest), torch.zeros_like(rest)
    for k in blocks(slice(0, n), width):
        right = slice(k.stop, n)
        pivots = rest[k, k].diagonal()
        torch.maximum(pivots, smallest[k], out=pivots)
        factors = cholesky_inverse(rest[k, k].double(), out=r[k, k])
        inverse[k, k] = factors.inverse
        if k.stop < n:
            beside = exactly(torch.mm, factors.inverse.mH, rest[k, right], out=r[k, right])
            exactly(torch.addmm, rest[right, right], beside.mH, beside, out=rest[right, right], alpha=-1)
    _invert_from(r, inverse, width)
    return CholeskyFactors(r, inverse, diagonal.sqrt())


def _invert_from(r: torch.Tensor, inverse: torch.Tensor, width: int) -> None:
    """The inverse of an upper triangle whose diagonal blocks of some width are inverted, in place.

    Pairs of blocks become blocks of twice the width: above the diagonal of their inverse is that of the one
    times the off-diagonal block times that of the other, with opposite sign. No block waits for it.
    """
    n = len(r)
    while width < n:
        for start in range(0, n - width, 2 * width):
            left = slice(start, start + width)
            right = slice(left.stop, min(left.stop + width, n))
            beside = exact_matmul(r[left, right], inverse[right, right])
            exactly(torch.mm, inverse[left, left], beside, out=inverse[left, right]).neg_()
        width *= 2


def cholesky_qr_low(
    a: torch.Tensor, engine: Engine, columns: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One pass for a tall operand of the engine, both products in its low format; without synchronizing.

    As accurate as a pass of recursive Gram-Schmidt in that format up to a condition number of about 10, and
    twice as fast where A is so tall that its Cholesky factor costs nothing; NaN beyond ``u**-0.5``. Columns
    beyond ``columns`` are zeros, with which products may be faster.
    """
    n = a.shape[1] if columns is None else columns
    r = factor_or_nan(engine.inner(a, a)[:n, :n])
    inverse = engine.empty(a.shape[1], a.shape[1], dtype=engine.operand_dtype).zero_()
    engine.round(upper_inverse(r), inverse[:n, :n])
    return engine.gemm(a, inverse)[:, :n], r.triu()


def cholesky_qr2(a: torch.Tensor, engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """Two passes for a tall A with the Gram matrix as the engine likes it.

    Where that breaks down, three passes with it in float64, the first one shifted if it must be. Orthogonal
    to the storage precision up to a condition of about ``u**-0.5``, and with the shift up to about ``1/u``
    (paper above, algorithms 2.1 and 4.2).
    """
    first, info = upper_cholesky(engine.gram(a))
    if bool(engine.over_rows.agree((info > 0) | _is_graded(first, a.dtype))):
        return _three_passes(a, engine)
    q = _apply_inverse(a, first, engine)
    second = factor_or_nan(engine.gram(q))
    return _apply_inverse(q, second, engine), (second @ first).to(q.dtype)


def solved_cholesky_qr(a: torch.Tensor, out: torch.Tensor) -> torch.Tensor | None:
    """One pass for a tall A by calls of the library in its precision, after which Q is solved for, in
    ``out``.

    That may be A. Rows of Q are found by substitution, so that the residual is that of reflections whatever
    the condition number; orthogonality is lost to ``u cond(A)^2``. Returns R, or None where a pivot shows
    that orthogonality is lost, or that something is not finite.

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
    # Of the square of a column, beyond those before it.
    left = r.diagonal().real.square() / gram.diagonal().real
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
    return factor_or_nan(gram + shift * torch.eye(n, dtype=gram.dtype, device=gram.device))


def _three_passes(a: torch.Tensor, engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    gram = engine.over_rows.total(double_gram(a))
    r, info = upper_cholesky(gram)
    if bool(engine.over_rows.agree(info > 0)):
        r = shifted_cholesky_r(a, gram, engine.over_rows)
    q = _apply_inverse(a, r, engine)
    for _ in range(2):
        q, step = cholesky_qr(q, engine)
        r = in_double(step) @ r
    return q, r.to(a.dtype)


def _is_graded(r: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Whether the Gram matrix may have lost its small eigenvalues to rounding.

    They are lost below ``u ||G||``; the diagonal of R is up to ``sqrt(n)`` larger than the singular value
    behind it.
    """
    diagonal = r.diagonal().real
    return diagonal.min() < 10 * (len(diagonal) * torch.finfo(dtype).eps) ** 0.5 * diagonal.max()


def upper_cholesky(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper triangular R with ``R^H R = G``, and LAPACK's info, of a matrix or each of a batch.

    The lower factor is what libraries compute without extra copies: R is a view of its conjugate transpose.
    """
    factor, info = lower_factor(gram)
    return factor.mH, info


def factor_or_nan(gram: torch.Tensor) -> torch.Tensor:
    """R of :func:`upper_cholesky`, NaN where a matrix is not numerically positive definite."""
    r, info = upper_cholesky(gram)
    return r.masked_fill((info > 0)[..., None, None], torch.nan)


def _apply_inverse(a: torch.Tensor, r: torch.Tensor, engine: Engine) -> torch.Tensor:
    """``A R^-1`` as a product with the explicit inverse: R is small, and products are what is fast."""
    return engine.gemm(engine.operand(a), engine.operand(upper_inverse(r).to(a.dtype)))


def upper_inverse(r: torch.Tensor) -> torch.Tensor:
    identity = torch.eye(r.shape[0], dtype=r.dtype, device=r.device)
    return torch.linalg.solve_triangular(r.T, identity, upper=False).T
