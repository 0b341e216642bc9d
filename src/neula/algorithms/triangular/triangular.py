"""Solving with a triangular factor again and again: products with inverted diagonal blocks.

A preconditioner R is solved with dozens of times for one or two vectors, and what a library's substitution
takes is latency, not memory traffic. With the diagonal blocks inverted there are only products, a few large
ones, and each element of R is read once. These may lose more than substitution does, as much as the diagonal
blocks are ill-conditioned; a preconditioner only has to be the same linear map each time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from neula.algorithms.elimination.lu_panels import blocks
from neula.kernels.precision import exact_matmul

LEAF = 128
"""Order of the blocks that the library inverts, all in one launch."""

VECTORS = 3
"""Up to as many columns are multiplied one by one: cuBLAS reads a float32 matrix for each in the time that
memory takes, and for two columns together in 2 to 4 times that (measured on an H200)."""


@dataclass(frozen=True)
class BlockTriangular:
    """``R D^-1`` with an upper triangular R and inverted diagonal blocks.

    Attributes
    ----------
    r : Tensor, shape (n, n)
    inverses : Tensor, shape (blocks, width, width)
        Of the diagonal blocks of R; what the last one lacks is filled up with the identity matrix.
    scales : Tensor, shape (n,), or None
        The diagonal of D, float64; the identity by default.

    Examples
    --------
    >>> import torch
    >>> r = BlockTriangular.of(torch.tensor([[2.0, 4.0], [0.0, 8.0]]), width=128)
    >>> r.solve(torch.tensor([[6.0], [8.0]], dtype=torch.float64)).flatten()
    tensor([1., 1.], dtype=torch.float64)
    """

    r: torch.Tensor
    inverses: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """That of R: what is solved for may be wider."""
        return self.r.dtype

    @classmethod
    def of(cls, r: torch.Tensor, width: int) -> Self:
        """Invert blocks of at most ``width`` columns, a power of two times :data:`LEAF`."""
        n = r.shape[0]
        while width >= 2 * n and width > LEAF:
            width //= 2
        steps = list(blocks(slice(0, n), width))
        diagonal = torch.eye(width, dtype=r.dtype, device=r.device).repeat(len(steps), 1, 1)
        for block, k in zip(diagonal, steps, strict=True):
            size = k.stop - k.start
            block[:size, :size] = r[k, k]
        return cls(r, upper_inverses(diagonal))

    def scaled(self, scales: torch.Tensor) -> Self:
        """The same R with columns divided by ``scales``."""
        return replace(self, scales=scales)

    @property
    def shape(self) -> torch.Size:
        """That of R."""
        return self.r.shape

    def diagonal(self) -> torch.Tensor:
        """That of R, without the scales."""
        return self.r.diagonal()

    def solve(self, x: torch.Tensor) -> torch.Tensor:
        """``D R^-1 x`` for the columns of x, shape (n, k), in its precision."""
        right, out = self._room(x, None)
        for k, inverse in reversed(self._steps):
            _multiply(inverse, right[k], out[k])
            _subtract(self.r[: k.start, k], out[k], right[: k.start])
        # Powers of two in the precision of x, to which the product is promoted.
        return out.to(x.dtype) if self.scales is None else out * self.scales[:, None]

    def solve_transposed(self, x: torch.Tensor) -> torch.Tensor:
        """``R^-T D x``."""
        right, out = self._room(x, self.scales)
        for k, inverse in self._steps:
            _multiply(inverse.T, right[k], out[k])
            _subtract(self.r[k, k.stop :].T, out[k], right[k.stop :])
        return out.to(x.dtype)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """``R D^-1 x``."""
        y = x if self.scales is None else x / self.scales[:, None]
        return exact_matmul(self.r, y.to(self.r.dtype)).to(x.dtype)

    @property
    def _steps(self) -> list[tuple[slice, torch.Tensor]]:
        steps = blocks(slice(0, self.shape[0]), self.inverses.shape[1])
        return [
            (k, inverse[: k.stop - k.start, : k.stop - k.start])
            for k, inverse in zip(steps, self.inverses, strict=True)
        ]

    def _room(self, x: torch.Tensor, scales: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``D x`` in the precision of R, which changes, and room for the solution; by columns."""
        right = torch.empty(x.T.shape, dtype=self.r.dtype, device=x.device).T
        right = right.copy_(x) if scales is None else torch.mul(x, scales[:, None], out=right)
        return right, torch.empty_like(right)


Triangular = torch.Tensor | BlockTriangular
"""Upper triangular: a matrix, with which the library solves, or one with inverted blocks."""


def upper_inverses(r: torch.Tensor) -> torch.Tensor:
    """Inverses of upper triangular matrices, by inverting halves and multiplying them.

    Parameters
    ----------
    r : Tensor, shape (batch, n, n)
        n is a power of two times :data:`LEAF`.
    """
    batch, n, _ = r.shape
    leaves = _diagonal_blocks(r, LEAF)
    identity = torch.eye(LEAF, dtype=r.dtype, device=r.device).expand_as(leaves)
    inverse = torch.linalg.solve_triangular(leaves, identity, upper=True)
    while (size := inverse.shape[1]) < n:
        larger = torch.zeros(len(inverse) // 2, 2 * size, 2 * size, dtype=r.dtype, device=r.device)
        first, second = inverse[0::2], inverse[1::2]
        beside = _diagonal_blocks(r, 2 * size)[:, :size, size:]
        larger[:, :size, :size], larger[:, size:, size:] = first, second
        larger[:, :size, size:] = -exact_matmul(first, exact_matmul(beside, second))
        inverse = larger
    return inverse.reshape(batch, n, n)


def _diagonal_blocks(r: torch.Tensor, size: int) -> torch.Tensor:
    """Diagonal blocks of each of some matrices, all in one batch."""
    count = r.shape[1] // size
    parts = r.unflatten(1, (count, size)).unflatten(3, (count, size))
    return parts.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).flatten(0, 1)


def _multiply(a: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    if x.shape[1] > VECTORS:
        out.copy_(exact_matmul(a, x))
        return
    for source, target in zip(x.T, out.T, strict=True):
        torch.mv(a, source, out=target)


def _subtract(a: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    """``Y = Y - A X``."""
    if y.shape[0] == 0:
        return
    if x.shape[1] > VECTORS:
        y -= exact_matmul(a, x)
        return
    for source, target in zip(x.T, y.T, strict=True):
        torch.addmv(target, a, source, alpha=-1.0, out=target)
