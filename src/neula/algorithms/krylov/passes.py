"""Products of tall matrices with a few vectors, in as few passes over each as there are kernels for."""

from __future__ import annotations

import torch
from torch.nn import functional

from neula.engines.reduction import HERE, Reduction
from neula.kernels.doubled.doubled import Doubled, two_sum
from neula.kernels.few_vectors.normal_product import (
    normal_product,
    product,
    transposed_product,
    vectors_at_once,
)
from neula.kernels.few_vectors.one_pass_host import pays

PASSES = 3
"""Most passes over a matrix for random vectors and right-hand sides together; for more of them the library
multiplies by all at once."""


def in_one_pass(t: torch.Tensor, count: int) -> bool:
    """Whether so many products with a matrix and its transpose are one pass, which more would not be."""
    return len(t) == 1 and normal_product.takes(t[0], t.new_empty(t.shape[2], count))


def residual_and_gradient(
    t: torch.Tensor, x: torch.Tensor, b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``R = B - T X`` and ``T^H R``; of a single matrix in one pass, where there is a kernel for it."""
    if len(t) == 1 and (normal_product.takes(t[0], x[0], b[0]) or pays(t[0])):
        residual, gradient = normal_product(t[0], x[0], b[0])
        return residual[None], gradient[None]
    residual = b - torch.bmm(t, x)  # matmul reshapes first
    return residual, torch.bmm(t.mT, residual.conj()).conj_physical()


def times(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``T X``, T having the dtype of X or, of a single matrix, another."""
    return product(t[0], x[0])[None] if t.dtype != x.dtype else t @ x


def transposed(t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``T^H y``."""
    if len(t) == 1 and (transposed_product.takes(t[0], y[0]) or pays(t[0])):
        return transposed_product(t[0], y[0])[None]
    return (t.mT @ y.conj()).conj_physical()


def normal(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``T^H T x``; vectors are rows, which takes a third of the time in MKL."""
    if len(t) == 1 and (normal_product.takes(t[0], x[0]) or pays(t[0])):
        return normal_product(t[0], x[0])[1][None]
    return torch.bmm(torch.bmm(x.mT.contiguous(), t.mT).conj(), t).mH


def normal_beside(t: torch.Tensor, x: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``T^H T X`` and ``T^H B``, in as few passes over a single matrix as its kernel can."""
    count, k = x.shape[2], b.shape[2]
    some = min(count + k, vectors_at_once(t.shape[2]))
    some = some if in_one_pass(t, some) else 0  # without a kernel for the matrix
    # Where the kernel takes all of X at once, one pass for that and a product for B are no more than these.
    if count <= some < count + k or count + k > PASSES * some:
        return normal(t, x), transposed(t, b)
    negative, beside = functional.pad(-x[0], (0, k)), functional.pad(b[0], (count, 0))
    passes = zip(negative.split(some, 1), beside.split(some, 1), strict=True)
    found = torch.cat([normal_product(t[0], *vectors)[1] for vectors in passes], 1)[None]
    return found[..., :count], found[..., count:]


def doubled_gradient(
    doubled: Doubled,
    b: torch.Tensor,
    x: torch.Tensor,
    x_low: torch.Tensor | None = None,
    *,
    a_low: torch.Tensor | None = None,
    b_low: torch.Tensor | None = None,
    over_rows: Reduction = HERE,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``r = b - A x`` and ``A^H r``, computed in twice the working precision, of batches.

    ``x + x_low`` is an unevaluated sum; ``a_low`` and ``b_low`` are rounding errors of A and b.
    """
    residual, rest = doubled.residual(x, b, x_low)
    if a_low is not None:
        lost = -(a_low @ x) if b_low is None else b_low - a_low @ x
        residual, rest = two_sum(residual, rest + lost)
    gradient = over_rows.total_of_pairs(*doubled.transposed_pair(residual, rest))
    if a_low is not None:
        gradient = gradient + over_rows.total(a_low.mH @ residual)
    return residual, gradient
