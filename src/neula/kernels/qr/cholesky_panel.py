"""QR of narrow panels of a batch in double precision: Cholesky QR, twice.

Modified Gram-Schmidt of a panel is a chain of as many steps over all of its rows as it has columns. Cholesky
QR has such a chain on the small Gram matrix only; between are products, whose rows are dealt out to the whole
GPU. Where the first pass is not orthonormal, which is at condition numbers beyond 1e4, the second one is.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial

MAX_COLUMNS = 32
"""A Gram matrix that the registers of a thread block hold well."""

LOST = 2.0**-44
"""Part of its diagonal element that a pivot may owe to rounding errors."""


@trial("The kernel of panels in double precision", "modified Gram-Schmidt takes its place")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, 1, dtype=torch.float64, device=device)
    cholesky_panel.kernel(one, one.clone())


def _fits(a: torch.Tensor, r: torch.Tensor, narrow: torch.Tensor | None = None) -> bool:
    return a.dtype == torch.float64 and 0 < a.shape[2] <= MAX_COLUMNS and a.numel() > 0


@kernel("neula.kernels.qr.cholesky_panel_triton:cholesky_panel_triton", trial=_tried, when=_fits)
def cholesky_panel(a: torch.Tensor, r: torch.Tensor, narrow: torch.Tensor | None = None) -> None:
    """QR of each panel, Q in the place of A: orthonormal to the working precision up to a condition of 1e6.

    A pivot smaller than :data:`LOST` of the diagonal element is taken to be that, and what is right of it to
    be zero. ``A = Q R`` all the same: such a column of Q is short after the first pass, and the second one
    makes a unit vector of it. A column that vanishes becomes a zero column of Q and a zero on the diagonal of
    R; NaN and Inf stay in their matrix.

    Parameters
    ----------
    a : Tensor, shape (batch, m, n), n <= 32
        float64, of any strides. Squares of its elements should neither overflow nor underflow.
    r : Tensor, shape (batch, n, n)
        float64, of any strides: room for R.
    narrow : Tensor, shape (batch, m, n), optional
        float32, of any strides: room for a rounded Q.

    Examples
    --------
    >>> import torch
    >>> a = torch.tensor([[[0.0, 3.0], [2.0, 5.0]]], dtype=torch.float64)
    >>> r = torch.empty_like(a)
    >>> cholesky_panel(a, r)
    >>> r
    tensor([[[2., 5.],
             [0., 3.]]], dtype=torch.float64)
    """
    first, inverse = _factors(a.mH @ a)
    q = a @ inverse
    second, inverse = _factors(q.mH @ q)
    a.copy_(q @ inverse)
    r.copy_(second @ first)
    if narrow is not None:
        narrow.copy_(a)


def _factors(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """R and its inverse: operations on columns that turn G into ``R^H`` turn the identity into ``R^-1``."""
    n = gram.shape[1]
    least = LOST * gram.diagonal(dim1=1, dim2=2).real
    left, inverse = gram.clone(), torch.eye(n, dtype=gram.dtype, device=gram.device).repeat(len(gram), 1, 1)
    r = torch.zeros_like(gram)
    for k in range(n):
        row, pivot = left[:, k].clone(), left[:, k, k].real
        lost = pivot < least[:, k]
        pivot = torch.where(lost, least[:, k], pivot)
        row[:, : k + 1], row[:, k + 1 :] = 0, row[:, k + 1 :].masked_fill(lost[:, None], 0.0)
        reciprocal = torch.where(pivot == 0, 0.0, 1 / pivot)[:, None]
        for x in (left, inverse):
            x -= x[:, :, k : k + 1] * (row * reciprocal)[:, None]
        row[:, k] = pivot
        root = reciprocal.sqrt()
        r[:, k] = row * root
        inverse[:, :, k] *= root
    return r, inverse
