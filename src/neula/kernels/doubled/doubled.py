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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.doubled.doubled_cuda import THREADS, doubled_product_cuda, sliced_product_cuda, tiles_of

KEPT = 1 << 22
"""Elements up to which slices, of four times the memory, are kept; more are sliced for each product."""

BLOCK = 1 << 17
"""Elements of a large matrix that are sliced at a time: their slices stay in a cache."""

MANY, LARGE = 3, 1 << 26
"""Vectors, and multiplications, from which on matrix units of a GPU take less time than its other ones."""

INNER = 384
"""Terms of a sum from which on its error there is bounded by less than with rounding errors of products: of
normal numbers, ``2^-87`` times the largest of each 32 terms is at most ``(INNER u)^2`` times all of them."""

FP64_UNITS = (9, 0)
"""Compute capability from which on matrix units take eight columns of float64 numbers at a time."""


@dataclass(frozen=True)
class Doubled:
    """Matrices prepared for products in twice the precision of float64.

    The error of an element of a product is at most a small multiple of ``n 2^-104 max|a| max|x|`` before the
    result is rounded, unless numbers near ``2^-1022`` or beyond ``2^960`` occur. Here n is the inner
    dimension; for slices, if contiguous rows (or columns) have more than 131072 elements, the larger one.
    On matrix units it is at most ``n 2^-92 max|a| max|x|``: a sum of ``2^-87 max|a| max|x|`` for each 32
    columns. Nothing here waits for a GPU.

    Examples
    --------
    >>> third = torch.tensor([[[1 / 3]]], dtype=torch.float64)
    >>> high, low = Doubled.from_matrix(third).residual(torch.full_like(third, 3.0), torch.ones_like(third))
    >>> high.item() * 2**54, low.item()
    (1.0, 0.0)
    """

    # Shape (batch, m, n): the matrices, or their transposes, whichever has contiguous rows.
    rows: torch.Tensor
    transposed: bool = False  # whether products are with the transpose of rows
    # Shape (4, 1): where vectors below 2 are cut; None where nothing is prepared: a kernel does without.
    anchors: torch.Tensor | None = None
    row_anchors: torch.Tensor | None = None  # shape (batch, 1, 5, 1): where the matrices are cut
    # Shape (batch, m, 4, n): what the elements of rows are sums of, smallest slice first; None where products
    # cut their own.
    slices: torch.Tensor | None = None
    # Shape (batch, n, 1): sizes of the columns, which what is cut of a row is relative to; without, products
    # of many vectors do not go to matrix units of a GPU.
    columns: torch.Tensor | None = None
    # Whether products are with the transpose of what the sizes are those of the columns of.
    turned: bool = False

    @classmethod
    def from_matrix(cls, a: torch.Tensor, columns: torch.Tensor | None = None) -> Doubled:
        """Prepare matrices, float64 or complex128; they may not change as long as products are wanted.

        ``columns`` (batch, n, 1) are sizes of their columns, by which errors in ``(m + n) 2^-104`` are to be
        measured: so large, with room, are those of many vectors on matrix units, which are not taken without.
        """
        rows, transposed = _with_contiguous_rows(a)
        if a.is_complex():
            parts = as_real(rows)
            if transposed:  # columns of A are rows of the parts
                return ComplexDoubled(rows, True, real=Doubled.from_matrix(parts.mT, columns).mH)
            sizes = None if columns is None else columns.repeat_interleave(2, 1)
            return ComplexDoubled(rows, False, real=Doubled.from_matrix(parts, sizes))
        if a.numel() == 0 or not cuts(a.device):
            return cls(rows, transposed, columns=columns)
        return cls.sliced(rows, transposed)

    @classmethod
    def sliced(cls, rows: torch.Tensor, transposed: bool = False) -> Doubled:
        """For products of slices, which are kept where they are few."""
        m, n = rows.shape[1:]
        keep = rows.numel() <= KEPT and max(m, n) <= BLOCK
        anchors = anchors_of(rows, bits_of(max(n, m if keep else min(m, BLOCK // n))))
        row_anchors = row_anchors_of(rows, anchors)
        return cls(rows, transposed, anchors, row_anchors, slices_of(rows, row_anchors) if keep else None)

    @property
    def cut(self) -> bool:
        """Whether products are sums of slices, whose errors are relative to the largest elements."""
        return self.anchors is not None

    @property
    def mH(self) -> Doubled:
        """The conjugate transposes, sharing what was prepared: each of their rows is cut by itself."""
        return replace(self, transposed=not self.transposed, turned=not self.turned)

    def residual(self, x: torch.Tensor, b: torch.Tensor, x_low: torch.Tensor | None = None) -> Pair:
        """``b - A (x + x_low)`` as a sum of two numbers, the second at most the rounding error of the first;
        ``x_low`` is of the size of the rounding errors of x at most.
        """
        if self.anchors is None:
            return self._evaluate(x, x_low, b)
        return _evaluated(self._product(x, x_low), b)

    def product(self, x: torch.Tensor, x_low: torch.Tensor | None = None) -> torch.Tensor:
        """``A (x + x_low)``, rounded once; ``x_low`` is of the size of the rounding errors of x at most."""
        if self.anchors is None:
            return self._evaluate(x, x_low)[0]
        high, low = self._product(x, x_low)
        return low.add_(high).mT

    def transposed_product(self, high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """``A^H (high + low)``, rounded once, of a pair as :meth:`residual` returns it."""
        return self.mH.product(high, low)

    def transposed_pair(self, high: torch.Tensor, low: torch.Tensor) -> Pair:
        """The product ``A^H x`` of some rows of a matrix, as an unevaluated sum of two numbers."""
        transposed = self.mH
        if self.anchors is None:
            return transposed._evaluate(high, low)
        total, rest = transposed._product(high, low)
        return total.mT, rest.mT

    @property
    def _matrix(self) -> torch.Tensor:
        return self.rows.mT if self.transposed else self.rows

    def _evaluate(self, x: torch.Tensor, x_low: torch.Tensor | None, b: torch.Tensor | None = None) -> Pair:
        if self.columns is not None:
            return many_products(self._matrix, x, x_low, b, None if self.turned else self.columns)
        return doubled_product(self._matrix, x, x_low, b)

    def _product(self, x: torch.Tensor, x_low: torch.Tensor | None) -> Pair:
        """``A (x + x_low)`` as a pair whose second is not yet small compared with the first, (batch, k, m)
        each.
        """
        assert self.anchors is not None
        assert self.row_anchors is not None
        x = x.mT
        x_low = None if x_low is None else x_low.mT
        if self.slices is not None:
            factor = factor_of(x, x_low, self.anchors, self.transposed)
            return times_slices(factor, self.slices, self.transposed)
        return _product_by_blocks(self.rows, x, x_low, self.anchors, self.row_anchors, self.transposed)


@dataclass(frozen=True)
class ComplexDoubled(Doubled):
    """Complex matrices, prepared as real ones: by turns real and imaginary parts of the columns of R.

    R is ``rows``, or its transpose where that is the matrix: then products are ``conj(R^H conj(x))``.
    """

    real: Doubled = field(kw_only=True)  # shape (batch, m, 2 n)

    @property
    def cut(self) -> bool:
        return self.real.cut

    def _evaluate(self, x: torch.Tensor, x_low: torch.Tensor | None, b: torch.Tensor | None = None) -> Pair:
        low = torch.zeros_like(x) if x_low is None else x_low
        conjugated = self.transposed != self.turned
        x, low = (y.conj() if conjugated else y for y in (x, low))
        if self.transposed:
            pair = of_adjoint(*self.real.transposed_pair(as_real(x), as_real(low)))
        else:
            found = self.real.mH.transposed_pair(real_vectors(x), real_vectors(low))
            pair = as_complex(found[0]), as_complex(found[1])
        high, low = (y.conj().resolve_conj() if conjugated else y for y in pair)
        return _evaluated((high.mT, low.mT), b)


def as_real(x: torch.Tensor) -> torch.Tensor:
    """Complex numbers, shape (..., n), as real ones, shape (..., 2 n): by turns real and imaginary parts."""
    return torch.view_as_real(x.resolve_conj()).flatten(-2)


def as_complex(x: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`as_real`."""
    return torch.view_as_complex(x.contiguous().unflatten(-1, (x.shape[-1] // 2, 2)))


def real_vectors(x: torch.Tensor) -> torch.Tensor:
    """Real vectors, shape (..., 2 n, 2 k), whose products with ``as_real(A)`` are ``as_real(A X)``."""
    parts = torch.view_as_real(x.resolve_conj())
    columns = torch.stack([torch.view_as_real(x.conj().resolve_conj()), parts.flip(-1)], -1)
    return columns.transpose(-3, -2).flatten(-2).flatten(-3, -2)


def of_adjoint(high: torch.Tensor, low: torch.Tensor) -> Pair:
    """``A^H Y``, given ``as_real(A)^T as_real(Y)`` as a sum of two numbers."""
    (high, second), (low, rest) = (
        (y[..., ::2, :], -1j * y[..., 1::2, :]) for y in map(as_complex, (high, low))
    )
    total, error = two_sum(high, second)
    return total, error + low + rest


def _check(product: Callable[..., Pair], columns: int, device: torch.device, k: int = 1) -> None:
    """Whether rounding errors are kept as well."""
    a = torch.zeros(1, 1, columns, device=device, dtype=torch.float64)
    a[..., -1] = 1 + 2.0**-30
    x = a.clone()
    a[..., 0], x[..., 0] = 1, -1 - 2.0**-29
    x = x.expand(1, k, columns)
    zero = torch.zeros_like(x)
    high, low = (part.flatten().tolist() for part in product(a, x.mT, zero.mT, zero[..., :1].mT))
    if (high, low) != (k * [-(2.0**-60)], k * [0.0]):
        raise ArithmeticError(f"(1 + 2^-29) - (1 + 2^-30)^2 is said to be {high} + {low}")


@trial("The kernel of doubled products", "sliced products take its place")
def _tried(device: torch.device) -> None:
    # One thread sums both products; if the second is added before it is rounded, its error counts twice.
    _check(doubled_product.kernel, 1 + THREADS, device)


@trial("The kernel of doubled products on matrix units", "that of few vectors takes its place")
def _tried_on_units(device: torch.device, tiles: int) -> None:
    k = 8 * tiles
    _check(many_products.kernel, 2, device, k)
    # Integers make no rounding errors, and tell rows, columns and vectors from one another.
    a, x = (
        (torch.arange(m * n, device=device, dtype=torch.float64) * 37 % 101 - 50).view(1, m, n)
        for m, n in ((40, 70), (70, k))
    )
    high, low = many_products.kernel(a, x)
    if not torch.equal(high, a @ x) or low.any():
        raise ArithmeticError(f"integers of {k} vectors are multiplied wrongly")


def _on_units(a: torch.Tensor, x: torch.Tensor, *_: object) -> bool:
    (m, n), k = a.shape[1:], x.shape[2]
    large = k >= MANY and n >= INNER and a.numel() * k >= LARGE
    # Three slices of each vector are to take at most about half of the memory of A.
    if not large or m < 6 * k or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(a.device) >= FP64_UNITS


def _tiles(a: torch.Tensor, x: torch.Tensor, *_: object) -> int:
    """Which kernel: they are compiled one by one."""
    return tiles_of(x.shape[2])


@kernel(doubled_product_cuda, trial=_tried)
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


@kernel(sliced_product_cuda, trial=_tried_on_units, when=_on_units, variant=_tiles)
def many_products(
    a: torch.Tensor,
    x: torch.Tensor,
    x_low: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
) -> Pair:
    """The product for many vectors; ``columns`` as in :meth:`Doubled.from_matrix`."""
    return doubled_product(a, x, x_low, b)


def cuts(device: torch.device) -> bool:
    """Whether sizes of columns matter to :class:`Doubled` there: kernels receive them, or do not slice."""
    return not doubled_product.runs(device)


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


def _product_by_blocks(
    a: torch.Tensor,
    x: torch.Tensor,
    x_low: torch.Tensor | None,
    anchors: torch.Tensor,
    row_anchors: torch.Tensor,
    transposed: bool,
) -> Pair:
    """The product with a large matrix, some rows at a time, or with its transpose, a sum over these."""
    batch, m, n = a.shape
    high, low = (x.new_zeros(batch, x.shape[1], n if transposed else m) for _ in range(2))

    def factor(piece: tuple[slice, ...]) -> torch.Tensor:
        return factor_of(x[piece], None if x_low is None else x_low[piece], anchors, transposed)

    for members in _pieces(batch, BLOCK // (m * n)):
        whole = None if transposed else factor((members,))
        for rows in _pieces(m, BLOCK // n):
            left = factor((members, slice(None), rows)) if whole is None else whole
            part, rest = times_slices(left, slices_of(a[members, rows], row_anchors[members]), transposed)
            if transposed:
                high[members], error = two_sum(high[members], part)
                low[members] += error.add_(rest)
            else:
                high[members, :, rows], low[members, :, rows] = part, rest
    return high, low


def _pieces(size: int, piece: int) -> Iterator[slice]:
    piece = max(1, piece)
    return (slice(start, start + piece) for start in range(0, size, piece))


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
