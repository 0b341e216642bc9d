"""Bounds on spectral norms that take one product: by Schatten norms."""

from __future__ import annotations

import torch

from neula.algorithms.elimination.lu_panels import blocks
from neula.algorithms.orthogonal.r_only import HALVED


def schatten_bounds(a: torch.Tensor, *, upper: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """``||A||_2`` from below and from above, shape (batch, 1), by one product.

    With the Schatten 4-norm ``||A||_4`` they are ``||A||_4^2 / ||A||_F``, at least
    ``sqrt(2 / (1 + sqrt(n)))`` of it, and ``||A||_4``, at most ``n^(1/4)`` times as large.

    Parameters
    ----------
    a : Tensor, shape (batch, m, n)
    upper : bool
        Whether all of them are upper triangular, which large ones make use of.
    """
    size = torch.linalg.matrix_norm(a)[:, None, None]
    scaled = a / torch.where(size > 0, size, 1.0)
    square = _gram_norm(scaled, upper=upper)[:, None]
    return size[..., 0] * square, size[..., 0] * square.sqrt()


def schatten_bounds_of_gram(gram: torch.Tensor, sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Schatten bounds of ``A D^-1`` from the Gram matrix of A, in a few operations an element.

    Parameters
    ----------
    gram : Tensor, shape (batch, n, n)
        Of which the lower triangle is read.
    sizes : Tensor, shape (batch, n, 1)
        The diagonal of D.
    """
    norm = torch.linalg.vector_norm
    scaled = (gram / sizes / sizes.mT).tril_()
    diagonal = scaled.diagonal(dim1=1, dim2=2).real
    squares = 2 * norm(scaled, dim=(1, 2))[:, None].square() - norm(diagonal, dim=1, keepdim=True).square()
    square = squares.sqrt()
    return square / diagonal.sum(1, keepdim=True).sqrt(), square.sqrt()


def _gram_norm(a: torch.Tensor, *, upper: bool) -> torch.Tensor:
    """``||A^H A||_F``, shape (batch,); of a large triangle in eight blocks, a quarter of the operations."""
    n, norm = a.shape[-1], torch.linalg.matrix_norm
    if (1 + a.is_complex()) * n < HALVED or not upper:
        return norm(a.mH @ a)
    squares = torch.zeros(len(a), dtype=a.dtype.to_real(), device=a.device)
    for k in blocks(slice(0, n), -(-n // 8)):
        # A block of columns of the Gram matrix from the diagonal down, where the rest is its transpose.
        part = a[:, : k.stop, k.start :].mH @ a[:, : k.stop, k]
        squares += 2 * norm(part).square() - norm(part[:, : k.stop - k.start]).square()
    return squares.sqrt()
