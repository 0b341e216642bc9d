"""Errors of many small QR factorizations at once, measured with random vectors.

What the certificate of a QR factorization needs, for a whole batch in two launches.

The kernel multiplies float32 matrices in float32, in sums that branch like trees: random roundings at each
level of a sum of n terms add ``sqrt(1 + log2 n) u / sqrt(3)`` to the relative error of a product. With three
products in a residual and two in an orthogonality, the measures err by less than ``4 u`` for n up to 1024, a
fifth of the least bound for matrices of 32 columns. Such errors are not correlated with those they measure:
they make a factorization look worse rather than better.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from neula.kernels.availability import can_run

VECTORS = 4
"""Random vectors: the kernel has this number written out."""


def probe_errors(
    a: torch.Tensor,
    q: torch.Tensor,
    r: torch.Tensor,
    scales: torch.Tensor,
    g: torch.Tensor,
    h: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Residual and orthogonality of each factorization, along random vectors.

    With ``D`` the diagonal matrix of the scales of a matrix, these are ``||A D G - Q (R D G)||_F``,
    ``||A D G||_F`` and ``||Q^T (Q H) - H||_F``. On a GPU by a Triton kernel, elsewhere, and where Triton is
    missing, by :func:`probe_errors_reference`.

    Parameters
    ----------
    a : Tensor, shape (batch, m, n)
        Of any floating dtype and any strides, as are the others.
    q : Tensor, shape (batch, m, k)
    r : Tensor, shape (batch, k, n)
    scales : Tensor, shape (batch, n)
        Column scales.
    g : Tensor, shape (n, 4)
        float64.
    h : Tensor, shape (k, 4)
        float64.

    Returns
    -------
    residual, size, orthogonality : Tensor, shape (batch,)
        float32 (by the kernel, of matrices that are not float64) or float64; NaN or Inf where a matrix or its
        factors are not finite. Others are not affected.

    Examples
    --------
    >>> import torch
    >>> q, r = torch.linalg.qr(torch.tensor([[[3.0, 5.0], [4.0, 0.0]]], dtype=torch.float64))
    >>> g = torch.ones(2, 4, dtype=torch.float64)
    >>> residual, size, orthogonality = probe_errors(q @ r, q, r, torch.ones(1, 2), g, g)
    >>> bool(residual < 1e-14 * size), bool(orthogonality < 1e-14)
    (True, True)
    """
    if a.is_cuda and _kernel_runs(a.device):
        from neula.kernels.probes_triton import probe_errors_triton

        return probe_errors_triton(a, q, r, scales, g, h)
    return probe_errors_reference(a, q, r, scales, g, h)


def probe_errors_reference(
    a: torch.Tensor,
    q: torch.Tensor,
    r: torch.Tensor,
    scales: torch.Tensor,
    g: torch.Tensor,
    h: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`probe_errors` in plain torch, on any device."""
    scaled = scales[..., None].double() * g
    ag = a.double() @ scaled
    wide_q = q.double()
    gap = ag - wide_q @ (r.double() @ scaled)
    loss = wide_q.mT @ (wide_q @ h) - h
    return norms(gap), norms(ag), norms(loss)


def norms(x: torch.Tensor) -> torch.Tensor:
    """Frobenius norm of each matrix of a batch."""
    return torch.linalg.vector_norm(x, dim=(-2, -1))


@lru_cache
def _kernel_runs(device: torch.device) -> bool:
    """Whether the kernel can run, tried once a device."""

    def attempt() -> None:
        from neula.kernels.probes_triton import probe_errors_triton

        one = torch.ones(1, 1, 1, device=device, dtype=torch.float64)
        vectors = one[0].expand(1, VECTORS)
        probe_errors_triton(one, one, one, one[0], vectors, vectors)

    what = f"the kernel of the certificates on {device}"
    return can_run(attempt, what, "plain torch takes its place, many times slower")
