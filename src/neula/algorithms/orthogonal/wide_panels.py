"""Cholesky QR of panels of some hundred columns, as accurate as in float32, with one message for each.

Over processes a panel waits for the others, so there should be few of them. Its Gram matrix is too large for
the kernel that factorizes 128 columns; blocks of so many are factorized by it one after the other. The work
before and after the message is replayed from two CUDA graphs without the message itself: NCCL does not end a
communicator while there is a graph that uses it.
"""

from __future__ import annotations

import torch

from neula.algorithms.elimination.lu_panels import blocks
from neula.engines import Engine
from neula.kernels.cholesky.cholesky import MAX_COLUMNS, CholeskyFactors, cholesky_inverse
from neula.kernels.precision import exact_matmul, exactly
from neula.kernels.products.gemm import corrected_gemm, corrected_gram
from neula.kernels.qr.panel_gram import LOST


def wide_cholesky_qr32_in_place(
    a: torch.Tensor, r: torch.Tensor, engine: Engine, low: torch.Tensor | None = None
) -> None:
    """Q in place of a float32 A, and rounded to a narrower type in ``low``.

    Orthogonal to ``u cond(A)^2``; beyond a condition of about ``u**-0.5`` columns of Q may be too short, or
    NaN.

    Parameters
    ----------
    a : Tensor, shape (m, n)
        Column-major.
    r : Tensor, shape (n, n)
        Room for R.
    low : Tensor, shape (m, n), optional
        An operand of the engine, column-major.
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

    Parameters
    ----------
    gram : Tensor, shape (n, n)
        float32, of which the upper triangle is read.
    width : int
        Of the blocks.

    Examples
    --------
    >>> import torch
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
    times what is beside both times that of the other, with opposite sign. No block waits for it.
    """
    n = len(r)
    while width < n:
        for start in range(0, n - width, 2 * width):
            left = slice(start, start + width)
            right = slice(left.stop, min(left.stop + width, n))
            beside = exact_matmul(r[left, right], inverse[right, right])
            exactly(torch.mm, inverse[left, left], beside, out=inverse[left, right]).neg_()
        width *= 2
