"""The kernel of :mod:`neula.kernels.cholesky.few_vectors`: one program has all of a Gram matrix in registers.

A few hundred operations one after the other, for which a dozen launches a vector took 0.8 ms.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from neula.kernels.cholesky.few_vectors import BLURRED, Steps
from neula.kernels.launch import next_power_of_2
from neula.kernels.triton_source import jit, tl


def orthonormalizing_triton(gram: torch.Tensor, factor: torch.Tensor, least: torch.Tensor) -> Steps:
    """``few_vectors.orthonormalizing`` by the kernel, queued on the current stream."""
    k = len(gram)
    found = gram.new_empty(2, k, k)
    fails = torch.empty(k, dtype=torch.int32, device=gram.device)
    with torch.cuda.device_of(gram):
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
