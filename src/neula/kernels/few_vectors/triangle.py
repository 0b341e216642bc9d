"""Products of triangles with a few vectors in double precision: what certificates of Cholesky take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

from neula.kernels.dispatch import kernel, trial

VECTORS = 4
"""For how many vectors the kernel is made."""

BLOCK = {"cpu": 1 << 18, "cuda": 1 << 25}
"""Elements of rows that are read at a time: what a cache holds, and what fills a GPU."""

Kind = Literal["lower", "transposed", "symmetric"]


@trial("The kernel of products with triangles", "library calls take its place")
def _tried(device: torch.device) -> None:
    triangle_product.kernel(
        torch.ones(1, 1, 1, dtype=torch.float32, device=device), _ones(1, device), "symmetric"
    )


def _ones(n: int, device: torch.device) -> torch.Tensor:
    return torch.ones(1, n, VECTORS, dtype=torch.float64, device=device)


@kernel(
    "neula.kernels.few_vectors.triangle_triton:triangle_product_triton",
    trial=_tried,
    when=lambda t, x, kind: x.shape[2] == VECTORS and 0 not in t.shape,
)
def triangle_product(t: torch.Tensor, x: torch.Tensor, kind: Kind) -> torch.Tensor:
    """``L X``, ``L^H X`` or ``(L + strict(L)^H) X`` for the lower triangles L of some matrices.

    On a GPU a Triton kernel reads the triangles alone; the library would take a copy of the matrices in
    double precision.

    Parameters
    ----------
    t : Tensor, shape (batch, n, n)
        Of any dtype and any strides. L has zeros above the diagonal, where it is not Hermitian; the diagonal
        of a Hermitian matrix counts as real.
    x : Tensor, shape (batch, n, k)
        In double precision, complex if t is.
    kind : {"lower", "transposed", "symmetric"}

    Returns
    -------
    Tensor, shape (batch, n, k)

    Examples
    --------
    >>> import torch
    >>> t, x = torch.tensor([[[1.0, 0.0], [2.0, 3.0]]]), torch.ones(1, 2, 1, dtype=torch.float64)
    >>> [triangle_product(t, x, kind).flatten().tolist() for kind in ("lower", "transposed", "symmetric")]
    [[1.0, 5.0], [3.0, 3.0], [3.0, 5.0]]
    """
    # Vectors are rows: libraries multiply a few of these several times as fast as a few columns.
    x = x.mT.contiguous()
    found = torch.zeros_like(x)
    for k, rows in _block_rows(t, x.dtype):
        # L of LAPACK is column-major, and takes long to copy.
        rows = rows.tril(k.start) if kind == "symmetric" else rows
        if kind != "transposed":
            found[:, :, k] += x[:, :, : k.stop] @ rows.mT
        if kind != "lower":
            found[:, :, : k.stop] += (x[:, :, k].conj() @ rows).conj()  # which copies no matrix
    if kind == "symmetric":
        found -= x * t.diagonal(dim1=1, dim2=2).real[:, None]
    return found.mT


def _block_rows(t: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some rows up to the end of their diagonal block, in a dtype."""
    count, n, _ = t.shape
    height = max(1, BLOCK[t.device.type] // max(1, count * n))
    for start in range(0, n, height):
        k = slice(start, min(start + height, n))
        yield k, t[:, k, : k.stop].to(dtype)
