"""Complex matrices as planes of real numbers, whose three products make up those of complex matrices.

With ``A = A1 + i A2`` and ``B = B1 + i B2``,

    ``A B = (P - Q) + i (S - P - Q)``,  ``P = A1 B1``,  ``Q = A2 B2``,  ``S = (A1 + A2) (B1 + B2)``,

so that a third plane holds the sums of the parts.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.polar.batched_product import ALIGNED
from neula.kernels.products.gemm import combine


@trial("The kernels between complex matrices and their planes", "plain torch takes their place")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, 1, 2, dtype=torch.float32, device=device)
    found = planes.kernel(one, torch.float32)
    interleave.kernel(planes_of_product.kernel(found, 1.0, 1.0, one.flatten()[:1]), one, 1.0, 1.0)


def is_dense(x: torch.Tensor) -> bool:
    """Whether elements of a row, or of a column, follow one another."""
    return 0 not in x.shape and x.stride(3) == 1 and 2 in (x.stride(1), x.stride(2))


@kernel(
    "neula.kernels.products.planes_triton:planes_triton", trial=_tried, when=lambda x, *_, **__: is_dense(x)
)
def planes(x: torch.Tensor, dtype: torch.dtype, *, conjugated: bool = False) -> torch.Tensor:
    """Real parts, imaginary parts, and their sums, by one pass over complex matrices.

    Parameters
    ----------
    x : Tensor, shape (batch, m, n, 2)
        As :func:`torch.view_as_real` has them: float32 or float64.
    dtype : torch.dtype
        Of the planes; sums are rounded once.
    conjugated : bool
        Whether the conjugate is meant.

    Returns
    -------
    Tensor, shape (3, batch, m, n)
        Column-major where the matrices are.

    Examples
    --------
    >>> planes(torch.tensor([[[[1.0, 2.0]]]]), torch.float32, conjugated=True).flatten()
    tensor([ 1., -2., -1.])
    """
    out = room_for_planes(x, dtype)
    out[0], out[1] = x[..., 0], x[..., 1]
    if conjugated:
        out[1].neg_()
    torch.sub(x[..., 0], x[..., 1], out=out[2]) if conjugated else torch.add(x[..., 0], x[..., 1], out=out[2])
    return out


@kernel(
    "neula.kernels.products.planes_triton:interleave_triton",
    trial=_tried,
    when=lambda products, c, *_: is_dense(c),
)
def interleave(products: torch.Tensor, c: torch.Tensor, alpha: float, beta: float) -> None:
    """``C = alpha ((P - Q) + i (S - P - Q)) + beta C`` by one pass.

    Parameters
    ----------
    products : Tensor, shape (3, batch, m, n)
        P, Q and S; overwritten.
    c : Tensor, shape (batch, m, n, 2)
        The real view of complex matrices. It is not read if ``beta`` is zero.
    alpha, beta : float

    Examples
    --------
    >>> products, c = torch.tensor([2.0, 3.0, 7.0]).view(3, 1, 1, 1), torch.ones(1, 1, 1, 2)
    >>> interleave(products, c, 1.0, 1.0)
    >>> c.flatten()
    tensor([0., 3.])
    """
    p, q, s = products
    s.sub_(p).sub_(q)
    for place, part in enumerate((p.sub_(q), s)):
        combine(part, alpha, beta, c[..., place])


@kernel(
    "neula.kernels.products.planes_triton:planes_of_product_triton",
    trial=_tried,
    when=lambda products, *_: products.stride(3) == 1 and 0 not in products.shape,
)
def planes_of_product(
    products: torch.Tensor, factor: float, shift: float, scales: torch.Tensor | None
) -> torch.Tensor:
    """The planes of ``scale (factor A B + shift I)`` from P, Q and S, by one pass.

    Parameters
    ----------
    products : Tensor, shape (3, batch, m, n)
        P, Q and S; overwritten.
    factor, shift : float
    scales : Tensor, shape (batch,), optional

    Returns
    -------
    Tensor, shape (3, batch, m, n)
        Real parts, imaginary parts and their sums, in the memory of the products.

    Examples
    --------
    >>> planes_of_product(torch.tensor([2.0, 3.0, 7.0]).view(3, 1, 1, 1), 2.0, 1.0, None).flatten()
    tensor([-1.,  4.,  3.])
    """
    p, q, s = products
    s.sub_(p).sub_(q).mul_(factor)
    p.sub_(q).mul_(factor).diagonal(dim1=1, dim2=2).add_(shift)
    if scales is not None:
        products[::2].mul_(scales[:, None, None])
    q.copy_(s)
    torch.add(p, q, out=s)
    return products


def room_for_planes(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialized, shape (3, batch, m, n), in the order of x."""
    batch, m, n, _ = x.shape
    if x.stride(1) < x.stride(2):
        return torch.empty(3, batch, n, -(-m // ALIGNED) * ALIGNED, dtype=dtype, device=x.device)[..., :m].mT
    return torch.empty(3, batch, m, -(-n // ALIGNED) * ALIGNED, dtype=dtype, device=x.device)[..., :n]
