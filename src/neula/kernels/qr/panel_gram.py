"""Panels in half precision: Gram matrix in two blocks of columns, what elimination leaves of it, products.

Cholesky QR of so many columns reads them once for all inner products, where Gram-Schmidt of one block against
the other would read both again; the second factor is that of the Schur complement.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.precision import exact_matmul
from neula.kernels.qr.tall import tall_product

WIDTH = 128
"""Columns of a block."""

LOST = 2.0**-19
"""Part of a diagonal element that a pivot may owe to rounding errors, as in the kernel of a block."""


class PanelGram(NamedTuple):
    """Gram matrix of ``[A1 A2]``."""

    first: torch.Tensor  # shape (k, k): A1^T A1 in float64
    across: torch.Tensor  # shape (k, l): A1^T A2; none where there is no second block
    second: torch.Tensor  # shape (l, l): A2^T A2

    @classmethod
    def from_gram(cls, gram: torch.Tensor) -> PanelGram:
        """The blocks of a whole one."""
        return cls(gram[:WIDTH, :WIDTH], gram[:WIDTH, WIDTH:], gram[WIDTH:, WIDTH:])


@trial("The kernels of panels in half precision", "products in float64 take their place")
def _tried(device: torch.device) -> None:
    a = torch.eye(WIDTH + 1, dtype=torch.float16, device=device).T
    gram = panel_gram.kernel(a)
    eliminate.kernel(gram.first.float(), gram.across, gram.second, gram.across.float())
    multiply_half_panel.kernel(a[:, :WIDTH], gram.first.float(), gram.first[0].float())


@kernel("neula.kernels.qr.panel_gram_triton:panel_gram_triton", trial=_tried)
def panel_gram(a: torch.Tensor) -> PanelGram:
    """Inner products of the columns of a panel, as accurate as in float32, on a GPU by a Triton kernel.

    Parameters
    ----------
    a : Tensor, shape (m, n), n <= 256
        float16, column-major.

    Returns
    -------
    PanelGram

    Examples
    --------
    >>> import torch
    >>> panel_gram(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).half()).first
    tensor([[10., 14.],
            [14., 20.]], dtype=torch.float64)
    """
    left, right = a[:, :WIDTH].double(), a[:, WIDTH:].double()
    return PanelGram(left.mT @ left, left.mT @ right, right.mT @ right)


@kernel("neula.kernels.qr.panel_gram_triton:eliminate_triton", trial=_tried)
def eliminate(
    inverse: torch.Tensor, across: torch.Tensor, second: torch.Tensor, r: torch.Tensor
) -> torch.Tensor:
    """``R12 = R11^-T G12`` into ``r``, and ``G22 - R12^T R12``, on a GPU by a Triton kernel.

    Parameters
    ----------
    inverse : Tensor, shape (k, k)
        ``R11^-1`` in float32.
    across : Tensor, shape (k, l)
        float64.
    second : Tensor, shape (l, l)
        float64.
    r : Tensor, shape (k, l)
        float32, of any strides; overwritten.

    Returns
    -------
    Tensor, shape (l, l)
        float64. Diagonal elements are at least what those of ``second`` may owe to rounding errors.
    """
    r.copy_(exact_matmul(inverse.mT, across.to(inverse.dtype)))
    rest = second - exact_matmul(r.mT, r).double()
    least = LOST * second.diagonal()
    rest.diagonal().copy_(torch.where(rest.diagonal() < least, least, rest.diagonal()))
    return rest


@kernel("neula.kernels.qr.tall_product_triton:multiply_panel_triton", trial=_tried)
def multiply_half_panel(a: torch.Tensor, w: torch.Tensor, norms: torch.Tensor) -> None:
    """``A W`` in place of A, as accurate as a float32 product and rounded once, on a GPU by a Triton kernel.

    Parameters
    ----------
    a : Tensor, shape (m, n), n <= 128
        float16, column-major.
    w : Tensor, shape (n, n)
        float32, upper triangular: what lies below is not read.
    norms : Tensor, shape (n,)
        float32, of the columns of ``a``: scales for the kernel.
    """
    a.copy_(tall_product.reference(a, w, norms))
