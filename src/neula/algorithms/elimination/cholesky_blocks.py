"""Diagonal blocks of a Cholesky factor by recursion, and what is below them by their inverses."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from neula.algorithms.elimination.lu_panels import blocks
from neula.engines import Engine
from neula.kernels.cholesky import cholesky_lower
from neula.kernels.cholesky_block import LEAF, factor_lower
from neula.kernels.kept import Kept, keep, multiply_kept
from neula.kernels.precision import exact_matmul, exactly


def operands_of(a: torch.Tensor, engine: Engine) -> torch.Tensor:
    """Room for L as the unit reads it: A itself where that is no other."""
    if engine.operand_buffer(a[:, :0, :0]) is None:
        return a
    return torch.empty_strided(a.shape, a.stride(), dtype=engine.operand_dtype, device=a.device)


@dataclass
class Blocks:
    """The matrices on their way, and what is known of L.

    Attributes
    ----------
    a : Tensor, shape (batch, n, n)
        Updates are summed here.
    low : Tensor, shape (batch, n, n)
        L, each element rounded once, when it is done.
    inverted : int
        Order of the diagonal blocks that are inverted.
    inverses : dict of int to Tensor
        ``L^-T`` of these, by where they begin.
    operands : dict of int to Kept
        ``L^-1`` of these in parts, where blocks below are multiplied in parts.
    orders : list of Tensor, shape (leaves, batch)
        What leaves have found.
    room : Kept, optional
        For what is below a diagonal block, before it is multiplied.
    unrounded : int
        Leading columns that stay in ``a`` as well, not rounded.
    """

    a: torch.Tensor
    low: torch.Tensor
    engine: Engine
    leaf: int
    inverted: int
    inverses: dict[int, torch.Tensor] = field(default_factory=dict)
    operands: dict[int, Kept] = field(default_factory=dict)
    orders: list[torch.Tensor] = field(default_factory=list)
    room: Kept | None = None
    unrounded: int = 0

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

    def factorize(self, k: slice) -> None:
        """A diagonal block becomes one of L, by recursion or by a kernel."""
        if self._by_kernel(k):
            return
        if k.stop - k.start <= self.leaf:
            self._leaf(k)
            return
        left, right = self._halves(k)
        self.factorize(left)
        self.solve(right, left)
        self.subtract(right, right, left)
        self.factorize(right)
        if k.stop - k.start <= self.inverted:
            self._join(left, right)

    def solve(self, rows: slice, columns: slice, spare: int = 0) -> None:
        """A block below a diagonal one becomes ``A L^-T``."""
        width = columns.stop - columns.start
        if width > self.inverted:
            left, right = self._halves(columns)
            self.solve(rows, left, spare)
            self.subtract(rows, right, left)
            self.solve(rows, right, spare)
            return
        block = self.a[:, rows, columns].mT  # column-major matrices by rows
        if self.room is None:
            block.copy_(exact_matmul(self.inverses[columns.start].mT, block))
        else:
            below = self.room.block(rows, slice(0, width))
            keep(block[0].mT, below)
            target = (self.a if columns.start < self.unrounded else self.low)[0, rows, columns]
            inverse = self.operands[columns.start]
            multiply_kept(target, below, inverse, alpha=1.0, beta=0.0, spare=spare)
            if columns.start >= self.unrounded:  # rounded as it was stored
                return
        self._round(rows, columns)

    def subtract(self, rows: slice, columns: slice, done: slice) -> None:
        """What columns that are done contribute to a block."""
        target, x, y = self.a[:, rows, columns], self.low[:, rows, done], self.low[:, columns, done].mT
        if len(target) == 1:
            self.engine.gemm(x[0], y[0], target[0], alpha=-1.0, beta=1.0)
        else:
            self.engine.subtract_bmm(x, y, target)

    def _by_kernel(self, k: slice) -> bool:
        """The same for one matrix, with the inverse; of a batch the library's products take less time."""
        if len(self.a) != 1 or self.leaf != LEAF:
            return False
        block = self.a[0, k, k]
        low = None if self.low is self.a else self.low.dtype
        if not factor_lower.takes(block, low):
            return False
        inverse, order = factor_lower(block, low)
        self.orders.append(order)
        for part in blocks(slice(0, len(block)), self.inverted):
            self.inverses[k.start + part.start] = inverse[None, part, part]
        self._round(k, k)
        return True

    def _leaf(self, k: slice) -> None:
        if k.start == k.stop:
            return
        self.inverses[k.start], order = cholesky_lower(self.a[:, k, k])
        self.orders.append(order[None])
        self._round(k, k)

    def _join(self, left: slice, right: slice) -> None:
        """``L^-T`` of two blocks from those of each: half as many products to solve with them."""
        first, second = self.inverses[left.start], self.inverses.pop(right.start)
        h, n = first.shape[-1], first.shape[-1] + second.shape[-1]
        whole = first.new_zeros(len(first), n, n)
        whole[:, :h, :h], whole[:, h:, h:] = first, second
        beside, between = whole[:, :h, h:], exact_matmul(self.a[:, right, left].mT, second)
        exactly(torch.baddbmm, beside, first, between, out=beside, alpha=-1.0, beta=0.0)
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
