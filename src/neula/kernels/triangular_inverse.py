"""Inverses of small triangular matrices: what makes products of the triangular solves with them."""

from __future__ import annotations

import torch

from neula.kernels.precision import exact_matmul, exactly


def triangular_inverses(lu: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverses of both factors of :func:`neula.kernels.lu_block.lu_unpivoted`, in the same launches.

    Parameters
    ----------
    lu : Tensor, shape (..., n, n)

    Returns
    -------
    l_inverse : Tensor, shape (..., n, n)
        Unit lower triangular.
    u_inverse : Tensor, shape (..., n, n)
        Upper triangular; not finite where U is singular.
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
    """``T^-1`` by doubling: from the inverses of blocks on the diagonal to those of blocks twice as large.

    With ``[[T_00, T_01], [0, T_11]]``, block (0, 1) of the inverse is ``-T_00^-1 (T_01 T_11^-1)``, and
    likewise for lower triangles.

    Parameters
    ----------
    t : Tensor, shape (batch, n, n)
        What is on the other side of the diagonal is not read by products.
    upper : bool
    leaf : int, optional
        Order of the blocks to begin with: the library inverts them all in one launch; 1 for reciprocals. By
        default at most :data:`LEAF` on a GPU, and all of T on a CPU.

    Returns
    -------
    Tensor, shape (batch, n, n)
    """
    batch, n, _ = t.shape
    leaf = leaf or (_leaf(n) if t.is_cuda else max(1, n))
    order = leaf
    while order < n:
        order *= 2
    if order > n:  # bordered by an identity
        t = torch.nn.functional.pad(t, (0, order - n, 0, order - n))
        t.diagonal(dim1=1, dim2=2)[:, n:] = 1
    blocks = _diagonal_blocks(t, leaf)
    if leaf == 1:
        known = blocks.reciprocal()
    else:
        identity = torch.eye(leaf, dtype=t.dtype, device=t.device).expand_as(blocks)
        known = torch.linalg.solve_triangular(blocks, identity, upper=upper)
    inverse = t.new_zeros(batch, order, order)
    _diagonal_blocks(inverse, leaf).copy_(known)
    size = leaf
    while size < order:
        first, second = (_halves(x, size) for x in (t, inverse))
        i, j = (0, 1) if upper else (1, 0)
        between = _product(first[i, j], second[j, j])
        _product(second[i, i], between, out=second[i, j])
        size *= 2
    return inverse[:, :n, :n]


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
    """The four quarters of the blocks of order ``2 size`` on the diagonal, likewise."""
    blocks = _diagonal_blocks(t, 2 * size)
    parts = (slice(0, size), slice(size, None))
    return {(i, j): blocks[..., parts[i], parts[j]] for i in (0, 1) for j in (0, 1)}


def _product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``A B``, or ``-A B`` in the place of ``out``; shape (batch, blocks, size, size) each."""
    if out is None:
        return exact_matmul(a, b)
    if 1 in out.shape[:2]:  # views as one batch
        a, b, flat = a.flatten(0, 1), b.flatten(0, 1), out.flatten(0, 1)
        exactly(torch.baddbmm, flat, a, b, out=flat, alpha=-1.0, beta=0.0)
    else:
        out.copy_(exact_matmul(a, b)).neg_()
    return out
