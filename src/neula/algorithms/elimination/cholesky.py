"""Cholesky factorization by blocks of columns: nearly all of it is large products, in the arithmetic of an
engine.

A block of columns is updated by one product with all that are done (left-looking: each element of A is
written once a block, and no half of a square is computed in vain), its diagonal block is factorized, and what
is below that multiplied by inverses. Diagonal blocks are factorized by recursion: the left half, what is
below it, the square of that subtracted from the right half, the right half (LAPACK's ``potrf2``). Its leaves,
blocks of a hundred columns or so, are inverted, so that solving with them takes products as well.

*Errors.* With products in a format of unit roundoff u, each element of A is changed by at most a rounding of
every update, a few for each block of columns, and by what rounding L costs, ``2 u |L| |L^T|``, next to sums
of the storage precision (Higham 2002, theorem 10.3; Lopez and Mary, "Mixed Precision LU Factorization on GPU
Tensor Cores", 2022, theorem 3, for operands that are rounded). A product with the inverse of a leaf in place
of substitution adds up to the storage precision times the condition number of that leaf, or of two of them
(Higham 2002, section 14.2): leaves stay small, and who needs more than a preconditioner measures what came of
it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap

import torch

from neula.algorithms.elimination.cholesky_factor import CholeskyFactorization, LeadingColumns
from neula.algorithms.elimination.lu_panels import blocks, halves
from neula.algorithms.triangular.inverted import InvertedBlocks, InvertedTuning
from neula.engines import FP32, FP64, Engine, format_of
from neula.engines.tuning import CorrectedTuning
from neula.kernels.cholesky.cholesky import MAX_COLUMNS, cholesky_lower
from neula.kernels.cholesky.cholesky_tiles import factor_inverted
from neula.kernels.launch import ceil_div
from neula.kernels.precision import exact_matmul, exactly
from neula.kernels.products.gemm import multiply_kept
from neula.kernels.products.kept import Kept, keep
from neula.kernels.transposed_copy import transposed_copy

SHIFT = 4.0
"""Multiple of u by which the diagonal of a matrix grows before its factors are rounded to a low format:
rounding could cost a matrix that is barely positive definite its sign (Higham and Pranesh, "Exploiting Lower
Precision Arithmetic in Solving Symmetric Positive Definite Linear Systems and Least Squares Problems", SIAM
J. Sci. Comput. 43, 2021, section 2)."""


TINY = 1e-30
"""In place of a pivot that is zero."""


class FallingPivotsError(ArithmeticError):
    """Pivots fall so fast that factors in a format will hold only rounding errors in some direction.

    ``smallest`` is the smallest eigenvalue as it seems, of the matrix with a diagonal of ones.
    """

    def __init__(self, smallest: float) -> None:
        super().__init__(f"pivots fall, and the smallest eigenvalue will be about {smallest:.1e}")
        self.smallest = smallest


def foresee(pivots: torch.Tensor, n: int, smallest: float) -> None:
    """Give up, by a FallingPivotsError, where an eigenvalue will be below ``smallest``, as the first pivots
    foretell.

    Pivots are those of the matrix of order n with a diagonal of ones. If its eigenvalues fall geometrically
    and its eigenvectors are random, the logarithm of the smallest pivot so far is about quadratic in the
    number of rows, and for all of them about that of the smallest eigenvalue: for condition numbers from 1e2
    to 1e12 within a factor of four by half of the rows. Where a multiple of the identity is added, pivots do
    not fall below that.
    """
    done = len(pivots)
    smallest_so_far = torch.stack([pivots[: done // 2].amin(), pivots.amin()])
    half, whole = smallest_so_far.clamp_min(TINY).log().tolist()
    rows = n / done
    linear, square = 4 * half - whole, 2 * whole - 4 * half
    expected = min(whole, rows * linear + rows**2 * square)
    if expected < math.log(smallest):
        raise FallingPivotsError(math.exp(expected))


@dataclass(frozen=True)
class CholeskyTuning:
    """Orders of the blocks of a Cholesky factorization."""

    cholesky_leaf: int  # that end the recursion
    cholesky_block: int  # of the diagonal that are factorized by recursion; columns that one product updates
    cholesky_inverted: int  # of the parts of these that are inverted: wider ones lose more
    # Elements of finished columns whose product takes as long as a diagonal block, at the same time.
    cholesky_concurrent: int
    double_block: int  # in double precision that are left to the library


@dataclass(frozen=True)
class CholeskyOrders:
    """Orders from which on a way beats the library, or up to which."""

    cholesky: float  # from which on blocks of one matrix do in float32
    batched_cholesky: float  # from which on tiles do, of one matrix or of each of a batch
    tiled_cholesky: int  # up to which tiles of one matrix do
    double_cholesky: float  # from which on blocks of one matrix do in float64


def working_matrices(count: int, n: int, engine: Engine) -> torch.Tensor:
    """Uninitialized workspace for :func:`cholesky`, shape (count, n, n), in column-major order."""
    height = engine.rows(n)
    return torch.empty(count, n, height, dtype=engine.storage, device=engine.device).mT[:, :n]


def cholesky(
    a: torch.Tensor,
    engine: Engine,
    *,
    leaf: int | None = None,
    block: int | None = None,
    shift: float = 0.0,
    give_up: bool = False,
) -> CholeskyFactorization:
    """Factorize ``A = L L^H``, without synchronizing.

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
    block : int, optional
        Order of the diagonal blocks that are factorized by recursion, likewise.
    shift : float
        Multiple of the unit roundoff of the format by which the diagonal grows first.
    give_up : bool
        Whether to look when a sixteenth, an eighth, a quarter and half of the columns are done, and to end
        there if a pivot of each matrix was not positive, or of a single one they fall so fast that one will
        not be. Half of the columns take an eighth of the operations; the device waits. It also looks for
        columns that are better not rounded (:class:`LeadingColumns`).

    Raises
    ------
    FallingPivotsError
        If asked to give up.

    Examples
    --------
    >>> from neula.engines import EmulatedEngine
    >>> a = torch.tensor([[[4.0, 0.0], [2.0, 5.0]]])
    >>> cholesky(a, EmulatedEngine(format="fp16"))
    CholeskyFactorization(lower=tensor([[[2., 0.],
             [1., 2.]]]), order=tensor([0], dtype=torch.int32), leading=None)
    """
    n = a.shape[-1]
    if shift:
        a.diagonal(dim1=1, dim2=2).mul_(1 + shift * engine.format.u)
    if leaf is None:  # those of complex matrices are the library's
        tuning = engine.tuning[CholeskyTuning]
        leaf = tuning.double_block if engine.is_complex else tuning.cholesky_leaf
    width = max(leaf, (block or engine.tuning[CholeskyTuning].cholesky_block) // leaf * leaf)
    work = _BlockedCholesky(a, _operands(a, engine), engine, leaf, 2 * leaf)
    if n <= width:
        work.factorize(slice(0, n))
    else:
        work.by_columns(width, give_up=give_up)
    return CholeskyFactorization(work.low, work.order, work.leading)


def library_cholesky(a: torch.Tensor) -> CholeskyFactorization:
    """Cholesky factors by LAPACK or cuSOLVER, in the precision of A."""
    return CholeskyFactorization(*torch.linalg.cholesky_ex(a))


def recursion_pays(n: int, engine: Engine) -> bool:
    """Whether the recursion is faster than the library for one matrix, or has an arithmetic of its own."""
    if engine.format == format_of(engine.storage):
        return engine.format is FP32 and n >= engine.tuning[CholeskyOrders].cholesky
    return True


def _operands(a: torch.Tensor, engine: Engine) -> torch.Tensor:
    """Room for L as the unit reads it: A itself where that is no other."""
    if engine.operand_buffer(a[:, :0, :0]) is None:
        return a
    return torch.empty_strided(a.shape, a.stride(), dtype=engine.operand_dtype, device=a.device)


@dataclass
class _BlockedCholesky:
    """The matrices on their way, and what is known of L."""

    a: torch.Tensor  # shape (batch, n, n): updates are summed here
    low: torch.Tensor  # shape (batch, n, n): L, each element rounded once, when it is done
    engine: Engine
    leaf: int
    inverted: int  # order of the diagonal blocks that are inverted
    inverses: dict[int, torch.Tensor] = field(default_factory=dict)  # L^-H of these, by where they begin
    # L^-1 of these in parts, where blocks below are multiplied in parts.
    operands: dict[int, Kept] = field(default_factory=dict)
    orders: list[torch.Tensor] = field(default_factory=list)  # shape (leaves, batch): what leaves have found
    # L of each matrix in the parts that are multiplied, below diagonal blocks, where an engine has such.
    kept: list[Kept] = field(default_factory=list)
    workspace: Kept | None = None  # for what is below a diagonal block, before it is multiplied
    leading: LeadingColumns | None = None  # the first block of columns, where that is not to be rounded
    unrounded: int = 0  # leading columns that stay in a as well, not rounded, until that is known

    @property
    def order(self) -> torch.Tensor:
        """The smallest of those that the leaves have found, shape (batch,)."""
        if not self.orders:
            return torch.zeros(len(self.a), dtype=torch.int32, device=self.a.device)
        found = torch.cat(self.orders)
        starts = torch.arange(len(found), dtype=torch.int32, device=found.device)[:, None] * self.leaf
        most = torch.iinfo(torch.int32).max
        first = torch.where(found > 0, found + starts, most).amin(0)
        return torch.where(first == most, 0, first)

    def by_columns(self, width: int, *, give_up: bool) -> None:
        """Factorize the whole matrix in blocks of columns; ``give_up`` may raise a FallingPivotsError.

        A diagonal block keeps few units busy for a long time. Beside it the next columns are updated by all
        that is done, so that afterwards these alone are left for them.
        """
        n = self.a.shape[1]
        if give_up and len(self.a) == 1 and self.low is not self.a:
            self.unrounded = width
        sizes = self.a.diagonal(dim1=1, dim2=2).real.sqrt()  # no element of a row of L is larger
        self.kept = list(filter(None, (self.engine.kept(n, n, size) for size in sizes)))
        if len(self.a) == 1:
            # Schur complements have no elements larger than that.
            largest = sizes[0] * sizes[0].amax()
            inverted = self.leaf
            while 2 * inverted <= min(width, self.engine.tuning[CholeskyTuning].cholesky_inverted):
                inverted *= 2
            self.workspace = self.engine.kept(n, inverted, largest, exact=True)
            self.inverted = self.inverted if self.workspace is None else inverted
        steps = list(blocks(slice(0, n), width))
        for k, following in zip(steps, [*steps[1:], None], strict=True):
            beside = self._beside(k)
            if following is None or beside.stop == 0:
                self._replayed(k)
            else:
                update = partial(self._update_pieces, following, beside)
                self.engine.concurrently(update, partial(self._replayed, k))
            if following is None or (give_up and self._is_lost(k, sizes)):
                return
            below = slice(k.stop, n)
            self.solve(below, k)
            for kept, lower in zip(self.kept, self.low, strict=False):
                keep(lower[below, k], kept.block(below, k))
            if k.start < self.unrounded:
                self.leading = LeadingColumns.from_columns(self.a[0, :, k], sizes[0])
            self.update(below, following, slice(beside.stop, k.stop))

    def _beside(self, k: slice) -> slice:
        """Finished columns by which the next ones are updated during a diagonal block.

        Parts of operands are multiplied on fewer units meanwhile: by so many columns as take as long.
        """
        if len(self.a) > 1:
            return slice(0, 0)
        if not self.kept:
            return slice(0, k.start)
        rows = max(1, self.a.shape[1] - k.stop)
        some = self.engine.tuning[CholeskyTuning].cholesky_concurrent // rows // self.leaf * self.leaf
        return slice(0, min(k.start, max(some, self.leaf)))

    def update(self, rows: slice, columns: slice, done: slice, spare: int = 0) -> None:
        """Update a block with the finished columns: A22 -= L21 L21^H."""
        target = self.a[:, rows, columns]
        if self.leading is not None and done.start == 0 < done.stop:
            self.leading.subtract(target[0], rows, columns, spare)
            done = slice(self.leading.columns.shape[1], done.stop)
        if done.start == done.stop:
            return
        if not self.kept or min(target.shape[1:]) < self.engine.tuning[CorrectedTuning].corrected_from:
            self.subtract(rows, columns, done)
            return
        for kept, c in zip(self.kept, target, strict=True):
            x, y = kept.block(rows, done), kept.block(columns, done)
            multiply_kept(c, x, y, alpha=-1.0, beta=1.0, spare=spare)

    def _update_pieces(self, columns: slice, done: slice) -> None:
        """The next columns, in products that leave units to concurrent work."""
        n, start = self.a.shape[1], columns.start
        if self.kept:
            self.update(slice(start, n), columns, done, self.engine.spare)
            return
        if self.leading is not None:
            self.leading.subtract(self.a[0, start:, columns], slice(start, n), columns, self.engine.spare)
            done = slice(self.leading.columns.shape[1], done.stop)
        for part, _ in self.engine.pieces(n - start, columns.stop - start):
            self.update(slice(start + part.start, start + part.stop), columns, done)

    def _is_lost(self, k: slice, sizes: torch.Tensor) -> bool:
        """Whether all matrices have a pivot that is not positive; the device waits at four places."""
        n = self.a.shape[1]
        places = [place for place in (n // 16, n // 8, n // 4, n // 2) if k.start < place <= k.stop]
        if not places:
            return False
        if bool((self.order > 0).all()):
            return True
        if len(self.a) == 1 and places[-1] >= n // 4:
            pivots = (self.low[0].diagonal()[: k.stop].real.to(sizes.dtype) / sizes[0, : k.stop]).square()
            smallest = SHIFT * self.engine.format.u
            if self.leading is None:
                foresee(pivots, n, smallest)
            else:  # then only the shift hides small eigenvalues
                foresee((pivots - smallest).clamp_min(0), n, smallest / 2)
        return False

    def factorize(self, k: slice) -> None:
        """A diagonal block becomes one of L, by recursion or by a kernel."""
        if self._by_kernel(k):
            return
        if k.stop - k.start <= self.leaf:
            self._leaf(k)
            return
        left, right = halves(k, self.leaf)
        self.factorize(left)
        self.solve(right, left)
        self.subtract(right, right, left)
        self.factorize(right)
        if k.stop - k.start <= self.inverted:
            self._join(left, right)

    def solve(self, rows: slice, columns: slice) -> None:
        """A block below a diagonal one becomes ``A L^-H``."""
        width = columns.stop - columns.start
        if width > self.inverted:
            left, right = halves(columns, self.leaf)
            self.solve(rows, left)
            self.subtract(rows, right, left)
            self.solve(rows, right)
            return
        block = self.a[:, rows, columns].mT  # column-major matrices by rows
        if self.workspace is None:
            block.copy_(exact_matmul(self.inverses[columns.start].mT, block))
        else:
            below = self.workspace.block(rows, slice(0, width))
            keep(block[0].mT, below)
            target = (self.a if columns.start < self.unrounded else self.low)[0, rows, columns]
            multiply_kept(target, below, self.operands[columns.start], alpha=1.0, beta=0.0, spare=0)
            if columns.start >= self.unrounded:  # rounded as it was stored
                return
        self._round(rows, columns)

    def subtract(self, rows: slice, columns: slice, done: slice) -> None:
        """Subtract the product of finished columns from a block."""
        target, x, y = self.a[:, rows, columns], self.low[:, rows, done], self.low[:, columns, done].mH
        if len(target) == 1:
            self.engine.gemm(x[0], y[0], target[0], alpha=-1.0, beta=1.0)
        else:
            self.engine.subtract_bmm(x, y, target)

    def _replayed(self, k: slice) -> None:
        """Factorize a diagonal block in a CUDA graph for all blocks of its size: launches take longest."""
        engine, leaf, inverted, parts = self.engine, self.leaf, self.inverted, self.workspace is not None
        by_kernel = self._has_kernel(k)

        def factorized(columns: torch.Tensor) -> tuple[torch.Tensor, ...]:
            block = columns.mT
            low = block if by_kernel else _operands(block, engine)  # rounded at the end
            work = _BlockedCholesky(block, low, engine, leaf, inverted)
            work.factorize(slice(0, block.shape[1]))
            inverses = list(work.inverses.values())
            if parts:
                operands = [Kept.from_matrix(x[0].mT) for x in inverses]
                inverses = [tensor for x in operands for tensor in (x.parts, x.largest)]
            return block, torch.cat(work.orders), *inverses

        key = ("cholesky", engine.arithmetic.name, leaf, inverted, parts)
        # A copy, which may be overwritten, with columns that lie as they do in A.
        found, orders, *inverses = engine.replay(factorized, (self.a[:, k, k].mT.contiguous(),), key)
        for x, wide, low in zip(found, self.a[:, k, k], self.low[:, k, k], strict=True):
            if self.low is self.a or k.start < self.unrounded:
                wide.copy_(x)
            if self.low is not self.a:
                engine.round(x, low)
        self.orders.append(orders)
        starts = range(k.start, k.stop, inverted)
        if parts:
            pairs = zip(inverses[::2], inverses[1::2], strict=True)
            self.operands = dict(zip(starts, starmap(Kept, pairs), strict=True))
        else:
            self.inverses = dict(zip(starts, inverses, strict=True))

    def _has_kernel(self, k: slice) -> bool:
        block = self.a[:, k, k]
        single = block.dtype == torch.float32 and self.leaf == MAX_COLUMNS
        return single and factor_inverted.takes(block, block.shape[-1])

    def _by_kernel(self, k: slice) -> bool:
        """Factorize and invert one diagonal block by a kernel; for batches the library is faster."""
        if not self._has_kernel(k):
            return False
        block = self.a[:, k, k]
        n = block.shape[-1]
        (lower,), (inverse,), order = factor_inverted(block, n)
        transposed_copy(block[0], lower)
        # Counted from the first leaf on.
        self.orders.append(torch.cat([order[None], order.new_zeros(ceil_div(n, self.leaf) - 1, 1)]))
        for part in blocks(slice(0, n), self.inverted):
            self.inverses[k.start + part.start] = inverse.mT[:, part, part]
        self._round(k, k)
        return True

    def _leaf(self, k: slice) -> None:
        if k.start == k.stop:
            return
        self.inverses[k.start], order = cholesky_lower(self.a[:, k, k])
        self.orders.append(order[None])
        self._round(k, k)

    def _join(self, left: slice, right: slice) -> None:
        """``L^-H`` of two blocks from those of each: half as many products to solve with them."""
        first, second = self.inverses[left.start], self.inverses.pop(right.start)
        h, n = first.shape[-1], first.shape[-1] + second.shape[-1]
        whole = first.new_zeros(len(first), n, n)
        whole[:, :h, :h], whole[:, h:, h:] = first, second
        beside, between = whole[:, :h, h:], exact_matmul(self.a[:, right, left].mH, second)
        exactly(torch.baddbmm, beside, first, between, out=beside, alpha=-1.0, beta=0.0)
        self.inverses[left.start] = whole

    def _round(self, rows: slice, columns: slice) -> None:
        if self.low is self.a:
            return
        for x, out in zip(self.a[:, rows, columns], self.low[:, rows, columns], strict=True):
            self.engine.round(x, out)


def blocks_pay(a: torch.Tensor, engine: Engine) -> bool:
    """Whether :func:`double_cholesky` overwrites matrices, since it is faster than the library."""
    return len(a) == 1 and a.shape[-1] >= engine.tuning[CholeskyOrders].double_cholesky


def double_cholesky(a: torch.Tensor, engine: Engine) -> CholeskyFactorization:
    """Factors of matrices in double precision, shape (batch, n, n), of which the lower triangles are read.

    By the library, or by blocks of columns where products are enough to hide what takes its columns one after
    the other: diagonal blocks are the library's, while products update the columns after them.

    >>> from neula.engines import EmulatedEngine
    >>> a = torch.tensor([[[4.0, 0.0], [2.0, 5.0]]], dtype=torch.float64)
    >>> double_cholesky(a, EmulatedEngine()).lower
    tensor([[[2., 0.],
             [1., 2.]]], dtype=torch.float64)
    """
    if not blocks_pay(a, engine):
        return library_cholesky(a)
    block = engine.tuning[CholeskyTuning].double_block
    return cholesky(a, engine.using(FP64), leaf=block, block=block)


def inverted_cholesky(a: torch.Tensor, engine: Engine) -> InvertedBlocks:
    """L of matrices that may turn out not to be definite, to solve with: then solutions are NaN.

    The lower triangles, in double precision, are read, and may be overwritten where :func:`blocks_pay`. All
    of L is one block that is inverted where a product takes less time than launches of several do.
    """
    n, tuning = a.shape[-1], engine.tuning
    width = n if n <= tuning[InvertedTuning].inverted_whole else tuning[InvertedTuning].width(n)
    if width and n <= tuning[CholeskyOrders].tiled_cholesky and factor_inverted.takes(a, width):
        found = factor_inverted(a, width)
        order, blocks = found.order, InvertedBlocks(found.lower, found.inverses, a.dtype, upper=False)
    else:
        lower, order, _ = double_cholesky(a, engine)
        blocks = InvertedBlocks.from_factor(lower, lower.dtype, upper=False, width=width)
    first = blocks.inverses[0] if len(blocks.inverses) else blocks.t
    # Of a first unknown that is NaN, all that is solved for with both factors becomes NaN.
    first[..., :1, :1].masked_fill_((order > 0)[:, None, None], torch.nan)
    return blocks
