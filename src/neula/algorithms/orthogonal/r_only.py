"""R of tall matrices, one or a batch, without Q: what preconditions least squares.

Rows may be spread over processes; an R is the same on all of them.
"""

from __future__ import annotations

import torch

from neula.algorithms.elimination.lu_panels import blocks
from neula.algorithms.orthogonal.cholesky_qr import factor_or_nan, upper_cholesky
from neula.algorithms.scaling import power_of_two_scales
from neula.algorithms.spectra.gram import gram_r
from neula.engines import FP64, Engine, cublas
from neula.engines.formats import in_double, matching_dtype
from neula.engines.random_vectors import gaussian
from neula.engines.reduction import HERE, Reduction
from neula.kernels.magnitudes import two_norms
from neula.kernels.triangular_inverse import triangular_inverse

HALVED = 2048
"""Columns from which on only the lower triangle of a Gram matrix is computed, in blocks of an eighth of them:
nine sixteenths of the operations, in products that are still large."""

QUARTERED = 160
"""Columns from which on a CPU computes only the lower triangle, in blocks of a quarter: five eighths of the
operations (one core, 1000 x 400: 6.3 and 8.6 ms)."""

SAMPLED = 1 << 14  # rows, at least, that show how large the elements of a column are

HEADROOM = 256.0
"""By how much others may be larger than those, and four times more: corrected products have that range."""

INVERSE_STEPS = 8
"""Of inverse iteration: they take out singular values beyond six times the root of the shift up to 1e-12."""

MAX_SHIFT = 1e-3  # part of ``||A||_F^2``, with normalized columns, that is added to a Gram matrix at most


def cholesky_r(
    a: torch.Tensor, over_rows: Reduction = HERE, *, gram: torch.Tensor | None = None
) -> torch.Tensor:
    """R of the normal equations: accurate to ``u cond(A)^2`` relative to its smallest singular value.

    One product, unless ``gram``, :func:`lower_gram` of all rows, is known, and one small factorization. NaN
    where the Gram matrix is not positive definite. A has the shape (batch, m, n).
    """
    return factor_or_nan(over_rows.total(lower_gram(a)) if gram is None else gram)


