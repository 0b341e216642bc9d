"""Products of a matrix that is stored in a low format with a few vectors in a wider one.

A solve with the factors of an LU factorization reads every element once, for two flops: what it takes is the
time in which memory gives the factors out. Converting them first, to float32, would move five times as many
bytes.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.precision import exact_matmul

VECTORS = 8
"""Up to as many columns the kernels take; for more it is worth while to convert A, and to multiply
matrices."""

_CHUNK = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Elements that the reference converts at a time: a CPU keeps them in its cache, and a GPU has enough to
do."""


@trial("The kernel of products in two precisions", "matrices are converted first, several times slower")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, device=device, dtype=torch.float64)
    subtract_product.kernel(one.half(), one, one.clone())
    subtract_product.kernel(one.half(), one.float(), one.float())


@kernel(
    "neula.kernels.few_vectors.mixed_product_triton:subtract_product_triton",
    trial=_tried,
    when=lambda a, x, y: a.shape[0] > 0 and a.dtype != x.dtype and x.shape[1] <= VECTORS,
)
def subtract_product(a: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``Y = Y - A X`` in the precision of X and Y: some rows of A are converted at a time.

    On a GPU a Triton kernel converts them in registers; in float32 it multiplies on matrix units.

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
    rows = len(a) if a.dtype == x.dtype else max(1, _CHUNK[a.device.type] // max(1, a.shape[1]))
    for low, target in zip(a.split(max(1, rows)), y.split(max(1, rows)), strict=True):
        target -= exact_matmul(low.to(x.dtype), x)
    return y
