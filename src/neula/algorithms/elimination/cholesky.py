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

from dataclasses import dataclass, field
from functools import partial
from itertools import starmap

import torch

from neula.algorithms.elimination.cholesky_blocks import Blocks, operands_of
from neula.algorithms.elimination.cholesky_factor import Cholesky
from neula.algorithms.elimination.falling_pivots import foresee
from neula.algorithms.elimination.leading import Leading
from neula.algorithms.elimination.lu_panels import blocks
from neula.engines import FP32, Engine, format_of
from neula.kernels.cholesky_block import LEAF, factor_lower
from neula.kernels.kept import Kept, keep, multiply_kept

SHIFT = 4.0
"""Multiple of u by which the diagonal of a matrix grows before its factors are rounded to a low format:
rounding could cost a matrix that is barely positive definite its sign (Higham and Pranesh, "Exploiting Lower
Precision Arithmetic in Solving Symmetric Positive Definite Linear Systems and Least Squares Problems", SIAM
J. Sci. Comput. 43, 2021, section 2)."""


def working_matrices(count: int, n: int, engine: Engine) -> torch.Tensor:
    """Uninitialized room for :func:`cholesky`, shape (count, n, n): column-major, as the engine has it."""
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
    block : int, optional
        Order of the diagonal blocks that are factorized by recursion, likewise.
    shift : float
        Multiple of the unit roundoff of the format by which the diagonal grows first.
    give_up : bool
        Whether to look when a sixteenth, an eighth, a quarter and half of the columns are done, and to end
        there if a pivot of each matrix was not positive, or of a single one they fall so fast that one will
        not be. Half of the columns take an eighth of the operations; the device waits. It also looks for
        columns that are better not rounded (:mod:`neula.algorithms.elimination.leading`).

    Returns
    -------
    Cholesky

    Raises
    ------
    FallingPivotsError
        If asked to give up.

    Examples
    --------
    >>> from neula.engines import EmulatedEngine
    >>> a = torch.tensor([[[4.0, 0.0], [2.0, 5.0]]])
    >>> cholesky(a, EmulatedEngine(format="fp16"))
    Cholesky(lower=tensor([[[2., 0.],
             [1., 2.]]]), order=tensor([0], dtype=torch.int32), leading=None)
    """
    n = a.shape[-1]
    if shift:
        a.diagonal(dim1=1, dim2=2).mul_(1 + shift * engine.format.u)
    leaf = leaf or engine.tuning.cholesky_leaf
    width = max(leaf, (block or engine.tuning.cholesky_block) // leaf * leaf)
    work = _Columns(a, operands_of(a, engine), engine, leaf, 2 * leaf)
    if n <= width:
        work.factorize(slice(0, n))
    else:
        work.by_columns(width, give_up=give_up)
    return Cholesky(work.low, work.order, work.leading)


def library_cholesky(a: torch.Tensor) -> Cholesky:
    """The same by LAPACK or cuSOLVER, in the precision of A."""
    return Cholesky(*torch.linalg.cholesky_ex(a))


def recursion_pays(n: int, engine: Engine) -> bool:
    """Whether the recursion is faster than the library for one matrix, or has an arithmetic of its own."""
    if engine.format == format_of(engine.storage):
        return engine.format is FP32 and n >= engine.tuning.cholesky
    return True


@dataclass
class _Columns(Blocks):
    """The same by blocks of columns.

    Attributes
    ----------
    kept : list of Kept
        L of each matrix in the parts that are multiplied, below diagonal blocks, where an engine has such.
    leading : Leading, optional
        The first block of columns, where that is not to be rounded.
    """

    kept: list[Kept] = field(default_factory=list)
    leading: Leading | None = None

    def by_columns(self, width: int, *, give_up: bool) -> None:
        """All of it, in blocks of columns.

        A diagonal block keeps few units busy for a long time. So beside it everything else is done, and after
        it only what the next diagonal block waits for; of the first columns all, since the host looks at
        them, and so of a batch, whose products leave no units free.

        Raises
        ------
        FallingPivotsError
            If asked to give up.
        """
        n = self.a.shape[1]
        if give_up and len(self.a) == 1 and self.low is not self.a:
            self.unrounded = width
        sizes = self.a.diagonal(dim1=1, dim2=2).sqrt()  # no element of a row of L is larger
        self.kept = list(filter(None, (self.engine.kept(n, n, size) for size in sizes)))
        if len(self.a) == 1:
            # Schur complements have no elements larger than that.
            largest = sizes[0] * sizes[0].amax()
            inverted = self.leaf
            while 2 * inverted <= min(width, self.engine.tuning.cholesky_inverted):
                inverted *= 2
            self.room = self.engine.kept(n, inverted, largest, exact=True)
            self.inverted = self.inverted if self.room is None else inverted
        steps = list(blocks(slice(0, n), width))
        before: slice | None = None  # columns of which no more is done than the diagonal block waited for
        for k, following in zip(steps, [*steps[1:], None], strict=True):
            whole = k.start == 0 or len(self.a) > 1
            if whole or following is None:
                self._replayed(k)
            else:
                self.engine.beside(partial(self._catch_up, before, k, following), partial(self._replayed, k))
            if following is None or (give_up and self._is_lost(k, sizes)):
                return
            # What is read beside a block has stayed until both were queued.
            self.inverses = {start: x for start, x in self.inverses.items() if start >= k.start}
            self.operands = {start: x for start, x in self.operands.items() if start >= k.start}
            rows = slice(k.stop, n) if whole else following
            self.solve(rows, k)
            self._keep(rows, k)
            if k.start < self.unrounded:
                self.leading = Leading.of(self.a[0, :, k], sizes[0])
            self.update(rows, following, slice(0, k.stop) if whole else k)
            before = None if whole else k

    def _catch_up(self, before: slice | None, k: slice, following: slice) -> None:
        """What a diagonal block did not wait for, and of the next columns what all before it contribute."""
        n = self.a.shape[1]
        if before is not None:
            below = slice(k.stop, n)
            self._solve_beside(below, before)
            self._update_beside(below, k, before)
        self._update_beside(slice(following.start, n), following, slice(0, k.start))

    def update(self, rows: slice, columns: slice, done: slice, spare: int = 0) -> None:
        """What blocks of columns that are done contribute to a block."""
        target = self.a[:, rows, columns]
        if self.leading is not None and done.start == 0 < done.stop:
            self.leading.subtract(target[0], rows, columns, spare)
            done = slice(self.leading.columns.shape[1], done.stop)
        if done.start == done.stop:
            return
        if not self.kept or min(target.shape[1:]) < self.engine.tuning.corrected_from:
            self.subtract(rows, columns, done)
            return
        for kept, c in zip(self.kept, target, strict=True):
            x, y = kept.block(rows, done), kept.block(columns, done)
            multiply_kept(c, x, y, alpha=-1.0, beta=1.0, spare=spare)

    def _update_beside(self, rows: slice, columns: slice, done: slice) -> None:
        """The same, in products that leave units to what runs beside them."""
        if self.kept:
            self.update(rows, columns, done, self.engine.spare)
            return
        if self.leading is not None and done.start == 0:
            self.leading.subtract(self.a[0, rows, columns], rows, columns, self.engine.spare)
            done = slice(self.leading.columns.shape[1], done.stop)
        for part in self._parts(rows, columns):
            self.update(part, columns, done)

    def _solve_beside(self, rows: slice, columns: slice) -> None:
        """A block becomes one of L, likewise."""
        for part in [rows] if self.room is not None else self._parts(rows, columns):
            self.solve(part, columns, self.engine.spare)
        self._keep(rows, columns)

    def _parts(self, rows: slice, columns: slice) -> list[slice]:
        """Rows, as many at a time as leave some units free."""
        height, width = rows.stop - rows.start, columns.stop - columns.start
        if height <= width:
            return [rows]
        parts = (part for part, _ in self.engine.pieces(height, width))
        return [slice(rows.start + part.start, rows.start + part.stop) for part in parts]

    def _keep(self, rows: slice, columns: slice) -> None:
        """Split what is done of L, where it is multiplied in parts."""
        for kept, lower in zip(self.kept, self.low, strict=False):
            keep(lower[rows, columns], kept.block(rows, columns))

    def _is_lost(self, k: slice, sizes: torch.Tensor) -> bool:
        """Whether all matrices have a pivot that is not positive; the device waits at four places."""
        n = self.a.shape[1]
        places = [place for place in (n // 16, n // 8, n // 4, n // 2) if k.start < place <= k.stop]
        if not places:
            return False
        if bool((self.order > 0).all()):
            return True
        if len(self.a) == 1 and places[-1] >= n // 4:
            pivots = (self.low[0].diagonal()[: k.stop].to(sizes.dtype) / sizes[0, : k.stop]).square()
            smallest = SHIFT * self.engine.format.u
            if self.leading is None:
                foresee(pivots, n, smallest)
            else:  # then nothing but the shift is in the way of small eigenvalues
                foresee((pivots - smallest).clamp_min(0), n, smallest / 2)
        return False

    def _replayed(self, k: slice) -> None:
        """The same by a graph that others of its size have, too: what takes time here are launches."""
        engine, leaf, inverted, parts = self.engine, self.leaf, self.inverted, self.room is not None
        exact, wide = self._is_exact(k), k.start < self.unrounded

        def factorized(columns: torch.Tensor) -> tuple[torch.Tensor, ...]:
            block = columns.mT
            low = block if exact else operands_of(block, engine)
            work = Blocks(block, low, engine, leaf, inverted)
            work.factorize(slice(0, block.shape[1]))
            inverses = list(work.inverses.values())
            if parts:
                operands = [Kept.of(x[0].mT) for x in inverses]
                inverses = [tensor for x in operands for tensor in (x.parts, x.largest)]
            return block if wide else low, torch.cat(work.orders), *inverses

        key = ("cholesky", engine.arithmetic.name, leaf, inverted, parts, exact, wide)
        # A copy, which may be overwritten, with columns that lie as they do in A.
        found, orders, *inverses = engine.replay(factorized, (self.a[:, k, k].mT.contiguous(),), key)
        (self.a if wide else self.low)[:, k, k] = found
        self.orders.append(orders)
        starts = range(k.start, k.stop, inverted)
        if parts:
            pairs = zip(inverses[::2], inverses[1::2], strict=True)
            self.operands |= zip(starts, starmap(Kept, pairs), strict=True)
        else:
            self.inverses |= zip(starts, inverses, strict=True)
        if wide:
            self._round(k, k)

    def _is_exact(self, k: slice) -> bool:
        """Whether a diagonal block is factorized without rounding it: the first one that is looked at."""
        if k.start >= self.unrounded:
            return False
        by_kernel = self.leaf == LEAF and factor_lower.takes(self.a[0, k, k], None)
        return by_kernel or self.engine.operand_dtype == self.engine.storage
