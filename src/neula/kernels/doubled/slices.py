"""Matrices and vectors as sums of slices of few bits, whose products have no rounding errors.

Ozaki's splitting (:mod:`neula.kernels.doubled.doubled` says how it is used), in plain torch.
"""

from __future__ import annotations

import math

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""A number as a sum of two that is not evaluated, the larger first."""


def bits_of(inner: int) -> int:
    """How many bits of a slice make exact sums of ``inner`` products.

    Rounding to nearest leaves at most half a unit for the next slice, so the largest sum,
    ``A1 x3 + A2 x2 + A3 x1``, is at most ``1.25 inner 2^(2 bits)`` times its unit, and ``2^53`` are exact.
    """
    return int((53 - math.log2(1.25 * inner)) // 2)


def anchors_of(like: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers at which addition rounds to multiples of 4 and of ``2^(1 - i bits)`` for i = 1, 2, 3.

    A number below 2 becomes zero at the first. Nothing is copied to a GPU, which would wait for it.
    """
    anchors = like.new_empty(4, 1)
    for i, exponent in enumerate((2, 1 - bits, 1 - 2 * bits, 1 - 3 * bits)):
        anchors[i].fill_(1.5 * 2.0 ** (52 + exponent))
    return anchors


def _power(largest: torch.Tensor) -> torch.Tensor:
    """A power of two that is more than half as large: only the bits of the exponent are kept."""
    return largest.view(torch.int64).bitwise_and(0x7FF << 52).view(torch.float64)


def _rounded(v: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """V without the bits that are lost in a sum with an anchor."""
    return (v + anchors).sub_(anchors)


def row_anchors_of(a: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """The anchors for each matrix by its largest element, from the last to the first, and before them zero.

    A sum with zero loses nothing.
    """
    largest = torch.maximum(a.amax((1, 2)), a.amin((1, 2)).neg_())  # without a copy of |A|
    return _power(largest)[:, None, None, None] * torch.cat([torch.zeros_like(anchors[:1]), anchors.flip(0)])


def slices_of(a: torch.Tensor, row_anchors: torch.Tensor) -> torch.Tensor:
    """A as the sum of three slices and what is left, the last first: (batch, m, n) to (batch, m, 4, n)."""
    rounded = _rounded(a.unsqueeze(2), row_anchors)
    return (rounded[:, :, :-1] - rounded[:, :, 1:]).contiguous()


def factor_of(
    x: torch.Tensor, x_low: torch.Tensor | None, anchors: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """Slices of vectors (batch, k, n), arranged to meet those of a matrix: (batch, 4 k, 4 n), columns of
    vector 0, of vector 1, and so on, as rows.

    With slices ``x1, x2, x3`` and what is left, ``x4``, a product is the sum of the products of ``[A4 A3 A2
    A1]`` with the columns ``(0, 0, 0, x1)``, ``(0, 0, x1, x2)``, ``(0, x1, x2, x3)``, which have no rounding
    errors, and ``(x1 + x2 + x3 + x4, x2 + x3 + x4, x3 + x4, x4)``, whose rounding errors do not matter.

    Slices of an element follow each other in the inner dimension if ``transposed``, as they do in columns of
    the stored matrix, and else the elements of a slice, as in its rows.
    """
    batch, k, n = x.shape
    power = _power(torch.linalg.vector_norm(x, torch.inf, dim=2))
    rounded = _rounded(x.unsqueeze(2), power[:, :, None, None] * anchors)
    zeros_and_slices = torch.constant_pad_nd(rounded.diff(dim=2), (0, 0, 3, 0))
    columns = zeros_and_slices.unfold(2, 4, 1)  # entry (i, j) is number i + j
    last = x.unsqueeze(2) - rounded
    if x_low is not None:
        last += x_low.unsqueeze(2)
    columns, last = (columns, last.mT) if transposed else (columns.mT, last)
    return torch.cat([columns, last.unsqueeze(2)], dim=2).reshape(batch, 4 * k, 4 * n)


def times_slices(factor: torch.Tensor, slices: torch.Tensor, transposed: bool) -> Pair:
    """Products of slices, added: (batch, 4 k, 4 n) and (batch, m, 4, n) to a pair of (batch, k, m).

    The larger of two sums is a multiple of the unit of the smaller, so three operations find the rounding
    error of their sum, even where the larger one happens to vanish.
    """
    batch, m, _, n = slices.shape
    matrix = slices.view(batch, 4 * m, n) if transposed else slices.view(batch, m, 4 * n).mT
    products = torch.bmm(factor, matrix)
    first, second, third, rest = products.view(batch, factor.shape[1] // 4, 4, matrix.shape[2]).unbind(2)
    two = first + second
    low = second - (two - first)
    three = two + third
    low += third - (three - two)
    low += rest
    return three, low
