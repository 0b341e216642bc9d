"""Cholesky factors in double precision: the library's, or by blocks of columns where these are faster.

In a library blocks on the diagonal and products wait for each other. Large matrices have products enough to
hide what takes its columns one after the other.
"""

from __future__ import annotations

import torch

from neula.algorithms.elimination.cholesky import (
    CholeskyFactorization,
    CholeskyOrders,
    CholeskyTuning,
    cholesky,
    library_cholesky,
)
from neula.algorithms.triangular.inverted import InvertedBlocks, InvertedTuning
from neula.engines import FP64, Engine
from neula.kernels.cholesky.cholesky_tiles import factor_inverted


def blocks_pay(a: torch.Tensor, engine: Engine) -> bool:
    """Whether :func:`double_cholesky` overwrites matrices, since it is faster than the library."""
    return len(a) == 1 and a.shape[-1] >= engine.tuning[CholeskyOrders].double_cholesky


def double_cholesky(a: torch.Tensor, engine: Engine) -> CholeskyFactorization:
    """Factors of matrices in double precision, shape (batch, n, n), of which the lower triangles are read.

    Diagonal blocks are the library's, beside the products that update the columns after them.

    Examples
    --------
    >>> from neula.engines import EmulatedEngine
    >>> a = torch.tensor([[[4.0, 0.0], [2.0, 5.0]]], dtype=torch.float64)
    >>> double_cholesky(a, EmulatedEngine()).lower
    tensor([[[2., 0.],
             [1., 2.]]], dtype=torch.float64)
    """
    if not blocks_pay(a, engine):
        return library_cholesky(a)
    block = engine.tuning[CholeskyTuning].double_block
    return cholesky(a, engine.using(FP64), leaf=block, block=block)


def inverted_cholesky(a: torch.Tensor, engine: Engine) -> InvertedBlocks:
    """L of matrices that may turn out not to be definite, to solve with: then solutions are NaN.

    All of L is one block that is inverted where a product takes less time than launches of several do.

    Parameters
    ----------
    a : Tensor, shape (batch, n, n)
        In double precision; the lower triangles are read. May be overwritten where :func:`blocks_pay`.
    """
    n, tuning = a.shape[-1], engine.tuning
    width = n if n <= tuning[InvertedTuning].inverted_whole else tuning[InvertedTuning].width(n)
    if width and n <= tuning[CholeskyOrders].tiled_cholesky and factor_inverted.takes(a, width):
        found = factor_inverted(a, width)
        order, blocks = found.order, InvertedBlocks(found.lower, found.inverses, a.dtype, upper=False)
    else:
        lower, order, _ = double_cholesky(a, engine)
        blocks = InvertedBlocks.from_factor(lower, lower.dtype, upper=False, width=width)
    first = blocks.inverses[0] if len(blocks.inverses) else blocks.t
    # Of a first unknown that is NaN, all that is solved for with both factors becomes NaN.
    first[..., :1, :1].masked_fill_((order > 0)[:, None, None], torch.nan)
    return blocks