def sampled_max(a: torch.Tensor) -> torch.Tensor:
    """A probable upper bound on the largest magnitude in each column of a tall matrix, from a sample."""
    some = a[:: max(1, len(a) // SAMPLED)]
    largest = torch.linalg.vector_norm(in_double(some), torch.inf, dim=0)
    return largest if len(some) == len(a) else HEADROOM * largest


def low_cholesky_r(
    a: torch.Tensor, over_rows: Reduction = HERE, *, engine: Engine, sampled: bool = False
) -> torch.Tensor:
    """R of a single matrix, shape (1, m, n), by a Gram matrix in the arithmetic of an engine, in double
    precision.

    Its columns are scaled as they are rounded. If ``sampled``, some rows show how large its elements are, for
    a pass over it less; where others exceed :func:`sampled_max` by a factor of two or more, R may be NaN.
    """
    matrix = a[0]
    column_max = sampled_max(matrix) if sampled else engine.column_max(matrix).double()
    scales = power_of_two_scales(over_rows.largest(column_max))
    return (in_double(over_rows.agree_triangle(gram_r(matrix, engine, scales))) / scales)[None]


def lower_gram(a: torch.Tensor) -> torch.Tensor:
    """``A^H A`` of each matrix of a batch, of which only the lower triangle is to be read: products do not
    know that it is symmetric.

    >>> lower_gram(torch.tensor([[[1.0, 2.0], [0.0, 1.0]]])).tolist()
    [[[1.0, 2.0], [2.0, 5.0]]]
    """
    n = a.shape[-1]
    if cublas.squares(a):
        return cublas.lower_square(a[0])[None]
    parts = 8 if n >= HALVED else 4 if a.is_cpu and n >= QUARTERED else 1
    if parts == 1:
        return a.mH @ a
    gram = a.new_zeros(len(a), n, n)
    for k in blocks(slice(0, n), -(-n // parts)):
        for one, out in zip(a, gram, strict=True):  # a product of batches writes to memory of its own first
            torch.mm(one[:, k].mH, one[:, : k.stop], out=out[k, : k.stop])
    return gram


def shifted_cholesky3_r(
    a: torch.Tensor,
    over_rows: Reduction = HERE,
    *,
    gram: torch.Tensor | None = None,
    rcond: float | None = None,
) -> torch.Tensor:
    """R by Cholesky QR in three passes, the first one shifted: as good as that of Householder reflections.

    Fukaya, Kannan, Nakatsukasa, Yamamoto, Yanagisawa, "Shifted Cholesky QR for computing the QR factorization
    of ill-conditioned matrices", SIAM J. Sci. Comput. 42, 2020: large products alone, for condition numbers
    up to about 1e14. NaN beyond.

    A, shape (batch, m, n), is float64; ``gram`` is :func:`lower_gram` of all rows, where it is known. With an
    ``rcond`` the host may wait for a check of a single A: if a vector is found that shows the smallest
    singular value of A with normalized columns to be below this, or the second pass breaks down, R is NaN,
    and there is no third one.
    """
    m, n = over_rows.count(a.shape[1]), a.shape[2]
    gram = over_rows.total(lower_gram(a)) if gram is None else gram.clone()
    sizes = gram.diagonal(dim1=1, dim2=2).real.sqrt()
    shift = min(11 * (m * n + n * (n + 1)) * FP64.u, MAX_SHIFT)
    diagonal = gram.diagonal(dim1=1, dim2=2)
    diagonal *= 1 + n * shift  # of columns with norm 1: their units do not matter
    r = step = upper_cholesky(gram)[0]
    inverse = triangular_inverse(step, upper=True)
    shortest = sizes.new_zeros(1) if rcond is None else _shortest(a, inverse, sizes[..., None], over_rows)
    for passes in (2, 3):
        a = a @ inverse
        step = cholesky_r(a, over_rows)
        r = step @ r
        if passes == 3:
            break
        # The host has launched two passes when it waits.
        if rcond is not None and bool(over_rows.agree(~(shortest >= rcond) | step[0, 0, :1].isnan())):
            return r.fill_(torch.nan)
        inverse = triangular_inverse(step, upper=True)
    return r


def _shortest(
    a: torch.Tensor, inverse: torch.Tensor, sizes: torch.Tensor, over_rows: Reduction
) -> torch.Tensor:
    """``||B y|| / ||y||`` for ``B = A D^-1`` and a y that makes it small, shape (1,).

    It is not below the least singular value.

    Inverse iteration with ``(B^H B + s I)^-1 = D R^-1 R^-H D`` takes out what belongs to singular values
    beyond the root of s.
    """
    y, inverse = gaussian(a.shape[2], 1, a.dtype, a.device, seed=1)[None], sizes * inverse
    for _ in range(INVERSE_STEPS):
        y = inverse @ (inverse.mH @ y)
    return over_rows.norms((a @ (y / sizes))[0, :, 0])[0].reshape(1) / two_norms(y)


def cholesky32_r(a: torch.Tensor, over_rows: Reduction = HERE) -> torch.Tensor:
    """R from a Gram matrix in float32: accurate to ``2^-24 cond(A)^2``, in half the time."""
    return in_double(cholesky_r(a.to(matching_dtype(torch.float32, a.dtype)), over_rows))


def householder_r(a: torch.Tensor, over_rows: Reduction = HERE) -> torch.Tensor:
    """R by the library's Householder reflections, in the precision of A, shape (batch, m, n)."""
    return over_rows.merged_r(a, lambda rows: torch.linalg.qr(rows, mode="r")[1])
