"""Products of a large matrix with a few vectors in a wider precision: what certificates are made of."""

from __future__ import annotations

from functools import lru_cache

import torch

from neula.kernels.availability import can_run
from neula.kernels.precision import exact_matmul

VECTORS = 8
"""Up to how many vectors the kernel takes."""

_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Elements that the reference converts at a time: what a cache holds, and what fills a GPU."""


def thin_product(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``A X`` in the precision of X, on a GPU by a Triton kernel that reads A once, at the speed of memory.

    Parameters
    ----------
    a : Tensor, shape (m, n)
        Of any floating dtype and any strides; ``q.T`` is a matrix as good as any.
    x : Tensor, shape (n, k)
        float32 or float64.

    Returns
    -------
    Tensor, shape (m, k)

    Examples
    --------
    >>> import torch
    >>> thin_product(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(2, 1, dtype=torch.float64))
    tensor([[3.],
            [7.]], dtype=torch.float64)
    """
    if a.is_cuda and 0 < x.shape[1] <= VECTORS and 0 not in a.shape and _kernel_runs(a.device):
        from neula.kernels.thin_triton import thin_product_triton

        return thin_product_triton(a, x)
    return thin_product_reference(a, x)


def thin_product_reference(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """:func:`thin_product` in plain torch, on any device: some rows of A are converted at a time."""
    if a.dtype == x.dtype:
        return exact_matmul(a, x)
    rows = max(1, _CHUNK[a.device.type] // max(1, a.shape[1]))
    return torch.cat([exact_matmul(block.to(x.dtype), x) for block in a.split(rows)])


@lru_cache
def _kernel_runs(device: torch.device) -> bool:
    """Whether the kernel can run, tried once a device."""

    def attempt() -> None:
        from neula.kernels.thin_triton import thin_product_triton

        one = torch.ones(1, 1, device=device)
        thin_product_triton(one, one.double())

    return can_run(attempt, f"the kernel of thin products on {device}", "library calls take its place")
