"""QR of tall and skinny matrices: the tree of Householder factorizations, and one pass of Cholesky QR.

Ootomo and Yokota, "TSQR on TensorCores with error correction" (2021), after Demmel, Grigori, Hoemmen and
Langou, "Communication-optimal parallel and sequential QR and LU factorizations", SIAM J. Sci. Comput. 34
(2012): tiles of 256 rows are factorized on their own, their triangular factors are stacked and factorized in
turn, up a tree, and the orthogonal factors are multiplied back down. Householder reflections are orthogonal
to a small multiple of the unit roundoff whatever the condition of A.

Where A is well conditioned, its Gram matrix has R, and ``Q = A R^-1``: two passes over A instead of a tree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from neula.algorithms.orthogonal.cholesky_qr import factor_or_nan, upper_inverse
from neula.algorithms.trace import TraceEvent, Tracer
from neula.engines.formats import in_double
from neula.engines.reduction import HERE, Reduction
from neula.kernels.cholesky.cholesky import cholesky_inverse
from neula.kernels.phases import phases, with_real_diagonal
from neula.kernels.qr.householder import MAX_HEIGHT, Product, TileReflectors, apply_tiles, factor_tiles
from neula.kernels.qr.tall import half_gram, tall_gram, tall_product

RAISED = 2.0**13
"""Factor of Q on its way down the tree: its elements shrink at each level, and would become subnormal in
fp16. A column of this length, after the reflectors, still fits.
"""


# item: T TSQR; T tiles
def tsqr(
    a: torch.Tensor,
    product: str | Product,
    *,
    tile_rows: int | None = None,
    reflections: Product | None = None,
    trace: Tracer | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """QR of each matrix of a batch by a tree of Householder factorizations.

    Parameters
    ----------
    a : Tensor, shape (batch, m, n), m >= n
        At least in single precision, scaled so that norms of columns are in the range of the product's format
        and their squares in that of the dtype.
    product : {"tf32", "tf32_cor", "fp16", "fp16_cor"} or callable
        The product for block reflectors (:func:`neula.kernels.qr.householder.factor_tiles`).
    tile_rows : int, optional
        Rows of a tile, at least 2n; 256 in the slides, by default 512, or 2n if that is more.
    reflections : callable, optional
        What multiplies a block by a vector: in the slides the product, by default float32.
    trace : callable, optional
        Called with each level: its tiles, as a panel of three dimensions, and their R, one upon the other.

    Returns
    -------
    Q : Tensor, shape (batch, m, n)
    R : Tensor, shape (batch, n, n)
        Upper triangular with a nonnegative diagonal.

    Examples
    --------
    >>> import torch
    >>> q, r = tsqr(torch.eye(700, 3)[None], torch.matmul)
    >>> torch.allclose(q[0], torch.eye(700, 3)), torch.allclose(r[0], torch.eye(3))
    (True, True)
    """
    n = a.shape[2]
    rows = max(MAX_HEIGHT, 2 * n) if tile_rows is None else tile_rows
    if rows < 2 * n:
        raise ValueError(f"tiles of {rows} rows are too short for a tree: take tile_rows >= {2 * n}")
    levels: list[TileReflectors] = []
    r = a
    while not levels or r.shape[1] > n:
        height = min(rows, r.shape[1])
        if trace is not None:
            tiles = len(a) * -(-r.shape[1] // height)
            trace(TraceEvent("panel", shape=(tiles, height, n), value=f"level {len(levels) + 1}"))
        reflectors, r = factor_tiles(r, height, product, *([reflections] if reflections else []))
        levels.append(reflectors)
        if trace is not None:
            trace(TraceEvent("block of R", shape=tuple(r.shape[1:]), value=r.clone()))
    turn = phases(r.diagonal(dim1=1, dim2=2))
    q = torch.diag_embed(turn * RAISED)
    for reflectors in reversed(levels):
        q = apply_tiles(reflectors, q, product)
    return q.div_(RAISED), with_real_diagonal(r * turn.conj()[..., None])


def cholesky_tsqr(a: torch.Tensor, over_rows: Reduction = HERE) -> tuple[torch.Tensor, torch.Tensor]:
    """One pass of Cholesky QR for a tall A with products as accurate as those of float32; without
    synchronizing.

    Orthogonal to ``u cond(A)^2``; NaN where the Gram matrix is not positive definite. A is at least in single
    precision, and squares of its elements should neither overflow nor underflow. R is in double precision.
    """
    gram = over_rows.total(tall_gram(a))
    r = factor_or_nan(gram)
    return tall_product(a, upper_inverse(r), gram.diagonal().real.sqrt()), r


def cholesky_tsqr32(a: torch.Tensor, over_rows: Reduction = HERE) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`cholesky_tsqr` of a float32 matrix, with R and its inverse in float32: on a GPU one kernel.

    Where A is too ill-conditioned some columns of Q are too short, and ``A = Q R`` all the same
    (``neula.kernels.cholesky.cholesky``); or Q and R are NaN, where that kernel does not run.
    """
    factors = cholesky_inverse(over_rows.total(half_gram(a)))
    return tall_product(a, factors.inverse, factors.norms), factors.r


OnePass = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def cholesky_tsqr2(a: torch.Tensor, once: OnePass = cholesky_tsqr) -> tuple[torch.Tensor, torch.Tensor]:
    """One of the above twice: orthogonal to ``u`` up to a condition of about ``u**-0.5``."""
    q, first = once(a)
    q, second = once(q)
    return q, in_double(second) @ in_double(first)
