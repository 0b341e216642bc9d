"""Inverses of small triangular matrices: what makes products of the triangular solves with them."""

from __future__ import annotations

import torch

from neula.kernels.precision import exactly


def triangular_inverses(lu: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverses of both factors of :func:`neula.kernels.lu.lu_block.lu_unpivoted`, in shared launches; that of
    U is not finite where U is singular.
    """
    n = lu.shape[-1]
    identity = torch.eye(n, dtype=lu.dtype, device=lu.device)
    lower = torch.stack([lu.tril(-1) + identity, lu.mT.tril()])
    # Batched substitution on a GPU takes a hundred times as long as products.
    inverse = triangular_inverse(lower.flatten(0, -3), upper=False, leaf=1 if lu.is_cuda else None)
    l_inverse, u_inverse = inverse.view(lower.shape)
    return l_inverse, u_inverse.mT


LEAF = 32
"""Order of the blocks with which doubling begins on a GPU: the library inverts a batch of them in 20 us. An
inverse of order 500 takes 0.09 ms so, 0.12 ms from reciprocals on, 0.23 ms by the library (on an H200)."""


def triangular_inverse(t: torch.Tensor, *, upper: bool, leaf: int | None = None) -> torch.Tensor:
    """``T^-1`` (batch, n, n) by doubling: from the inverses of blocks on the diagonal to those of blocks
    twice as large.

    With ``[[T_00, T_01], [0, T_11]]``, block (0, 1) of the inverse is ``-T_00^-1 (T_01 T_11^-1)``, and
    likewise for lower triangles; products do not read the other triangle. Blocks of order ``leaf`` are
    inverted by the library, all in one launch; 1 means reciprocals. By default it is at most :data:`LEAF` on
    a GPU, and all of T on a CPU.
    """
    batch, n, _ = t.shape
    leaf = leaf or (_leaf(n) if t.is_cuda else max(1, n))
    order = leaf
    while order < n:
        order *= 2
    in_place = batch == 1 or t.stride() == (n * (n + 1), n, 1)
    if order > n or (order > leaf and not in_place):
        t = _bordered(t, order)
    blocks = _diagonal_blocks(t, leaf)
    if leaf == 1:
        known = blocks.reciprocal()
    else:
        identity = torch.eye(leaf, dtype=t.dtype, device=t.device).expand_as(blocks)
        known = torch.linalg.solve_triangular(blocks, identity, upper=upper)
    inverse = one_after_the_other(batch, order, t.dtype, t.device).zero_()
    _diagonal_blocks(inverse, leaf).copy_(known)
    size = leaf
    while size < order:
        first, second = (_halves(x, size) for x in (t, inverse))
        i, j = (0, 1) if upper else (1, 0)
        between = exactly(torch.bmm, first[i, j], second[j, j])
        out = second[i, j]
        exactly(torch.baddbmm, out, second[i, i], between, out=out, alpha=-1.0, beta=0.0)
        size *= 2
    return inverse[:, :n, :n]


def one_after_the_other(batch: int, n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialized row-major matrices whose diagonal blocks of any size are equally far from each other.

    So they are a batch of their own, and products take them where they are.
    """
    return torch.empty_strided((batch, n, n), (n * (n + 1), n, 1), dtype=dtype, device=device)


def _bordered(t: torch.Tensor, order: int) -> torch.Tensor:
    """A copy of matrices, one after the other, bordered by an identity."""
    batch, n, _ = t.shape
    found = one_after_the_other(batch, order, t.dtype, t.device)
    found[:, :n, :n] = t
    if order > n:
        found[:, n:], found[:, :n, n:] = 0, 0
        found.diagonal(dim1=1, dim2=2)[:, n:] = 1
    return found


def _leaf(n: int) -> int:
    """The order of at most :data:`LEAF` that doubles to the least order that is not below n."""
    doublings = max(0, -(-n // LEAF) - 1).bit_length()
    return max(1, -(-n >> doublings))


def _diagonal_blocks(t: torch.Tensor, size: int) -> torch.Tensor:
    """Blocks on the diagonal of each of some matrices, shape (batch, blocks, size, size): a view."""
    count = t.shape[1] // size
    blocks = t.unflatten(1, (count, size)).unflatten(3, (count, size))
    return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _halves(t: torch.Tensor, size: int) -> dict[tuple[int, int], torch.Tensor]:
    """The four quarters of the blocks of order ``2 size`` on the diagonals, shape (count, size, size)."""
    blocks = _diagonal_blocks(t, 2 * size).flatten(0, 1)
    parts = (slice(0, size), slice(size, None))
    return {(i, j): blocks[:, parts[i], parts[j]] for i in (0, 1) for j in (0, 1)}
