"""The Gram matrix in the arithmetic of an engine, and the R that Cholesky makes of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neula.algorithms.elimination.lu_panels import blocks
from neula.algorithms.orthogonal.cholesky_qr import GRAM_PARTS, factor_or_nan
from neula.engines import Engine


@dataclass(frozen=True)
class GramTuning:
    gram_block: int  # of a block that is one product: narrower ones run below the rate of the matrix unit
    correction_block: int  # of one that corrects Q: narrower ones save less than their launches take
    gram_columns: int  # up to which R comes from a Gram matrix with error correction, not from a QR
    fp16_gram_columns: int  # beyond which one in fp16 is tried before, which takes a few more iterations


def gram(operand: torch.Tensor, engine: Engine, scales: torch.Tensor | None = None) -> torch.Tensor:
    """Lower triangle of ``A^H A``, for A as an operand of the engine; what is above it means nothing.

    If A is not an operand yet, ``scales`` make its columns at most 1.

    Examples
    --------
    >>> import torch
    >>> from neula.engines import EmulatedEngine
    >>> gram(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), EmulatedEngine()).tril()
    tensor([[10.,  0.],
            [14., 20.]])
    """
    n = operand.shape[1]
    width = max(engine.tuning[GramTuning].gram_block, -(-n // GRAM_PARTS))
    return engine.lower_gram(operand, list(blocks(slice(0, n), width)), scales)


def gram_r(operand: torch.Tensor, engine: Engine, scales: torch.Tensor | None = None) -> torch.Tensor:
    """R of ``A^H A = R^H R``: the R of A's QR factorization up to ``u cond(A)^2``, for half its operations.

    Parameters are those of :func:`gram`. NaN where the Gram matrix is not numerically positive definite.
    """
    return factor_or_nan(gram(operand, engine, scales))
