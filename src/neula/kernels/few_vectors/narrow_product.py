"""Products of a large float32 matrix with up to 32 vectors, near the speed of memory."""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import elements_at_a_time
from neula.kernels.precision import exact_matmul

MOST = 32
"""Vectors at most: 50000 x 4000 with 32 take an H200 0.29 ms (the library 0.36, or 0.75 where they lie by
columns), with 8 0.22 (0.36), with 40 0.84 (0.56)."""

SMALLEST = 1 << 27
"""Elements of a matrix from which on more is gained than what it takes the host to launch."""


@trial("The kernel of narrow products", "library calls take its place")
def _tried(device: torch.device) -> None:
    narrow_product.kernel(
        torch.ones(4, 4, dtype=torch.float32, device=device),
        torch.ones(4, 1, dtype=torch.float32, device=device),
    )


def _pays(a: torch.Tensor, x: torch.Tensor) -> bool:
    single = a.dtype == x.dtype == torch.float32 and a.ndim == 2
    return single and a.numel() >= SMALLEST and 0 < x.shape[1] <= MOST and elements_at_a_time(a) > 1


@kernel("neula.kernels.few_vectors.narrow_product_triton:narrow_product_triton", trial=_tried, when=_pays)
def narrow_product(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``A X`` as accurate as in float32, on a GPU by a Triton kernel in three products of TF32.

    Parameters
    ----------
    a : Tensor, shape (m, n)
        float32; the kernel takes large ones that are contiguous in rows or in columns.
    x : Tensor, shape (n, k)
        float32, of any strides.

    Returns
    -------
    Tensor, shape (m, k)
        Of the kernel column-major.

    Examples
    --------
    >>> narrow_product(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(2, 1))
    tensor([[3.],
            [7.]])
    """
    return exact_matmul(a, x)
