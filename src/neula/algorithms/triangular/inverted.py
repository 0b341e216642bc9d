"""Triangular factors to solve with again and again: their diagonal blocks are inverted, once.

With one or two right-hand sides a GPU's substitution takes latency, not memory traffic: 0.7 ms at order 3000
on an H200, where the factor is read in 0.02. With inverted blocks there are two products a block.

*Errors.* With ``X_kk`` the computed inverse of ``T_kk``, solving leaves a residual of at most about ``u (|T|
|x| + |T_kk| |X_kk| |b_k|)``, where substitution leaves ``u |T| |x|`` (Higham 2002, sections 8.3 and 14.2):
more by no more than the condition numbers of the blocks, and only if x is much smaller than ``|X_kk| |b|``,
which right-hand sides without a relation to T are not. Who solves like this refines, and measures; or keeps
the blocks, which are so ill-conditioned where pivots were not chosen, to refine by them on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple, Self

import torch

from neula.algorithms.elimination.lu_panels import blocks
from neula.kernels.few_vectors.thin import thin_product
from neula.kernels.lu.sweep import sweep
from neula.kernels.precision import exact_matmul, exactly
from neula.kernels.triangular_inverse import one_after_the_other, triangular_inverse, triangular_inverses


@dataclass(frozen=True)
class InvertedTuning:
    """Orders of triangular factors that are solved with by inverted blocks."""

    inverted: int  # of the blocks of an R that preconditions some dozen iterations
    inverted_from: int  # of factors in double precision from which on; 0: never
    inverted_whole: int  # up to which they are inverted as a whole

    def width(self, n: int) -> int:
        """Width of the diagonal blocks of factors of order n that are inverted; 0: none.

        Four to eight of them: each is two launches of a solve, and wider ones cost more, and lose more.
        """
        if not 0 < self.inverted_from <= n:
            return 0
        width = 256
        while width < min(2048, n // 4):
            width *= 2
        return width


VECTORS = 3
"""Up to as many columns are multiplied one by one: cuBLAS reads a float32 matrix for each in the time that
memory takes, and for two columns together in 2 to 4 times that."""


class TriangularBlock(NamedTuple):
    # first, size: where the block is.
    first: int
    size: int
    inverse: torch.Tensor  # of the diagonal block
    panel: torch.Tensor  # the rest of its columns
    # start, length: the rows of that.
    start: int
    length: int
    # The diagonal block itself, zero on the other side, by which what its inverse finds is refined.
    block: torch.Tensor | None = None


def steps_of(
    t: torch.Tensor, inverses: torch.Tensor, *, upper: bool, refining: torch.Tensor | None = None
) -> list[TriangularBlock]:
    """In which order blocks of unknowns are found, and by which blocks of T.

    Inverses of the diagonal blocks, and the blocks themselves for ``refining``, have the shape (blocks, ...,
    width, width); the last one may be bordered. Of T only elements outside of the diagonal
    blocks are read, on one side.
    """
    n, found = t.shape[-1], []
    exact = [None] * len(inverses) if refining is None else refining
    for k, inverse, block in zip(blocks(slice(0, n), inverses.shape[-1]), inverses, exact, strict=True):
        size, rest = k.stop - k.start, slice(0, k.start) if upper else slice(k.stop, n)
        diagonal, panel = inverse[..., :size, :size], t[..., rest, k]
        block = None if block is None else block[..., :size, :size]
        found.append(
            TriangularBlock(k.start, size, diagonal, panel, rest.start, rest.stop - rest.start, block)
        )
    return found[::-1] if upper else found


def solve_in_blocks(
    steps: list[TriangularBlock],
    right: torch.Tensor,
    out: torch.Tensor,
    *,
    multiply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object],
    subtract: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object],
) -> torch.Tensor:
    """``T X = B`` by blocks: once a block of X is known, its columns of T times that are subtracted from B.

    Steps are prepared, since on a GPU each view that is made takes the host as long as a launch. B, in
    ``right``, is overwritten, and X is written to ``out``, which is returned. ``multiply(A, X, Y)`` leaves
    ``A X`` in Y, and ``subtract(A, X, Y)`` leaves ``Y - A X``.
    """
    for first, size, inverse, panel, start, length, block in steps:
        known, of_block = out.narrow(-2, first, size), right.narrow(-2, first, size)
        multiply(inverse, of_block, known)
        if block is not None:
            subtract(block, known, of_block)
            change = torch.empty_like(known)
            multiply(inverse, of_block, change)
            known += change
        if length:
            subtract(panel, known, right.narrow(-2, start, length))
    return out


@dataclass(frozen=True)
class InvertedBlocks:
    """A triangular matrix, or a batch of them, that is solved with by products.

    >>> t = torch.tensor([[2.0, 0.0], [4.0, 8.0]])
    >>> blocks = InvertedBlocks.from_factor(t, torch.float64, upper=False, width=1)
    >>> blocks.solve(torch.tensor([[2.0], [12.0]], dtype=torch.float64)).flatten()
    tensor([1., 1.], dtype=torch.float64)
    """

    # Shape (..., n, n). Of any floating dtype; only one triangle is read. A single matrix may be narrower
    # than what is solved for.
    t: torch.Tensor
    # Shape (blocks, ..., width, width). Of the diagonal blocks, in the precision of solves; the last one is
    # bordered by an identity where it is smaller. No blocks where the library substitutes.
    inverses: torch.Tensor
    dtype: torch.dtype  # the precision of solves
    upper: bool
    # Shape (n - width, k): what the first columns of a lower triangle lack below the first diagonal block, or
    # those of its transpose.
    lost: torch.Tensor | None = None
    # Shape (blocks, ..., width, width): the diagonal blocks, zero on the other side, where what their
    # inverses find is to be refined.
    refining: torch.Tensor | None = None

    @classmethod
    def from_factor(
        cls, t: torch.Tensor, dtype: torch.dtype, *, upper: bool, width: int, lost: torch.Tensor | None = None
    ) -> Self:
        """Invert diagonal blocks of some width; with 0 none, and the library substitutes in a copy if it
        must.
        """
        if lost is not None and not lost.shape[1] <= width < len(t):
            t, lost = t.to(dtype, copy=True), lost.to(dtype)
            t[:, : lost.shape[1]] += lost
            lost = None
        if width == 0:
            return cls(t.to(dtype), t.new_empty(0, 0, 0, dtype=dtype), dtype, upper)
        diagonal = diagonal_blocks(t, dtype, width)
        if lost is not None:
            diagonal[0, :, : lost.shape[1]] += lost[:width]
            lost = lost[width:].to(dtype)
        inverses = triangular_inverse(diagonal.flatten(0, -3), upper=upper).view(diagonal.shape)
        return cls(t, inverses, dtype, upper, lost)

    @cached_property
    def mH(self) -> InvertedBlocks:
        """The conjugate transpose: a view, except for inverses that are read by rows with a narrow matrix."""
        return self._turned(attrgetter("mH"))

    @cached_property
    def mT(self) -> InvertedBlocks:
        """The transpose, likewise, of factors that lack nothing."""
        return self._turned(attrgetter("mT"))

    def _turned(self, turn: Callable[[torch.Tensor], torch.Tensor]) -> InvertedBlocks:
        inverses = turn(self.inverses)
        if self.t.dtype != self.dtype:
            inverses = inverses.contiguous()
        refining = None if self.refining is None else turn(self.refining)
        return InvertedBlocks(turn(self.t), inverses, self.dtype, not self.upper, self.lost, refining)

    @cached_property
    def _steps(self) -> list[TriangularBlock]:
        return steps_of(self.t, self.inverses, upper=self.upper, refining=self.refining)

    def solved(self, b: torch.Tensor) -> torch.Tensor:
        """``T^-1 B``, shape (..., n, k)."""
        return self.solve(b if len(self.inverses) == 1 else b.clone())

    def solve(self, x: torch.Tensor) -> torch.Tensor:
        """Solve with the triangle; X may be overwritten."""
        if not len(self.inverses):
            return x.copy_(torch.linalg.solve_triangular(self.t, x, upper=self.upper))
        if len(self.inverses) == 1:  # few columns one by one: a preconditioner is the same map for all
            out = torch.empty_like(x)
            _multiply(self._steps[0].inverse, x, out)
            return out
        if self.lost is not None:
            return self._solve_with_lost(x, self.lost)
        if sweep.takes(self.t, self.inverses, x, upper=self.upper):
            return sweep(self.t, self.inverses, x, upper=self.upper)
        out = torch.empty_like(x)
        return solve_in_blocks(self._steps, x, out, multiply=_multiply, subtract=_subtract)

    @cached_property
    def _as_stored(self) -> InvertedBlocks:
        """Without what is lost."""
        return replace(self, lost=None)

    def _solve_with_lost(self, x: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
        """Solve with ``lost``, the rounded-off part of the first columns; only the first inverse meets it."""
        width, k = self.inverses.shape[-1], lost.shape[1]
        first = self.inverses[0, :k, :k]
        if self.upper:
            out = self._as_stored.solve(x)
            out[:k] -= exact_matmul(first, exact_matmul(lost.mH, out[width:]))
            return out
        x[width:] -= exact_matmul(lost, exact_matmul(first, x[:k]))
        return self._as_stored.solve(x)


@dataclass(frozen=True)
class InvertedLU:
    """``P A = L U`` by the library, or a batch of such factors, with inverted blocks."""

    lower: InvertedBlocks
    upper: InvertedBlocks
    permutation: torch.Tensor  # shape (..., n, 1): rows of A in the order of L

    @classmethod
    def from_factors(cls, lu: torch.Tensor, permutation: torch.Tensor, width: int) -> Self:
        return cls(*inverted_factors(lu, lu.dtype, width), permutation[..., None])

    def solve(self, b: torch.Tensor) -> torch.Tensor:
        """``A^-1 b`` for the columns of b, shape (..., n, k)."""
        x = torch.gather(b, -2, self.permutation.expand(b.shape))
        return self.upper.solve(self.lower.solve(x))

    def solve_transposed(self, b: torch.Tensor) -> torch.Tensor:
        """``A^-H b``."""
        x = self.lower.mH.solve(self.upper.mH.solve(b.clone()))
        return torch.empty_like(x).scatter_(-2, self.permutation.expand(x.shape), x)


def inverted_factors(
    lu: torch.Tensor, dtype: torch.dtype, width: int, *, refining: bool = False
) -> tuple[InvertedBlocks, InvertedBlocks]:
    """L and U of a packed factorization, with diagonal blocks inverted in shared launches."""
    diagonal = diagonal_blocks(lu, dtype, width)
    lower, upper = (x.view(diagonal.shape) for x in triangular_inverses(diagonal.flatten(0, -3)))
    if lu.dtype != dtype:  # both are read by rows when the other matrix is narrow
        upper = upper.contiguous()
    kept_lower = kept_upper = None
    if refining:
        kept_lower = diagonal.tril(-1) + torch.eye(width, dtype=dtype, device=lu.device)
        kept_upper = diagonal.triu()
    return (
        InvertedBlocks(lu, lower, dtype, upper=False, refining=kept_lower),
        InvertedBlocks(lu, upper, dtype, upper=True, refining=kept_upper),
    )


def diagonal_blocks(t: torch.Tensor, dtype: torch.dtype, width: int) -> torch.Tensor:
    """Blocks on the diagonal, shape (blocks, ..., width, width), the last one bordered by an identity."""
    steps = list(blocks(slice(0, t.shape[-1]), width))
    if width == t.shape[-1] and t.dtype == dtype:
        return t[None]
    shape = (len(steps), *t.shape[:-2])
    found = one_after_the_other(math.prod(shape), width, dtype, t.device).unflatten(0, shape)
    for block, k in zip(found, steps, strict=True):
        size = k.stop - k.start
        if size < width:
            block.copy_(torch.eye(width, dtype=dtype, device=t.device))
        block[..., :size, :size] = t[..., k, k]
    return found


def _multiply(inverse: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    if x.ndim > 2 or x.shape[1] > VECTORS or x.stride(0) != 1:
        exactly(torch.matmul, inverse, x, out=out)
        return
    for source, target in zip(x.T, out.T, strict=True):
        torch.mv(inverse, source, out=target)


def _subtract(a: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    if a.ndim > 2 and a.dtype == x.dtype == torch.float64:
        torch.baddbmm(y, a, x, alpha=-1.0, out=y)
    elif a.ndim > 2:
        y -= exact_matmul(a.to(x.dtype), x)
    elif a.dtype != x.dtype:
        y -= thin_product(a, x)
    elif x.shape[1] > VECTORS:
        y -= exact_matmul(a, x)
    else:
        for source, target in zip(x.T, y.T, strict=True):
            torch.addmv(target, a, source, alpha=-1.0, out=target)
