"""Cholesky factors of Gram matrices of a few vectors, some of which may depend on others.

A few hundred operations one after the other, for which a dozen launches a vector took 0.8 ms.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import next_power_of_2
from neula.kernels.triton_source import jit, tl

VECTORS = 16
"""Up to how many vectors the kernel takes."""

BLURRED = 1e-10
"""Square of the part of a vector that others leave, below which its Gram matrix shows hardly half of the
digits of that square."""


class Steps(NamedTuple):
    """Triangular factors that make vectors orthonormal."""

    # Shape (k, k): upper triangular: vectors times this are nearly orthonormal; those that may depend on
    # others are only made orthogonal to them.
    inverse: torch.Tensor
    # Shape (k, k): upper triangular: the orthonormal vectors times this are what there was at first.
    factor: torch.Tensor
    fails: torch.Tensor  # shape (k,): int32: 1 for vectors that were not normalized


@trial("The kernel of Gram matrices of a few vectors", "a dozen launches for each vector take its place")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, dtype=torch.float64, device=device)
    orthonormalizing.kernel(one, one, one[0])


def _real(x: torch.Tensor) -> torch.Tensor:
    """Replace each number ``x + i y`` by ``[[x, -y], [y, x]]``: triangles stay triangles."""
    rows = torch.stack([torch.view_as_real(x.conj().resolve_conj()), torch.view_as_real(1j * x.conj())], 1)
    return rows.flatten(0, 1).flatten(1)


def _complex(x: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`_real`."""
    return torch.complex(x[::2, ::2], x[1::2, ::2])


@kernel(
    "orthonormalizing_triton",
    trial=_tried,
    when=lambda gram, *_: gram.dtype == torch.float64 and 0 < len(gram) <= VECTORS,
)
def orthonormalizing(gram: torch.Tensor, factor: torch.Tensor, least: torch.Tensor) -> Steps:
    """One of some rounds of Cholesky QR of k vectors with a Gram matrix (k, k), without synchronizing.

    The component of a vector orthogonal to those before is normalized if it is not small. Otherwise rounding
    errors of the Gram matrix are too large compared with it, and the next round has that of what is left.
    ``factor`` is that of the rounds before, an identity at first; ``least`` are the norms up to which what is
    left of a vector is nothing.
    """
    k = len(gram)
    if gram.is_complex() and gram.is_cuda:  # whose real matrix has factors of the same kind
        found = orthonormalizing(_real(gram), _real(factor), least.repeat_interleave(2))
        return Steps(_complex(found.inverse), _complex(found.factor), found.fails[::2])
    identity = torch.eye(k, dtype=gram.dtype, device=gram.device)
    small, rest = BLURRED * gram.diagonal().real, gram
    r, inverse, failed = identity.clone(), identity.clone(), []
    for j in range(k):
        left = rest[j, j].real
        # NaN does not fail: it is in everything then.
        fails = (left <= small[j]) | (left.sqrt() * factor[j, j].real <= least[j])
        failed.append(fails)
        row = (rest[j] / left.sqrt()).masked_fill(fails, 0.0)
        rest = rest - row[:, None].conj() * row
        r[j, j:] = torch.where(fails, identity[j, j:], row[j:])
        inverse[:, j] = (identity[:, j] - inverse[:, :j] @ r[:j, j]) / r[j, j]
    return Steps(inverse, r @ factor, torch.stack(failed).int())


def orthonormalizing_triton(gram, factor, least):
    k = len(gram)
    found = gram.new_empty(2, k, k)
    fails = torch.empty(k, dtype=torch.int32, device=gram.device)
    _orthonormalizing[(1,)](
        *(gram, factor, least, found[0], found[1], fails, k),
        *(*gram.stride(), *factor.stride(), BLURRED, max(2, next_power_of_2(k))),
        num_warps=1,
    )
    return Steps(found[0], found[1], fails)


@jit
def _row(x, i, j):
    """Row j of a square."""
    return tl.sum(tl.where(i[:, None] == j, x, 0.0), axis=0)


@jit
def _column(x, i, j):
    return tl.sum(tl.where(i[None, :] == j, x, 0.0), axis=1)


@jit
def _element(x, i, j):
    return tl.sum(tl.where(i == j, x, 0.0), axis=0)


@jit(do_not_specialize=["k", "g_row", "g_column", "f_row", "f_column"])
def _orthonormalizing(
    gram, factor, least, inverse, product, fails, k, g_row, g_column, f_row, f_column, BLURRED: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Factor, inverse and product, of which row j is needed for column j only."""
    i = tl.arange(0, K)
    inside = (i[:, None] < k) & (i[None, :] < k)
    rest = tl.load(gram + i[:, None] * g_row + i[None, :] * g_column, mask=inside, other=0.0)
    before = tl.load(factor + i[:, None] * f_row + i[None, :] * f_column, mask=inside, other=0.0)
    nothing = tl.load(least + i, mask=i < k, other=0.0)
    identity = tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(tl.float64)
    small = BLURRED * tl.sum(rest * identity, axis=0)
    sizes = tl.sum(before * identity, axis=0)
    found = identity
    r = identity
    after = tl.zeros((K, K), tl.float64)
    for j in range(k):
        row = _row(rest, i, j)
        left = _element(row, i, j)
        root = tl.sqrt(left)
        failed = (left <= _element(small, i, j)) | (root * _element(sizes, i, j) <= _element(nothing, i, j))
        row = tl.where(failed, 0.0, row / root)
        rest -= row[:, None] * row[None, :]
        row = tl.where(failed, tl.where(i == j, 1.0, 0.0), tl.where(i >= j, row, 0.0))
        r = tl.where(i[:, None] == j, row[None, :], r)
        above = tl.where(i < j, _column(r, i, j), 0.0)
        column = tl.where(i == j, 1.0, 0.0) - tl.sum(found * above[None, :], axis=1)
        found = tl.where(i[None, :] == j, (column / _element(row, i, j))[:, None], found)
        tl.store(fails + j, failed.to(tl.int32))
    for j in range(k):
        after += _column(r, i, j)[:, None] * _row(before, i, j)[None, :]
    tl.store(inverse + i[:, None] * k + i[None, :], found, mask=inside)
    tl.store(product + i[:, None] * k + i[None, :], after, mask=inside)
