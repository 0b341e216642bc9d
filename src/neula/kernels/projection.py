"""What a matrix has in the range of a few orthonormal columns, taken out of it in float32 accuracy."""

from __future__ import annotations

from functools import lru_cache

import torch

from neula.kernels.availability import can_run
from neula.kernels.precision import exact_matmul

MAX_COLUMNS = 512
"""Up to how many columns on either side the kernels are better than products of whole matrices."""


def project_out(q: torch.Tensor, a: torch.Tensor, r: torch.Tensor) -> None:
    """``R = Q^T A``, then ``A = A - Q R``, on a GPU by Triton kernels in fp16 with error correction.

    Parameters
    ----------
    q : Tensor, shape (m, k)
        float32, elements at most 1 in magnitude: orthonormal columns, or nearly.
    a : Tensor, shape (m, n)
        float32, columns scaled to elements of about 1; overwritten.
    r : Tensor, shape (k, n)
        float32, overwritten.

    Examples
    --------
    >>> import torch
    >>> a, r = torch.tensor([[3.0], [4.0]]), torch.empty(1, 1)
    >>> project_out(torch.tensor([[1.0], [0.0]]), a, r)
    >>> a.T, r
    (tensor([[0., 4.]]), tensor([[3.]]))
    """
    if projects(q, a):
        from neula.kernels.projection_triton import project_out_triton

        project_out_triton(q, a, r)
        return
    project_out_reference(q, a, r)


def project_out_reference(q: torch.Tensor, a: torch.Tensor, r: torch.Tensor) -> None:
    """:func:`project_out` in plain torch, on any device."""
    r.copy_(exact_matmul(q.T, a))
    a.sub_(exact_matmul(q, r))


def projects(q: torch.Tensor, a: torch.Tensor) -> bool:
    """Whether the kernels take these matrices: narrow, float32, with contiguous columns."""
    narrow = max(q.shape[1], a.shape[1]) <= MAX_COLUMNS and q.stride(0) == a.stride(0) == 1
    return narrow and a.is_cuda and q.dtype == a.dtype == torch.float32 and _kernels_run(a.device)


@lru_cache
def _kernels_run(device: torch.device) -> bool:
    """Whether the kernels can run, tried once a device."""

    def attempt() -> None:
        from neula.kernels.projection_triton import project_out_triton

        one = torch.ones(1, 1, device=device)
        project_out_triton(one, one.clone(), one.clone())

    return can_run(attempt, f"the kernels of projections on {device}", "library calls take their place")
