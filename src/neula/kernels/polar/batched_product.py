"""Products of batches in half precision that scale, shift and round as they store, half of each where it is
symmetric.

An operand is one number of half precision for each element, or an unevaluated sum of two, which keeps 22 bits
(:mod:`neula.kernels.products.parts`). Polynomials of a symmetric matrix are made of such products alone:
``factor A B + shift I``. Where A and B are symmetric and commute, their product is, too, and only the tiles
on and below its diagonal need be computed.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial

SHIFT = 11
"""The second part of an operand is stored times ``2^11``, which keeps it from underflow."""

ALIGNED = 8
"""Rows start at multiples of so many elements, 16 bytes, where bulk copies can."""


@trial("The kernel of products of batches", "the library's products take its place")
def _tried(device: torch.device) -> None:
    one = split.kernel(torch.eye(16, dtype=torch.float32, device=device)[None], torch.float16, 2)
    joined.kernel(batched_product.kernel(one, one.mT, symmetric=True))


@kernel(
    "neula.kernels.polar.batched_product_triton:batched_product_triton",
    trial=_tried,
    when=lambda a, b, *_, **__: 0 not in (*a.shape, *b.shape),
)
def batched_product(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    factor: float = 1.0,
    shift: float = 0.0,
    scales: torch.Tensor | None = None,
    symmetric: bool = False,
    wide: bool = False,
) -> torch.Tensor:
    """``scale (factor A B + shift I)`` for each pair of matrices, in the parts that A and B are in.

    Parameters
    ----------
    a : Tensor, shape (parts, batch, m, k)
        float16 or bfloat16, one part or two, as :func:`split` makes them.
    b : Tensor, shape (parts, batch, k, n)
        The same, or the transpose of such a tensor.
    factor, shift : float
    scales : Tensor, shape (batch,), optional
        float32.
    symmetric : bool
        Whether the result is known to be symmetric.
    wide : bool
        Whether it is returned in float32, and not in parts.

    Returns
    -------
    Tensor, shape (parts, batch, m, n), or (1, batch, m, n)

    Examples
    --------
    >>> import torch
    >>> a = split(torch.tensor([[[1.0, 2.0], [2.0, 5.0]]]), torch.float16)
    >>> joined(batched_product(a, a, factor=0.5, shift=-1.0, symmetric=True))
    tensor([[[ 1.5000,  6.0000],
             [ 6.0000, 13.5000]]])
    """
    dtype = torch.float32 if len(a) == 1 else torch.float64
    product = factor * (joined(a, dtype) @ joined(b, dtype))
    if shift:
        product.diagonal(dim1=1, dim2=2).add_(shift)
    if scales is not None:
        product *= scales[:, None, None]
    return product.float()[None] if wide else split(product.float(), a.dtype, len(a))


@kernel(
    "neula.kernels.polar.split_triton:split_triton", trial=_tried, when=lambda x, *_, **__: 0 not in x.shape
)
def split(
    x: torch.Tensor,
    dtype: torch.dtype,
    parts: int = 1,
    scales: torch.Tensor | None = None,
    factor: float = 1.0,
) -> torch.Tensor:
    """Numbers in one part or two of half precision, as a GPU reads them in one pass.

    Parameters
    ----------
    x : Tensor, shape (batch, m, n)
        Of any floating dtype and any strides; scaled, elements of magnitudes below the largest of the dtype.
    dtype : torch.dtype
    parts : int
    scales : Tensor, shape (batch,), optional
        Factors applied to the matrices first, in the dtype of x, at least float32.
    factor : float
        Common factor, applied after the scales.

    Returns
    -------
    Tensor, shape (parts, batch, m, n)
        Rows contiguous, with room between them where n is not a multiple of :data:`ALIGNED`.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if scales is not None:  # one after the other: together they may be out of range
        x = (x * scales[:, None, None]) * factor
    out = room(parts, *x.shape, dtype=dtype, device=x.device)
    out[0] = x.float()
    if parts == 2:
        out[1] = (x.float() - out[0].float()) * 2.0**SHIFT
    return out


@kernel(
    "neula.kernels.polar.split_triton:joined_triton",
    trial=_tried,
    when=lambda parts, dtype=torch.float32: (
        len(parts) == 2 and dtype == torch.float32 and 0 not in parts.shape
    ),
)
def joined(parts: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers that parts stand for, shape (batch, m, n)."""
    leading = parts[0].to(dtype)
    return leading if len(parts) == 1 else leading + parts[1].to(dtype) * 2.0**-SHIFT


def room(parts: int, batch: int, m: int, n: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialized, with aligned rows."""
    across = -(-n // ALIGNED) * ALIGNED
    return torch.empty(parts, batch, m, across, dtype=dtype, device=device)[..., :n]
