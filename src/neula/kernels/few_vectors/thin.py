"""Products of a large matrix with a few vectors in a wider precision: what certificates are made of."""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.precision import exact_matmul

VECTORS = 8
"""Up to how many vectors the kernel takes."""

_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Elements that are converted at a time: what a cache holds, and what fills a GPU."""


@trial("The kernel of thin products", "library calls take its place")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, dtype=torch.float32, device=device)
    thin_product.kernel(one, one.double())


@kernel(
    "neula.kernels.few_vectors.thin_triton:thin_product_triton",
    trial=_tried,
    when=lambda a, x: 0 < x.shape[1] <= VECTORS and 0 not in a.shape,
)
def thin_product(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``A X`` in the precision of X: some rows of A are converted at a time.

    On a GPU by a Triton kernel that reads A once, at the speed of memory.

    Parameters
    ----------
    a : Tensor, shape (m, n)
        Of any dtype and any strides; ``q.T`` is a matrix as good as any.
    x : Tensor, shape (n, k)
        float32 or float64, complex if A is.

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
    if a.is_complex() and 1 in a.stride():
        return _product_of_parts(a, x.resolve_conj())
    # Products of a few rows take a third of the time of those of a few columns in MKL.
    x = x.mT.contiguous()
    if a.dtype == x.dtype:
        return exact_matmul(x, a.mT).mT
    rows = max(1, _CHUNK[a.device.type] // max(1, a.shape[1]))
    return torch.cat([exact_matmul(x, block.to(x.dtype).mT) for block in a.split(rows)], 1).mT


def _product_of_parts(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Multiply a complex matrix as the real matrix of its parts, interleaved in memory, by twice as many
    vectors.
    """
    if a.is_conj():
        return _product_of_parts(a.conj(), x.conj().resolve_conj()).conj()
    if x.shape[1] > VECTORS // 2:
        return torch.cat([_product_of_parts(a, some) for some in x.split(VECTORS // 2, 1)], 1)
    if a.stride(1) == 1:
        vectors = torch.stack([torch.view_as_real(x), torch.view_as_real(1j * x)], 1).flatten(2)
        parts = thin_product(torch.view_as_real(a).flatten(1), vectors.flatten(0, 1))
        return torch.view_as_complex(parts.unflatten(1, (-1, 2)).contiguous())
    vectors = torch.view_as_real(x).flatten(1)
    parts = thin_product(torch.view_as_real(a.mT).flatten(1).mT, vectors).unflatten(0, (-1, 2))
    real, imaginary = parts.unflatten(2, (-1, 2)).unbind(3)
    return torch.complex(real[:, 0] - imaginary[:, 1], real[:, 1] + imaginary[:, 0])
