"""Cholesky factorization by recursion: nearly all of it is large products, in the arithmetic of an engine.

Factorize the left half, solve for what is below it, subtract the square of that from the right half, and
factorize what remains: LAPACK's ``potrf2``, whose leaves here are blocks of a hundred columns or so. They are
inverted, so that solving with them takes products as well.

*Errors.* With products in a format of unit roundoff u, each element of A is changed by at most ``(2 + log2
n)`` roundings of its updates and by what rounding L costs, ``2 u |L| |L^T|``, next to sums of the storage
precision (Higham 2002, theorem 10.3; Lopez and Mary, "Mixed Precision LU Factorization on GPU Tensor Cores",
2022, theorem 3, for operands that are rounded). A product with the inverse of a leaf in place of substitution
adds up to the storage precision times the condition number of that leaf, or of two of them (Higham 2002,
section 14.2): leaves stay small, and who needs more than a preconditioner measures what came of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from neula.algorithms.triangular.inverted import InvertedBlocks
from neula.engines import FP32, Engine, format_of
from neula.kernels.cholesky import cholesky_lower
from neula.kernels.precision import exact_matmul

SHIFT = 4.0
"""Multiple of u by which the diagonal of a matrix grows before its factors are rounded to a low format:
rounding could cost a matrix that is barely positive definite its sign (Higham and Pranesh, "Exploiting Lower
Precision Arithmetic in Solving Symmetric Positive Definite Linear Systems and Least Squares Problems", SIAM
J. Sci. Comput. 43, 2021, section 2)."""

SQUARE = 1024
"""Order of the diagonal blocks of an update that are computed as a whole: half of what they take is wasted,
and smaller products are slower by more than that."""


REPLAYED = 1024
"""Order of diagonal blocks of a larger matrix up to which their dozens of small launches are replayed from
one CUDA graph: what takes time there is Python."""


class Cholesky(NamedTuple):
    """``A = L L^T`` of a batch, about.

    Attributes
    ----------
    lower : Tensor, shape (batch, n, n)
        L in the lower triangles, as the engine's unit reads it; what is above the diagonal means nothing.
    order : Tensor, shape (batch,)
        int32: 0, or the order of the first leading minor that is not positive; then L means nothing.
    """

    lower: torch.Tensor
    order: torch.Tensor


def working_matrices(count: int, n: int, engine: Engine) -> torch.Tensor:
    """Uninitialized room for :func:`cholesky`, shape (count, n, n): column-major, as the engine has it."""
    height = engine.rows(n)
    return torch.empty(count, n, height, dtype=engine.storage, device=engine.device).mT[:, :n]


def cholesky(
    a: torch.Tensor,
    engine: Engine,
    *,
    leaf: int | None = None,
    shift: float = 0.0,
    give_up: bool = False,
) -> Cholesky:
    """Factorize ``A = L L^T``, without synchronizing.

    Parameters
    ----------
    a : Tensor, shape (batch, n, n)
        In the storage precision of the engine, column-major where that is to be fast
        (:func:`working_matrices`); the lower triangles are read, and all of it is overwritten. Elements
        should be scaled to the range of the format (:mod:`neula.algorithms.elimination.equilibrate`).
    engine : Engine
        Multiplies.
    leaf : int, optional
        Order of the blocks that end the recursion; what suits the engine by default.
    shift : float
        Multiple of the unit roundoff of the format by which the diagonal grows first.
    give_up : bool
        Whether to look at the leading quarter and half when they are done, and to end there if a pivot of
        each matrix was not positive: they take a 64th and an eighth of the operations, and the device waits
        twice.

    Returns
    -------
    Cholesky

    Examples
    --------
    >>> from neula.engines import EmulatedEngine
    >>> a = torch.tensor([[[4.0, 0.0], [2.0, 5.0]]])
    >>> cholesky(a, EmulatedEngine(format="fp16"))
    Cholesky(lower=tensor([[[2., 0.],
             [1., 2.]]]), order=tensor([0], dtype=torch.int32))
    """
    n = a.shape[-1]
    if shift:
        a.diagonal(dim1=1, dim2=2).mul_(1 + shift * engine.format.u)
    work = _Recursion(a, _operands(a, engine), engine, leaf or engine.tuning.cholesky_leaf, give_up)
    work.factorize(slice(0, n))
    return Cholesky(work.low, work.order)


def library_cholesky(a: torch.Tensor) -> Cholesky:
    """The same by LAPACK or cuSOLVER, in the precision of A."""
    return Cholesky(*torch.linalg.cholesky_ex(a))


def recursion_pays(n: int, engine: Engine) -> bool:
    """Whether the recursion is faster than the library for one matrix, or has an arithmetic of its own."""
    if engine.format == format_of(engine.storage):
        return engine.format is FP32 and n >= engine.tuning.cholesky
    return True


def _operands(a: torch.Tensor, engine: Engine) -> torch.Tensor:
    """Room for L as the unit reads it: A itself where that is no other."""
    if engine.operand_buffer(a[:, :0, :0]) is None:
        return a
    return torch.empty_strided(a.shape, a.stride(), dtype=engine.operand_dtype, device=a.device)


@dataclass
class _Recursion:
    """The matrices on their way, and what is known of L.

    Attributes
    ----------
    a : Tensor, shape (batch, n, n)
        Updates are summed here.
    low : Tensor, shape (batch, n, n)
        L, each element rounded once, when it is done.
    inverses : dict of int to Tensor
        ``L^-T`` of pairs of leaves on the diagonal, by where they begin.
    orders : list of Tensor
        What each leaf has found.
    """

    a: torch.Tensor
    low: torch.Tensor
    engine: Engine
    leaf: int
    give_up: bool
    inverses: dict[int, torch.Tensor] = field(default_factory=dict)
    orders: list[torch.Tensor] = field(default_factory=list)

    @property
    def order(self) -> torch.Tensor:
        """The smallest of those that the leaves have found, shape (batch,)."""
        if not self.orders:
            return torch.zeros(len(self.a), dtype=torch.int32, device=self.a.device)
        found = torch.stack(self.orders)
        starts = torch.arange(len(found), dtype=torch.int32, device=found.device)[:, None] * self.leaf
        most = torch.iinfo(torch.int32).max
        first = torch.where(found > 0, found + starts, most).amin(0)
        return torch.where(first == most, 0, first)

    def factorize(self, k: slice) -> None:
        """A diagonal block becomes one of L."""
        width = k.stop - k.start
        if width <= self.leaf:
            self._leaf(k)
            return
        if width <= REPLAYED < self.a.shape[1]:
            self._replayed(k)
            return
        left, right = self._halves(k)
        self.factorize(left)
        if self._is_lost(left):
            return
        self.solve(right, left)
        self.subtract_square(right, left)
        self.factorize(right)
        if width <= 2 * self.leaf:
            self._join(left, right)

    def _is_lost(self, k: slice) -> bool:
        looks = self.give_up and k.start == 0 and 4 * k.stop >= self.a.shape[1]
        return looks and bool((self.order > 0).all())

    def solve(self, rows: slice, columns: slice) -> None:
        """A block below a diagonal one becomes ``A L^-T``."""
        if columns.stop - columns.start <= 2 * self.leaf:
            block = self.a[:, rows, columns].mT  # column-major matrices by rows
            block.copy_(exact_matmul(self.inverses[columns.start].mT, block))
            self._round(rows, columns)
            return
        left, right = self._halves(columns)
        self.solve(rows, left)
        self.subtract(rows, right, left)
        self.solve(rows, right)

    def subtract_square(self, k: slice, done: slice) -> None:
        """What columns that are done contribute to the lower triangle of a diagonal block."""
        if k.stop - k.start <= max(SQUARE, self.leaf):
            self.subtract(k, k, done)
            return
        top, bottom = self._halves(k)
        self.subtract_square(top, done)
        self.subtract(bottom, top, done)
        self.subtract_square(bottom, done)

    def subtract(self, rows: slice, columns: slice, done: slice) -> None:
        """What columns that are done contribute to a block."""
        target, x, y = self.a[:, rows, columns], self.low[:, rows, done], self.low[:, columns, done].mT
        if len(target) == 1 or self._large(x, y):
            for c, left, right in zip(target, x, y, strict=True):
                self.engine.gemm(left, right, c, alpha=-1.0, beta=1.0)
        else:
            self.engine.subtract_bmm(x, y, target)

    def _large(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        """Whether products of a batch one by one are faster, since they are corrected ones then."""
        sizes = (*x.shape[1:], y.shape[2])
        return self.engine.arithmetic.corrected and min(sizes) >= self.engine.tuning.corrected_from

    def _replayed(self, k: slice) -> None:
        """The same for a block of few large products, by a graph that others of its size have, too."""
        engine, leaf, width = self.engine, self.leaf, k.stop - k.start

        def factorized(block: torch.Tensor) -> tuple[torch.Tensor, ...]:
            block = block.clone()
            work = _Recursion(block, _operands(block, engine), engine, leaf, give_up=False)
            work.factorize(slice(0, width))
            return block, *work.inverses.values(), *work.orders

        key = ("cholesky", engine.arithmetic.name, leaf)
        found, *rest = engine.replay(factorized, (self.a[:, k, k].contiguous(),), key)
        self.a[:, k, k] = found
        starts = range(k.start, k.stop, 2 * leaf)
        self.inverses.update(zip(starts, rest[: len(starts)], strict=True))
        self.orders += rest[len(starts) :]
        self._round(k, k)

    def _leaf(self, k: slice) -> None:
        if k.start == k.stop:
            return
        self.inverses[k.start], order = cholesky_lower(self.a[:, k, k])
        self.orders.append(order)
        self._round(k, k)

    def _join(self, left: slice, right: slice) -> None:
        """``L^-T`` of two leaves from those of each: half as many products to solve with them."""
        first, second = self.inverses[left.start], self.inverses.pop(right.start)
        beside = exact_matmul(first, exact_matmul(self.a[:, right, left].mT, second))
        h, n = first.shape[-1], first.shape[-1] + second.shape[-1]
        whole = first.new_zeros(len(first), n, n)
        whole[:, :h, :h], whole[:, h:, h:], whole[:, :h, h:] = first, second, -beside
        self.inverses[left.start] = whole

    def _round(self, rows: slice, columns: slice) -> None:
        if self.low is self.a:
            return
        for x, out in zip(self.a[:, rows, columns], self.low[:, rows, columns], strict=True):
            self.engine.round(x, out)

    def _halves(self, k: slice) -> tuple[slice, slice]:
        """Two parts, the first a power of two times a leaf: blocks of few different sizes."""
        half = self.leaf
        while 2 * half < k.stop - k.start:
            half *= 2
        return slice(k.start, k.start + half), slice(k.start + half, k.stop)


class NotPositiveDefiniteError(ArithmeticError):
    """A pivot is not positive: A, as it was rounded, is not positive definite.

    Attributes
    ----------
    order : int
        Of the leading minor that is not positive.
    """

    def __init__(self, order: int) -> None:
        super().__init__(f"the leading minor of order {order} is not positive")
        self.order = order


@dataclass(frozen=True)
class CholeskyFactor:
    """``A = L L^T``, about, of one matrix, to solve with.

    Attributes
    ----------
    lower : Tensor, shape (n, n)
        L in its lower triangle, in any format.
    solver : InvertedBlocks
        L, to solve with in some precision.
    width : int
        Of the diagonal blocks that are inverted; 0 where the library substitutes.
    """

    lower: torch.Tensor
    solver: InvertedBlocks
    width: int

    @classmethod
    def of(cls, lower: torch.Tensor, storage: torch.dtype, width: int) -> CholeskyFactor:
        """Prepare to solve in some precision."""
        return cls(lower, InvertedBlocks.of(lower, storage, upper=False, width=width), width)

    @property
    def growth(self) -> float:
        """1: elements of L are at most the square root of those of A (Higham 2002, section 10.1)."""
        return 1.0

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        x = self.solver.solve(b.to(self.solver.dtype, copy=True))
        return self.solver.mT.solve(x).double()

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        return self.solve(b)

    def in_double(self) -> CholeskyFactor:
        return CholeskyFactor.of(self.lower, torch.float64, self.width)
