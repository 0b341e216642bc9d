"""Solving with triangular factors again and again: products with inverted diagonal blocks.

A library's substitution with one or two vectors is bound by latency, not memory traffic. With the diagonal
blocks inverted there are only products, a few large ones, and each element of a factor is read once. These
may lose more than substitution does, as much as the diagonal blocks are ill-conditioned. A preconditioner R
only has to be the same linear map each time; factors of LU are narrower than the numbers that are solved for
(:mod:`neula.algorithms.triangular.substitution`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch

from neula.algorithms.elimination.lu_panels import blocks
from neula.kernels.precision import exact_matmul
from neula.kernels.triangular_inverse import triangular_inverse

LEAF = 128
"""Order of the blocks that the library inverts, all in one launch."""

VECTORS = 3
"""Up to as many columns are multiplied one by one: cuBLAS reads a float32 matrix for each in the time that
memory takes, and for two columns together in 2 to 4 times that."""


class TriangularBlock(NamedTuple):
    """A block of unknowns of a triangular system."""

    # first, size: where the block is.
    first: int
    size: int
    inverse: torch.Tensor  # of the diagonal block
    panel: torch.Tensor  # what is beside it in its columns
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
    width, width); the last one may be bordered. Only what is beside the diagonal blocks is read of T, and
    only on one side.
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
class BlockTriangular:
    """``R D^-1`` with an upper triangular R, in the precision of R.

    Examples
    --------
    >>> import torch
    >>> r = BlockTriangular.from_factor(torch.tensor([[2.0, 4.0], [0.0, 8.0]]), width=128)
    >>> r.solve(torch.tensor([[6.0], [8.0]], dtype=torch.float64)).flatten()
    tensor([1., 1.], dtype=torch.float64)
    """

    r: torch.Tensor  # shape (n, n)
    # Shape (blocks, width, width). Of the diagonal blocks of R; what the last one lacks is filled up with the
    # identity matrix. Where there are no blocks, the library solves with R.
    inverses: torch.Tensor
    scales: torch.Tensor | None = None  # shape (n,): the diagonal of D, float64; the identity by default

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of R; right-hand sides may be wider."""
        return self.r.dtype

    @classmethod
    def from_factor(cls, r: torch.Tensor, width: int) -> Self:
        """Invert blocks of at most ``width`` columns, a power of two times :data:`LEAF`."""
        n = r.shape[0]
        while width >= 2 * n and width > LEAF:
            width //= 2
        steps = list(blocks(slice(0, n), width))
        diagonal = torch.eye(width, dtype=r.dtype, device=r.device).repeat(len(steps), 1, 1)
        for block, k in zip(diagonal, steps, strict=True):
            size = k.stop - k.start
            block[:size, :size] = r[k, k]
        return cls(r, triangular_inverse(diagonal, upper=True, leaf=LEAF))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors to pass to a captured graph."""
        return (self.r, self.inverses) if self.scales is None else (self.r, self.inverses, self.scales)

    def scaled(self, scales: torch.Tensor) -> Self:
        """Divide the columns of R by ``scales``."""
        return replace(self, scales=scales)

    @property
    def shape(self) -> torch.Size:
        """Shape of R."""
        return self.r.shape

    def diagonal(self) -> torch.Tensor:
        """Diagonal of R, without the scales."""
        return self.r.diagonal()

    def solve(self, x: torch.Tensor) -> torch.Tensor:
        """``D R^-1 x`` for the columns of x, shape (n, k), in its precision."""
        out = self._solve(self.r, x, upper=True)
        # Powers of two in the precision of x, to which the product is promoted.
        return out.to(x.dtype) if self.scales is None else out * self.scales[:, None]

    def solve_transposed(self, x: torch.Tensor) -> torch.Tensor:
        """``R^-H D x``."""
        return self._solve(self.r.mH, x, self.scales, upper=False).to(x.dtype)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """``R D^-1 x``."""
        y = x if self.scales is None else x / self.scales[:, None]
        return exact_matmul(self.r, y.to(self.r.dtype)).to(x.dtype)

    def _solve(
        self, t: torch.Tensor, x: torch.Tensor, scales: torch.Tensor | None = None, *, upper: bool
    ) -> torch.Tensor:
        """``T^-1 D x`` for R or its transpose."""
        if len(self.inverses) == 0:
            right = x if scales is None else x * scales[:, None]
            return torch.linalg.solve_triangular(t, right.to(t.dtype), upper=upper)
        right = torch.empty(x.T.shape, dtype=t.dtype, device=x.device).T  # contiguous columns
        right = right.copy_(x) if scales is None else torch.mul(x, scales[:, None], out=right)
        steps = steps_of(t, self.inverses if upper else self.inverses.mH, upper=upper)
        return solve_in_blocks(
            steps, right, torch.empty_like(right), multiply=_multiply, subtract=subtract_from
        )


UpperTriangular = torch.Tensor | BlockTriangular
"""R as callers have it: a matrix, with which the library solves, or one that is prepared."""


def triangular(r: UpperTriangular) -> BlockTriangular:
    """R to solve with."""
    return r if isinstance(r, BlockTriangular) else BlockTriangular(r, r.new_empty(0, 0, 0))


def _multiply(a: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    if x.shape[1] > VECTORS:
        out.copy_(exact_matmul(a, x))
        return
    for source, target in zip(x.T, out.T, strict=True):
        torch.mv(a, source, out=target)


def subtract_from(a: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    """``Y = Y - A X`` for matrices of one dtype."""
    if x.shape[1] > VECTORS:
        y -= exact_matmul(a, x)
        return
    for source, target in zip(x.T, y.T, strict=True):
        torch.addmv(target, a, source, alpha=-1.0, out=target)
