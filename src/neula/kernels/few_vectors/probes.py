"""Errors of many small QR factorizations at once, measured with random vectors.

Measurements of QR certificates, for a whole batch in two launches.

The kernel multiplies float32 matrices in float32, in sums that branch like trees: random roundings at each
level of a sum of n terms add ``sqrt(1 + log2 n) u / sqrt(3)`` to the relative error of a product. With three
products in a residual and two in an orthogonality, the measures err by less than ``4 u`` for n up to 1024, a
fifth of the least bound for matrices of 32 columns. Such errors are not correlated with those they measure:
they make a factorization look worse rather than better.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.magnitudes import two_norms
from neula.kernels.precision import exact_matmul

VECTORS = 4
"""Random vectors: the kernel has this number written out."""

BLOCK = {"cpu": 1 << 18, "cuda": 1 << 25}
"""Elements that plain torch converts to double precision and multiplies at a time: what a CPU has in its
cache, which takes a third of the time for 262144 x 64 on two cores, and what fills a GPU."""


@trial("The kernel of the certificates", "plain torch takes its place, many times slower")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, 1, device=device, dtype=torch.float64)
    vectors = one[0].expand(1, VECTORS)
    probe_errors.kernel(one, one, one, one[0], vectors, vectors)


@kernel("neula.kernels.few_vectors.probes_triton:probe_errors_triton", trial=_tried)
def probe_errors(
    a: torch.Tensor,
    q: torch.Tensor,
    r: torch.Tensor,
    scales: torch.Tensor,
    g: torch.Tensor,
    h: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Residual and orthogonality of each factorization, along random vectors.

    With ``D`` the diagonal matrix of the scales of a matrix, these are ``||A D G - Q (R D G)||_F``,
    ``||A D G||_F``, ``||Z||_F`` and ``||Z^H Z||_F^(1/2)`` for ``Z = Q^H (Q H) - H``; the last one is at least
    ``||Z||_2``, and at most 1.42 times that. On a GPU a Triton kernel computes them.

    Parameters
    ----------
    a : Tensor, shape (batch, m, n)
        Of any floating dtype and any strides, as are the others.
    q : Tensor, shape (batch, m, k)
    r : Tensor, shape (batch, k, n)
    scales : Tensor, shape (batch, n)
        Column scales.
    g : Tensor, shape (n, 4)
        In double precision, complex if A is.
    h : Tensor, shape (k, 4)
        Likewise.

    Returns
    -------
    residual, size, orthogonality, spectral : Tensor, shape (batch,)
        float32 (by the kernel, of matrices that are not float64) or float64; NaN or Inf where a matrix or its
        factors are not finite. Others are not affected.

    Examples
    --------
    >>> import torch
    >>> q, r = torch.linalg.qr(torch.tensor([[[3.0, 5.0], [4.0, 0.0]]], dtype=torch.float64))
    >>> g = torch.ones(2, 4, dtype=torch.float64)
    >>> residual, size, orthogonality, _ = probe_errors(q @ r, q, r, torch.ones(1, 2), g, g)
    >>> bool(residual < 1e-14 * size), bool(orthogonality < 1e-14)
    (True, True)
    """
    m, n = a.shape[1:]
    together = max(1, BLOCK[a.device.type] // (m * n))
    if len(a) <= together:
        return _errors(a, q, r, scales, g, h)
    groups = zip(*(x.split(together) for x in (a, q, r, scales)), strict=True)
    measures = [torch.stack(_errors(a, q, r, scales, g, h)) for a, q, r, scales in groups]
    residual, size, orthogonality, spectral = torch.cat(measures, 1)
    return residual, size, orthogonality, spectral


def _errors(
    a: torch.Tensor,
    q: torch.Tensor,
    r: torch.Tensor,
    scales: torch.Tensor,
    g: torch.Tensor,
    h: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Errors along the probes for a few matrices, by blocks of rows.

    Vectors are rows: products of a few rows take a third of the time of those of a few columns in MKL.
    """
    rows = max(1, BLOCK[a.device.type] // a.shape[2])
    g, h = scales.double()[:, None] * g.mT, h.mT.contiguous()
    rg = g @ r.mT.to(g.dtype)
    loss, residuals, images = -h, [], []
    for x, y in zip(a.split(rows, 1), q.split(rows, 1), strict=True):
        wide_q = y.to(g.dtype)
        image = g @ x.to(g.dtype).mT
        residuals.append(norms(image - rg @ wide_q.mT))
        images.append(norms(image))
        loss = ((h @ wide_q.mT).conj() @ wide_q).conj() + loss
    return _together(residuals), _together(images), norms(loss), spectral_norms(loss.mT)


def _together(norms: list[torch.Tensor]) -> torch.Tensor:
    """The norm of a matrix from those of its blocks."""
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), dim=0)


def norms(x: torch.Tensor) -> torch.Tensor:
    """Frobenius norm of each matrix of a batch."""
    return two_norms(x, -2, -1)


def spectral_norms(x: torch.Tensor) -> torch.Tensor:
    """``||X^H X||_F^(1/2)`` of each matrix of n columns: its 2-norm, or up to ``n^(1/4)`` times that."""
    return norms(exact_matmul(x.mH, x)).sqrt()
