"""The certificate of a Cholesky factorization: its residual, measured along random vectors."""

from __future__ import annotations

from functools import lru_cache

import torch

from neula.certificates.bounds import measurement_error, residual_bound
from neula.certificates.orthogonality import gaussian_probes
from neula.engines import Format
from neula.kernels.few_vectors.triangle import factor_residuals


@lru_cache(maxsize=256)
def cholesky_bound(target: Format, n: int) -> float:
    """Largest accepted ``||A - L L^H||_F / ||A||_F``, for A with unit diagonal: ``3 u (2 + log2 n) + sqrt(n)
    u64``.

    As for QR: a recursion of depth ``log2 n`` rounds each element at every level, where LAPACK, which
    LAPACK's own test pot01 lets have 30 n u, rounds it after a block. The second term is that of the
    measurement, and of sums in double precision.

    A complex product errs by up to ``2 sqrt(2) u`` and a sum by u, as a real one (Higham 2002, section 3.6):
    sums dominate, and the bound is the same.
    """
    return residual_bound(target, n) + measurement_error(n, torch.float64)


def residuals_of_triangles(a: torch.Tensor, lower: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Estimates of ``||D (A - L L^H) D||_F / ||D A D||_F`` from products with random vectors, shape
    (batch,), float64; NaN where ``order`` is that of a leading minor which is not positive, and not 0. Only
    the lower triangles of A are read, and L is zero above its diagonal. The diagonals of D are powers of two
    that bring those of D A D near one. Nothing synchronizes.
    """
    return factor_residuals(a, lower, order, gaussian_probes(a.shape[1], a.device, a.dtype))
