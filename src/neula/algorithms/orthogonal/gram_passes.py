"""Cholesky QR of matrices (batch, m, n) in passes in double precision, whatever the precision of A, without
synchronizing.

A few large products and small factorizations, where panels are hundreds of launches. One pass loses
orthogonality with the square of the condition number, two do not up to some 1e7 (Yamamoto, Nakatsukasa,
Yanagisawa, Fukaya, "Roundoff error analysis of the CholeskyQR2 algorithm", Electron. Trans. Numer. Anal. 44,
2015), and three with a shift in the first one up to some 1e13 (the same with Kannan, "Shifted Cholesky QR for
computing the QR factorization of ill-conditioned matrices", SIAM J. Sci. Comput. 42, 2020).
"""

from __future__ import annotations

import torch

from neula.algorithms.elimination.cholesky import inverted_cholesky
from neula.algorithms.orthogonal.cholesky_qr import factor_or_nan
from neula.algorithms.orthogonal.r_only import lower_gram
from neula.algorithms.triangular.inverted import InvertedBlocks
from neula.engines import FP64, Engine
from neula.kernels.precision import exact_matmul


def gram_passes(
    a: torch.Tensor, engine: Engine, *, passes: int, exact: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and R of tall matrices in double precision, with columns of one size; NaN where a Gram matrix is not
    definite.

    If ``exact``, rows of Q are found by substitution until they are nearly orthonormal, which leaves the
    residual of reflections. A product with an inverse leaves the condition number times as much: less than a
    coarser format rounds.
    """
    return _more_passes(a, None, engine, passes, exact=exact)


def passes_if_definite(a: torch.Tensor, engine: Engine) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Two passes by products for one matrix; None where the host sees that its Gram matrix has no factor."""
    factor = inverted_cholesky(lower_gram(a), engine)
    first = factor.inverses if len(factor.inverses) else factor.t
    if bool(first.flatten()[:1].isnan()):
        return None
    return _more_passes(*_by_factor(a, factor), engine, 1, exact=False)


def shifted_passes(a: torch.Tensor, engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
    """QR by three passes of Cholesky QR and substitution, the first Gram matrix being shifted.

    By what the rounding errors of Gram matrix and factor amount to. These grow like the roots of the sizes
    (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41,
    2019), where a shift by their bounds would make the next pass harder.
    """
    gram = lower_gram(a)
    gram.diagonal(dim1=1, dim2=2).add_(_shift(gram, a.shape[1])[:, None])
    return _more_passes(*_substituted(a, factor_or_nan(gram)), engine, 2, exact=True)


def _more_passes(
    q: torch.Tensor, r: torch.Tensor | None, engine: Engine, passes: int, *, exact: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Further passes of Cholesky QR; if requested, all except the last by substitution."""
    for left in reversed(range(passes)):
        gram = lower_gram(q)
        if exact and left:
            q, step = _substituted(q, factor_or_nan(gram))
        else:
            q, step = _by_factor(q, inverted_cholesky(gram, engine))
        r = step if r is None else exact_matmul(step, r)
    assert r is not None
    return q, r


def _substituted(q: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.linalg.solve_triangular(r, q, upper=True, left=False), r


def _by_factor(q: torch.Tensor, factor: InvertedBlocks) -> tuple[torch.Tensor, torch.Tensor]:
    q = factor.solved(q.mH).mH
    return q, factor.t.tril().mH.masked_fill(q[:, :1, :1].isnan(), torch.nan)


def _shift(gram: torch.Tensor, m: int) -> torch.Tensor:
    """The s of each Gram matrix, shape (batch,)."""
    sizes = gram.diagonal(dim1=1, dim2=2).real.sum(1)
    return 11 * (m**0.5 + gram.shape[-1] ** 0.5) * FP64.u * sizes
