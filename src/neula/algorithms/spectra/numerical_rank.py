"""How many columns of a matrix are independent, by the R of its QR factorization."""

from __future__ import annotations

import math

import numpy as np
import torch

from neula.algorithms.scaling import power_of_two_scales
from neula.algorithms.triangular.inverted import InvertedBlocks
from neula.engines.formats import double_of, in_double
from neula.engines.random_vectors import gaussian
from neula.kernels import scipy_linalg
from neula.kernels.magnitudes import two_norms
from neula.kernels.precision import exact_matmul

EXACT_COLUMNS = 1024
"""Up to this order all singular values are computed where the rank is in doubt: of larger matrices that takes
longer than the QR, on a GPU many times as long."""

SMALL = 32
"""Up to this order the inverse takes less time than inverse iteration, a step of which is a few calls."""

_STEPS = 3

SAFETY = 4.0
"""After three steps from a random direction the smallest singular value is overestimated by the tenth root of
n at most, if the direction has the usual component ``1/sqrt(n)`` of its singular vector."""


def rank_tolerance(dtype: torch.dtype, m: int, n: int) -> float:
    """Singular values relative to the largest, with columns of norm 1, up to which nothing is known."""
    size, dtype = max(m, n), dtype.to_real()
    if dtype == torch.float64:
        return size * torch.finfo(torch.float64).eps
    return max(math.sqrt(size) * torch.finfo(torch.float32).eps, torch.finfo(dtype).eps)


def is_invertible(r: np.ndarray, rcond: float, error: float = 0.0, *, unit: bool = False) -> bool:
    """Whether the inverse of one triangle R shows that all singular values count, as of
    :func:`numerical_ranks`; ``unit``: of columns divided by their norms.
    """
    invert = scipy_linalg.lapack.ztrtri if r.dtype.kind == "c" else scipy_linalg.lapack.dtrtri
    inverse, singular = invert(r)
    size = norms = np.sqrt(np.einsum("ij,ij->j", r, r.conj()).real)
    if unit:
        inverse, size = inverse * norms[:, None], np.ones_like(norms)
    # The reciprocal of the norm is at most the smallest singular value, the other at least the largest.
    limit = max(rcond * math.sqrt(size @ size), error)
    return not singular and SAFETY * limit * math.sqrt(np.vdot(inverse, inverse).real) < 1


def columns_of_norm_one(r: torch.Tensor) -> torch.Tensor:
    """R, shape (batch, k, n), with its columns divided by their norms; zero columns as they are."""
    # First by powers of two, since squares may be out of range.
    scaled = r * power_of_two_scales(r.abs().amax(1))[:, None]
    norms = two_norms(scaled, 1, keepdim=True)
    return scaled / torch.where(norms > 0, norms, 1.0)


def numerical_ranks(
    r: torch.Tensor,
    rcond: float,
    error: torch.Tensor | None = None,
    *,
    exact: bool = True,
    smallest: torch.Tensor | None = None,
) -> torch.Tensor:
    """Number of singular values that count, of each matrix of a batch.

    The smallest one is estimated first: ``n^2`` operations for a matrix that is well-conditioned. That of the
    leading triangle is smaller than those of a wide R.

    ``r``, shape (batch, k, n): upper triangular, ``1 <= k <= n``, float32 or float64; the largest elements
    near 1. ``rcond``: singular values of at most ``rcond`` times the largest do not count. ``error``, shape
    (batch,): nor do those of at most this size. ``exact``: whether all singular values are computed where
    there is doubt, also of more than :data:`EXACT_COLUMNS` columns. If not, a rank of ``k - 1`` stands for
    any below k there. ``smallest``, shape (batch,): estimates of the smallest singular values of the leading
    triangles, where they are known. Returns shape (batch,): int64; k for what is not finite.

    Examples
    --------
    >>> import torch
    >>> numerical_ranks(torch.tensor([[[1.0, 1.0], [0.0, 1.0]], [[1.0, 1.0], [0.0, 1e-9]]]), 1e-7)
    tensor([2, 1])
    """
    count, k, _ = r.shape
    ranks = torch.full((count,), k, dtype=torch.int64, device=r.device)
    error = torch.zeros_like(ranks) if error is None else error
    if smallest is None:
        smallest = (_lower_bounds if k <= SMALL else smallest_singular_values)(r[..., :k])
    # No largest singular value exceeds the Frobenius norm, which takes one pass; NaN is in no doubt.
    doubtful = smallest <= SAFETY * torch.maximum(rcond * torch.linalg.matrix_norm(r), error)
    which = doubtful.nonzero()[:, 0]
    if len(which) == 0:
        return ranks
    r, smallest, error = r[which], smallest[which], error[which]
    limit = torch.maximum(rcond * largest_singular_values(r), error)
    if k > EXACT_COLUMNS and not exact:
        ranks[which] -= (smallest <= limit).long()
        return ranks
    doubtful = smallest <= SAFETY * limit
    s = torch.linalg.svdvals(in_double(r[doubtful]))
    ranks[which[doubtful]] = (s > torch.maximum(rcond * s[:, 0], error[doubtful])[:, None]).sum(1)
    return ranks


def largest_singular_values(r: torch.Tensor) -> torch.Tensor:
    """Estimates from below by the power method, usually within a few percent, shape (batch,)."""
    x = _direction(r.shape[2], r)
    for _ in range(_STEPS):
        y = _unit(exact_matmul(r, x))[0]
        x, size = _unit(exact_matmul(r.mH, y))
    return size[:, 0, 0]


def smallest_singular_values(r: torch.Tensor, width: int = 0) -> torch.Tensor:
    """Estimates from above by inverse iteration, the reciprocals of ``||R^-T x||`` for unit vectors x, shape
    (batch,).

    Zero for an upper triangular R that is singular, or so nearly that numbers overflow. Diagonal blocks of
    order ``width`` are inverted, where that takes less time than substitution. Errors of inverses of
    ill-conditioned blocks leave their size as it is.
    """
    count, x = len(r), _direction(r.shape[2], r)
    # A single matrix is multiplied with vectors at the speed of memory.
    r, x = (r[0], x[0]) if count == 1 else (r, x.expand(count, -1, -1))
    blocks = InvertedBlocks.from_factor(r, r.dtype, upper=True, width=width)
    for step in range(_STEPS):
        y, size = _unit(blocks.mH.solved(x))
        if step < _STEPS - 1:
            x = _unit(blocks.solved(y))[0]
    regular = size.isfinite() & (size > 0)
    return torch.where(regular, size.reciprocal(), 0.0).reshape(count)


def _lower_bounds(r: torch.Tensor) -> torch.Tensor:
    """``1 / ||R^-1||_F``, which is at most the smallest singular value; 0 where that is 0."""
    identity = torch.eye(r.shape[2], dtype=r.dtype, device=r.device).expand_as(r)
    norms = torch.linalg.matrix_norm(torch.linalg.solve_triangular(r, identity, upper=True))
    return norms.reciprocal().nan_to_num(0.0)


def _unit(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors of norm 1, and the norms that they had; a zero vector as it is."""
    size = two_norms(x, -2, keepdim=True)
    return x / size.clamp_min(torch.finfo(x.dtype).tiny), size


def _direction(n: int, like: torch.Tensor) -> torch.Tensor:
    """A unit vector, fixed, that no matrix is built to avoid; shape (1, n, 1)."""
    x = gaussian(n, 1, double_of(like.dtype), like.device, seed=n)
    return _unit(x[None])[0].to(like)
