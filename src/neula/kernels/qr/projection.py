"""Orthogonalize a matrix against a few orthonormal columns, in float32 accuracy."""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.precision import exact_matmul
from neula.kernels.products.gemm import Total

MAX_COLUMNS = 512
"""Up to how many columns on either side the kernels are better than products of whole matrices."""


@trial("The kernels of projections", "library calls take their place")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, dtype=torch.float32, device=device)
    project_out.kernel(one, one.clone(), one.clone())


def _narrow(q: torch.Tensor, a: torch.Tensor, r: torch.Tensor, total: Total | None = None) -> bool:
    """Few columns, all of them contiguous, in float32."""
    narrow = max(q.shape[1], a.shape[1]) <= MAX_COLUMNS and q.stride(0) == a.stride(0) == 1
    return narrow and q.dtype == a.dtype == torch.float32


@kernel("neula.kernels.qr.projection_triton:project_out_triton", trial=_tried, when=_narrow)
def project_out(q: torch.Tensor, a: torch.Tensor, r: torch.Tensor, total: Total | None = None) -> None:
    """``R = Q^H A``, then ``A = A - Q R``, on a GPU by Triton kernels in fp16 with error correction.

    Parameters
    ----------
    q : Tensor, shape (m, k)
        float32, elements at most 1 in magnitude: orthonormal columns, or nearly.
    a : Tensor, shape (m, n)
        float32, columns scaled to elements of about 1; overwritten.
    r : Tensor, shape (k, n)
        float32, overwritten.
    total : callable, optional
        Called with R before A is changed, where Q and A are some rows of theirs.

    Examples
    --------
    >>> import torch
    >>> a, r = torch.tensor([[3.0], [4.0]]), torch.empty(1, 1)
    >>> project_out(torch.tensor([[1.0], [0.0]]), a, r)
    >>> a.T, r
    (tensor([[0., 4.]]), tensor([[3.]]))
    """
    r.copy_(exact_matmul(q.mH, a))
    if total is not None:
        total(r)
    a.sub_(exact_matmul(q, r))
