"""Products of a matrix that is stored in a low format with a few vectors in a wider one.

A solve with the factors of an LU factorization reads every element once, for two flops: what it takes is the
time in which memory gives the factors out. Converting them first, to float32, would move five times as many
bytes.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from neula.kernels.availability import can_run
from neula.kernels.precision import exact_matmul

VECTORS = 8
"""Up to as many columns the kernel takes, each of which reads A from the cache once more; for others it is
worth while to convert A, and to multiply matrices."""

_CHUNK = 1 << 19
"""Elements that the reference converts at a time: a CPU keeps them in its cache."""


def subtract_product(a: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``Y = Y - A X`` in the precision of X and Y, on a GPU by a Triton kernel if A is narrower.

    Parameters
    ----------
    a : Tensor, shape (m, n)
        Of any floating dtype; column-major, blocks of larger matrices included, it is read at full speed.
    x : Tensor, shape (n, k)
        float32 or float64.
    y : Tensor, shape (m, k)
        In the dtype of ``x``; overwritten.

    Returns
    -------
    Tensor, shape (m, k)
        ``y``.

    Examples
    --------
    >>> import torch
    >>> subtract_product(torch.eye(2).half(), torch.ones(2, 1), torch.tensor([[3.0], [4.0]]))
    tensor([[2.],
            [3.]])
    """
    if a.shape[0] and a.dtype != x.dtype and a.is_cuda and x.shape[1] <= VECTORS and _kernel_runs(a.device):
        from neula.kernels.mixed_product_triton import subtract_product_triton

        return subtract_product_triton(a, x, y)
    return subtract_product_reference(a, x, y)


def subtract_product_reference(a: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """:func:`subtract_product` in plain torch, on any device: some rows of A are converted at a time."""
    rows = len(a) if a.dtype == x.dtype else max(1, _CHUNK // a.shape[1])
    for low, target in zip(a.split(max(1, rows)), y.split(max(1, rows)), strict=True):
        target -= exact_matmul(low.to(x.dtype), x)
    return y


@lru_cache
def _kernel_runs(device: torch.device) -> bool:
    """Whether the kernel can run, tried once a device."""

    def attempt() -> None:
        from neula.kernels.mixed_product_triton import subtract_product_triton

        one = torch.ones(1, 1, device=device, dtype=torch.float64)
        subtract_product_triton(one.half(), one, one.clone())

    what = f"the kernel of products in two precisions on {device}"
    return can_run(attempt, what, "matrices are converted before products, several times slower")
