"""The certificate of a Cholesky factorization: its residual, measured along random vectors."""

from __future__ import annotations

import torch

from neula.certificates.bounds import measurement_error, residual_bound
from neula.certificates.probes import gaussian_probes
from neula.engines import Format
from neula.kernels.precision import exact_matmul
from neula.kernels.thin import thin_product
from neula.kernels.triangle import triangle_product


def cholesky_bound(target: Format, n: int) -> float:
    """What ``||A - L L^T||_F / ||A||_F`` may be, A having a diagonal of ones: ``3 u (2 + log2 n) + sqrt(n)
    u64``.

    As for QR: a recursion of depth ``log2 n`` rounds each element at every level, where LAPACK, which
    LAPACK's own test pot01 lets have 30 n u, rounds it after a block. The second term is that of the
    measurement, and of sums in double precision.
    """
    return residual_bound(target, n) + measurement_error(n, torch.float64)


def image_of(a: torch.Tensor) -> torch.Tensor:
    """``A G`` for the random vectors G, shape (batch, n, probes), float64: what a certificate knows of A.

    Parameters
    ----------
    a : Tensor, shape (batch, n, n)
        Symmetric, both triangles, with a diagonal near one.
    """
    return _times_probes(a)


def cholesky_measures(image: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """Norms of ``A G - L L^T G`` and of ``A G``, shape (2, batch), without synchronizing.

    Parameters
    ----------
    image : Tensor, shape (batch, n, probes)
        From :func:`image_of`.
    lower : Tensor, shape (batch, n, n)
        Zero above the diagonal.
    """
    below = _times_probes(lower.mT)
    if len(lower) == 1:
        return _norms(image, thin_product(lower[0], below[0])[None])
    return _norms(image, exact_matmul(lower.to(below.dtype), below))


def measures_of_triangles(a: torch.Tensor, lower: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The same for ``D A D`` and ``D L``, of which half is read.

    Parameters
    ----------
    a : Tensor, shape (batch, n, n)
        Only the lower triangles count.
    lower : Tensor, shape (batch, n, n)
        Zero above the diagonal.
    scales : Tensor, shape (batch, n)
        The diagonals of D, float64.
    """
    d = scales[..., None]
    x = gaussian_probes(a.shape[1], a.device) * d
    below = triangle_product(lower, x, "transposed")
    image, product = triangle_product(a, x, "symmetric"), triangle_product(lower, below, "lower")
    return _norms(d * image, d * product)


def _norms(image: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    norm = torch.linalg.matrix_norm
    return torch.stack([norm(image - product), norm(image)])


def _times_probes(a: torch.Tensor) -> torch.Tensor:
    """Products with the same vectors for all of a batch: those of one tall matrix, where rows are
    neighbours.
    """
    count, n, _ = a.shape
    g = gaussian_probes(n, a.device)
    if count > 1 and a.dtype != g.dtype:
        return thin_product(a.reshape(count * n, n), g).view(count, n, -1)
    return thin_product(a[0], g)[None] if count == 1 else exact_matmul(a, g)
