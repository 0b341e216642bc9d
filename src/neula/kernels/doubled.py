"""Products in twice the working precision: the residuals and gradients of iterative refinement.

A double holds too few bits for the product of two doubles, but the exact sum of many products of short
numbers fits. So matrices and vectors are cut into slices of few bits, at places that the largest element
decides, and ordinary products of slices have no rounding errors (K. Ozaki, T. Ogita, S. Oishi and
S. M. Rump, "Error-free transformations of matrix multiplication by using fast routines of matrix
multiplication and its applications", Numer. Algorithms 59, 2012). On a GPU a kernel computes the
rounding errors of products and sums instead (T. Ogita, S. M. Rump and S. Oishi, "Accurate sum and dot
product", SIAM J. Sci. Comput. 26, 2005).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from neula.kernels.dispatch import kernel, runs, trial

KEPT = 1 << 22
"""Elements up to which slices, of four times the memory, are kept; more are sliced for each product."""

BLOCK = 1 << 17
"""Elements of a large matrix that are sliced at a time: their slices stay in a cache."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""A number as a sum of two that is not evaluated, the larger first."""


@dataclass(frozen=True)
class Doubled:
    """Matrices prepared for products in twice the precision of float64.

    The error of an element of a product is at most a small multiple of ``n 2^-104 max|a| max|x|`` before the
    result is rounded, unless numbers near ``2^-1022`` or beyond ``2^960`` occur. Here n is the inner
    dimension; for slices, if contiguous rows (or columns) have more than 131072 elements, the larger one.
    Nothing here waits for a GPU.

    Attributes
    ----------
    rows : Tensor, shape (batch, m, n)
        The matrices, or their transposes, whichever has contiguous rows.
    transposed : bool
        Whether products are with the transpose of ``rows``.
    anchors : Tensor, shape (4, 1), or None
        Where vectors below 2 are cut; None where nothing is prepared: a kernel does without.
    row_anchors : Tensor, shape (batch, 1, 5, 1), or None
        Where the matrices are cut.
    slices : Tensor, shape (batch, m, 4, n), or None
        What the elements of ``rows`` are sums of, smallest slice first; None where products cut their own.

    Examples
    --------
    >>> import torch
    >>> third = torch.tensor([[[1 / 3]]], dtype=torch.float64)
    >>> high, low = Doubled.of(third).residual(torch.full_like(third, 3.0), torch.ones_like(third))
    >>> high.item() * 2**54, low.item()
    (1.0, 0.0)
    """

    rows: torch.Tensor
    transposed: bool = False
    anchors: torch.Tensor | None = None
    row_anchors: torch.Tensor | None = None
    slices: torch.Tensor | None = None

    @classmethod
    def of(cls, a: torch.Tensor) -> Doubled:
        """Prepare matrices; they may not change as long as products are wanted.

        Parameters
        ----------
        a : Tensor, shape (batch, m, n)
            float64, of any strides.
        """
        rows, transposed = _with_contiguous_rows(a)
        if a.numel() == 0 or not cuts(a.device):
            return cls(rows, transposed)
        return cls.sliced(rows, transposed)

    @classmethod
    def sliced(cls, rows: torch.Tensor, transposed: bool = False) -> Doubled:
        """For products of slices, which are kept where they are few."""
        m, n = rows.shape[1:]
        keep = rows.numel() <= KEPT and max(m, n) <= BLOCK
        anchors = _anchors(rows, _bits(max(n, m if keep else min(m, BLOCK // n))))
        row_anchors = _row_anchors(rows, anchors)
        return cls(rows, transposed, anchors, row_anchors, _slices(rows, row_anchors) if keep else None)

    @property
    def mT(self) -> Doubled:
        """The transposed matrices, sharing what was prepared."""
        return replace(self, transposed=not self.transposed)

    def residual(self, x: torch.Tensor, b: torch.Tensor, x_low: torch.Tensor | None = None) -> Pair:
        """``b - A (x + x_low)`` as a sum of two numbers.

        Parameters
        ----------
        x : Tensor, shape (batch, n, k)
        b : Tensor, shape (batch, m, k)
        x_low : Tensor, shape (batch, n, k), optional
            Of the size of the rounding errors of x at most.

        Returns
        -------
        high, low : Tensor, shape (batch, m, k)
            Low is at most the rounding error of high.
        """
        if self.anchors is None:
            return doubled_product(self._matrix, x, x_low, b)
        return _evaluated(self._product(x, x_low), b)

    def product(self, x: torch.Tensor, x_low: torch.Tensor | None = None) -> torch.Tensor:
        """``A (x + x_low)``, rounded once.

        Parameters
        ----------
        x : Tensor, shape (batch, n, k)
        x_low : Tensor, shape (batch, n, k), optional
            Of the size of the rounding errors of x at most.

        Returns
        -------
        Tensor, shape (batch, m, k)
        """
        if self.anchors is None:
            return doubled_product(self._matrix, x, x_low)[0]
        high, low = self._product(x, x_low)
        return low.add_(high).mT

    def transposed_product(self, high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """``A^T (high + low)``, rounded once.

        Parameters
        ----------
        high, low : Tensor, shape (batch, m, k)
            As :meth:`residual` returns them.

        Returns
        -------
        Tensor, shape (batch, n, k)
        """
        return self.mT.product(high, low)

    def transposed_pair(self, high: torch.Tensor, low: torch.Tensor) -> Pair:
        """The same as a sum of two numbers, for A that is only some rows of a matrix."""
        transposed = self.mT
        if self.anchors is None:
            return doubled_product(transposed._matrix, high, low)
        total, rest = transposed._product(high, low)
        return total.mT, rest.mT

    @property
    def _matrix(self) -> torch.Tensor:
        return self.rows.mT if self.transposed else self.rows

    def _product(self, x: torch.Tensor, x_low: torch.Tensor | None) -> Pair:
        """``A (x + x_low)`` as a pair whose second is not yet small beside the first, (batch, k, m) each."""
        assert self.anchors is not None
        assert self.row_anchors is not None
        x = x.mT
        x_low = None if x_low is None else x_low.mT
        if self.slices is not None:
            factor = _factor(x, x_low, self.anchors, self.transposed)
            return _times_slices(factor, self.slices, self.transposed)
        by_blocks = _product_of_columns if self.transposed else _product_of_rows
        return by_blocks(self.rows, x, x_low, self.anchors, self.row_anchors)


@trial("The kernel of doubled products", "sliced products take its place")
def _tried(device: torch.device) -> None:
    """Whether it keeps rounding errors as well."""
    from neula.kernels.doubled_cuda import THREADS

    # One thread sums both products; if the second is added before it is rounded, its error counts twice.
    a = torch.zeros(1, 1, 1 + THREADS, device=device, dtype=torch.float64)
    a[..., -1] = 1 + 2.0**-30
    x = a.clone()
    a[..., 0], x[..., 0] = 1, -1 - 2.0**-29
    zero = torch.zeros_like(x)
    high, low = doubled_product.kernel(a, x.mT, zero.mT, zero[..., :1])
    if (high.item(), low.item()) != (-(2.0**-60), 0.0):
        raise ArithmeticError(f"(1 + 2^-29) - (1 + 2^-30)^2 is said to be {high.item()} + {low.item()}")


@kernel("neula.kernels.doubled_cuda:doubled_product_cuda", trial=_tried)
def doubled_product(
    a: torch.Tensor, x: torch.Tensor, x_low: torch.Tensor | None = None, b: torch.Tensor | None = None
) -> Pair:
    """``A (x + x_low)``, or ``b - A (x + x_low)`` where b is given, with a matrix that is not prepared.

    Parameters and results are those of :meth:`Doubled.residual`.
    """
    if a.numel() == 0:
        high = x.new_zeros(len(x), x.shape[2], a.shape[1])
        return _evaluated((high, high.clone()), b)
    return _evaluated(Doubled.sliced(*_with_contiguous_rows(a))._product(x, x_low), b)


def cuts(device: torch.device) -> bool:
    """Whether :class:`Doubled` cuts matrices there: the kernel's errors do not depend on sizes of columns."""
    return not runs(doubled_product, device)


def _with_contiguous_rows(a: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The matrices, or their transposes, and which."""
    transposed = a.stride(1) == 1 and a.stride(2) != 1
    return a.mT if transposed else a, transposed


def _evaluated(product: Pair, b: torch.Tensor | None) -> Pair:
    """A product, (batch, k, m) each, or ``b`` minus it: the larger number first, then its rounding error."""
    high, low = product
    if b is not None:
        high, error = _two_difference(b.mT, high)
        low = error.sub_(low)
    high, low = two_sum(high, low)
    return high.mT, low.mT


def _product_of_rows(
    a: torch.Tensor,
    x: torch.Tensor,
    x_low: torch.Tensor | None,
    anchors: torch.Tensor,
    row_anchors: torch.Tensor,
) -> Pair:
    """The product of a large matrix, some of its elements at a time."""
    batch, m, n = a.shape
    high, low = x.new_empty(batch, x.shape[1], m), x.new_empty(batch, x.shape[1], m)
    for members in _pieces(batch, BLOCK // (m * n)):
        factor = _factor(x[members], None if x_low is None else x_low[members], anchors, False)
        for rows in _pieces(m, BLOCK // n):
            slices = _slices(a[members, rows], row_anchors[members])
            high[members, :, rows], low[members, :, rows] = _times_slices(factor, slices, False)
    return high, low


def _product_of_columns(
    a: torch.Tensor,
    y: torch.Tensor,
    y_low: torch.Tensor | None,
    anchors: torch.Tensor,
    row_anchors: torch.Tensor,
) -> Pair:
    """The product with the transpose of a large matrix, a sum over blocks of its rows."""
    batch, m, n = a.shape
    high, low = y.new_zeros(batch, y.shape[1], n), y.new_zeros(batch, y.shape[1], n)
    for members in _pieces(batch, BLOCK // (m * n)):
        for rows in _pieces(m, BLOCK // n):
            piece = members, slice(None), rows
            factor = _factor(y[piece], None if y_low is None else y_low[piece], anchors, True)
            part, part_low = _times_slices(factor, _slices(a[members, rows], row_anchors[members]), True)
            high[members], error = two_sum(high[members], part)
            low[members] += error.add_(part_low)
    return high, low


def _pieces(size: int, piece: int) -> Iterator[slice]:
    piece = max(1, piece)
    return (slice(start, start + piece) for start in range(0, size, piece))


def _bits(inner: int) -> int:
    """How many bits of a slice make exact sums of ``inner`` products.

    Rounding to nearest leaves at most half a unit for the next slice, so the largest sum,
    ``A1 x3 + A2 x2 + A3 x1``, is at most ``1.25 inner 2^(2 bits)`` times its unit, and ``2^53`` are exact.
    """
    return int((53 - math.log2(1.25 * inner)) // 2)


def _anchors(like: torch.Tensor, bits: int) -> torch.Tensor:
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


def _row_anchors(a: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """The anchors for each matrix by its largest element, from the last to the first, and before them zero.

    A sum with zero loses nothing.
    """
    largest = torch.maximum(a.amax((1, 2)), a.amin((1, 2)).neg_())  # without a copy of |A|
    return _power(largest)[:, None, None, None] * torch.cat([torch.zeros_like(anchors[:1]), anchors.flip(0)])


def _slices(a: torch.Tensor, row_anchors: torch.Tensor) -> torch.Tensor:
    """A as the sum of three slices and what is left, the last first: (batch, m, n) to (batch, m, 4, n)."""
    rounded = _rounded(a.unsqueeze(2), row_anchors)
    return (rounded[:, :, :-1] - rounded[:, :, 1:]).contiguous()


def _factor(
    x: torch.Tensor, x_low: torch.Tensor | None, anchors: torch.Tensor, transposed: bool
) -> torch.Tensor:
    """Slices of vectors, arranged to meet those of a matrix.

    With slices ``x1, x2, x3`` and what is left, ``x4``, a product is the sum of the products of
    ``[A4 A3 A2 A1]`` with the four columns of ::

        0   0   0   x1 + x2 + x3 + x4
        0   0   x1  x2 + x3 + x4
        0   x1  x2  x3 + x4
        x1  x2  x3  x4

    of which the first three have no rounding errors, and those of the fourth do not matter.

    Parameters
    ----------
    x, x_low : Tensor, shape (batch, k, n)
    anchors : Tensor, shape (4, 1)
    transposed : bool
        Whether the slices of an element follow each other in the inner dimension, as they do in columns of
        the stored matrix, and not the elements of a slice, as in its rows.

    Returns
    -------
    Tensor, shape (batch, 4 k, 4 n)
        Columns of vector 0, of vector 1, and so on, as rows.
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


def _times_slices(factor: torch.Tensor, slices: torch.Tensor, transposed: bool) -> Pair:
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


def two_sum(a: torch.Tensor, b: torch.Tensor) -> Pair:
    """``a + b`` and its rounding error (Knuth)."""
    total = a + b
    of_b = total - a
    error = a - (total - of_b)
    return total, error.add_(b - of_b)


def _two_difference(a: torch.Tensor, b: torch.Tensor) -> Pair:
    """``a - b`` and its rounding error."""
    total = a - b
    of_b = total - a
    error = a - (total - of_b)
    return total, error.sub_(b + of_b)
