"""Partial isometries from the singular value decomposition: it takes longest, and always works."""

from __future__ import annotations

import torch

from neula.engines.reduction import HERE, Reduction
from neula.kernels.polar.svd import converged_svd
from neula.kernels.precision import exact_matmul


def isometry(
    wide: torch.Tensor,
    cutoff: float,
    *,
    unknown: float = 0.0,
    completion: bool = False,
    over_rows: Reduction = HERE,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``W V^H`` of ``W S V^H``, without the vectors of singular values that count as zero.

    Matrices, shape (batch, k, m) with k <= m, hold neither NaN nor Inf; ``over_rows`` is that of their
    columns. Singular values up to a part ``cutoff`` of the largest count as zero; their vectors are taken all
    the same for a ``completion``. Up to the part ``unknown`` they may be zero or not. Returns the factor, how
    many do not count as zero, and whether one is unknown, each of shape (batch,).

    Examples
    --------
    >>> import torch
    >>> from neula.algorithms.polar.singular import isometry
    >>> isometry(torch.tensor([[[3.0, 0.0], [0.0, 0.0]]]), 1e-6)
    (tensor([[[1., 0.],
             [0., 0.]]]), tensor([1]), tensor([False]))
    """
    # MKL's reflectors of subnormal columns in complex64 are NaN: what is left of matrices of low rank.
    work = wide.to(torch.complex128) if wide.dtype == torch.complex64 and wide.is_cpu else wide
    q, r = over_rows.merged(work.mH, torch.linalg.qr)
    v, s, wh = converged_svd(r)
    counts = (s > cutoff * s[:, :1]) & (s > 0)
    doubtful = ((s <= unknown * s[:, :1]) & (s > 0)).any(1)
    kept = torch.ones_like(counts) if completion else counts
    left = wh.mH * kept[:, None, :]
    if s.dtype == torch.float64:  # in float32 LAPACK's tolerance is a tenth of that, in units of rounding
        left = left + exact_matmul(left, _turn(r, v, s, wh.mH)) * kept[:, None, :]
        small = _orthonormal(exact_matmul(left, v.mH))
    else:
        small = exact_matmul(left, v.mH)
    small, counts, doubtful = over_rows.agreed(small, counts, doubtful)
    return exact_matmul(small, q.mH).to(wide.dtype), counts.sum(1), doubtful


def _turn(r: torch.Tensor, v: torch.Tensor, s: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The small skew-Hermitian Z for which ``W (I + Z) V^H`` is the polar factor of ``R^H`` to first order.

    LAPACK's iteration takes elements beside the diagonal for zero from ``u^(-1/8) u`` on (TOLMUL of DBDSQR),
    in float64 99 u, so that ``W^H R^H V = S + E`` with an E of that size. A polar factor leaves a Hermitian
    ``(S + E) (I - Z)``: ``S Z + Z S = E - E^H``. Where Z is not below the root of u (zero by zero is not,
    either) it is left out, or ``I + Z`` would not be orthonormal; singular values are too small there for E
    to count.
    """
    core = exact_matmul(v.mH, exact_matmul(r, w))
    z = (core.mH - core) / (s[:, :, None] + s[:, None, :])
    most = (torch.finfo(s.dtype).eps / 2) ** 0.5 / s.shape[1]
    return torch.where(z.abs() <= most, z, 0.0)


def _orthonormal(x: torch.Tensor) -> torch.Tensor:
    """Newton's and Schulz's step: V and W are orthonormal except for rounding errors, which would count
    twice.
    """
    return x + (x - exact_matmul(exact_matmul(x, x.mH), x)) / 2
