"""The first column of each matrix projected out of the others, and put back into R once they are factorized.

Where all columns have a large part in common, recursive Gram-Schmidt loses orthogonality with the square of
the condition number: each level projects out of what is large a Q that is orthonormal only up to the one
condition number. Most often the first column has that part, too. Both ends of a factorization are passes over
memory that convert numbers anyhow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.kernels.dispatch import kernel
from neula.kernels.launch import ceil_div
from neula.kernels.magnitudes import squares
from neula.kernels.polar.batched_product import place_of_tile
from neula.kernels.triton_source import jit, tl


class ProjectedMatrices(NamedTuple):
    """A batch of matrices in double precision."""

    # Shape (batch, m, n). Contiguous. The first column as it was, the others without multiples of it; noise
    # for those that vanish.
    a: torch.Tensor
    # Shape (batch, n): float64: of the first column, zero for itself and for columns that vanish.
    multiples: torch.Tensor
    vanished: torch.Tensor  # bool, shape (batch, n): columns that hold only zeros


def _any(a: torch.Tensor, *_: object) -> bool:
    return a.numel() > 0


@kernel("without_first_column_triton", when=_any)
def without_first_column(a: torch.Tensor, noise: torch.Tensor) -> ProjectedMatrices:
    """Matrices in double precision, their first column projected out of the others.

    ``noise`` (m, n), float32, is what columns that vanish become, so that Q has orthonormal ones in their
    places.

    Examples
    --------
    >>> a = torch.tensor([[[1.0, 2.0, 0.0], [1.0, 4.0, 0.0], [0.0, 1.0, 0.0]]])
    >>> work, multiples, vanished = without_first_column(a, torch.ones(3, 3))
    >>> work
    tensor([[[ 1., -1.,  1.],
             [ 1.,  1.,  1.],
             [ 0.,  1.,  1.]]], dtype=torch.float64)
    >>> multiples, vanished
    (tensor([[0., 3., 0.]], dtype=torch.float64), tensor([[False, False,  True]]))
    """
    vanished = ~a.any(1)
    dtype = torch.promote_types(a.dtype, torch.float64)
    work = torch.where(vanished[:, None], noise.to(dtype), a.to(dtype)).contiguous()
    first = work[:, :, :1]
    multiples = (first.conj() * work).sum(1) / squares(first).sum(1)
    multiples[:, 0] = 0
    multiples.masked_fill_(vanished | vanished[:, :1], 0.0)
    return ProjectedMatrices(work.sub_(first * multiples[:, None]), multiples, vanished)


@kernel("with_first_column_triton", when=_any)
def with_first_column(
    r: torch.Tensor, multiples: torch.Tensor, vanished: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """R, in a dtype, of the matrices as they were, given R of :class:`ProjectedMatrices`, float64 and
    contiguous, whose elements below the diagonal are not read: zero where columns vanish.
    """
    r = r.triu()
    r[:, 0] += multiples * r[:, 0, :1]
    return r.masked_fill_(vanished[:, None], 0.0).to(dtype)


ROWS, COLUMNS, WARPS = 64, 32, 4
"""Shape of a block of A: its rows are read twice, the second time from the cache."""

SIDE = 64
"""Side of a block of R."""


def without_first_column_triton(a, noise):
    count, m, n = a.shape
    work = torch.empty(a.shape, dtype=torch.float64, device=a.device)
    multiples = work.new_empty(count, n)
    vanished = torch.empty(count, n, dtype=torch.bool, device=a.device)
    blocks = ceil_div(n, COLUMNS)
    _without[(count * blocks,)](
        *(a, noise, work, multiples, vanished.view(torch.uint8), m, n, blocks),
        *(*a.stride(), *noise.stride()),
        *(ROWS, COLUMNS),
        num_warps=WARPS,
    )
    return ProjectedMatrices(work, multiples, vanished)


def with_first_column_triton(r, multiples, vanished, dtype):
    count, _, n = r.shape
    out = torch.empty(r.shape, dtype=dtype, device=r.device)
    blocks = ceil_div(n, SIDE)
    _with[(count * blocks * blocks,)](
        r, multiples, vanished.view(torch.uint8), out, n, blocks, SIDE, num_warps=WARPS
    )
    return out


@jit(do_not_specialize=["m", "n", "blocks"])
def _without(
    a, noise, work, multiples, vanished, m, n, blocks, a_batch, a_row, a_column, noise_row, noise_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns: what they have in common with the first one, and then their numbers without it."""
    matrix, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    i = tl.arange(0, ROWS)[:, None]
    j = block * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    a += matrix * a_batch
    some = tl.zeros((ROWS, COLUMNS), tl.int32)
    products = tl.zeros((ROWS, COLUMNS), tl.float64)
    squares = tl.zeros((ROWS, 1), tl.float64)
    for start in range(0, m, ROWS):
        row = (start + i).to(tl.int64)
        first = tl.load(a + row * a_row, mask=row < m, other=0.0).to(tl.float64)
        x = tl.load(a + row * a_row + j.to(tl.int64) * a_column, mask=(row < m) & (j < n), other=0.0)
        some |= (x != 0.0).to(tl.int32)  # so is NaN
        products += first * x.to(tl.float64)
        squares += first * first
    empty = tl.sum(some, axis=0, keep_dims=True) == 0
    square = tl.sum(squares, axis=0, keep_dims=True)
    multiple = tl.sum(products, axis=0, keep_dims=True) / square
    multiple = tl.where(empty | (j == 0) | (square == 0.0), 0.0, multiple)
    tl.store(multiples + matrix * n + j, multiple, mask=j < n)
    tl.store(vanished + matrix * n + j, empty.to(tl.uint8), mask=j < n)
    for start in range(0, m, ROWS):
        row = (start + i).to(tl.int64)
        inside = (row < m) & (j < n)
        first = tl.load(a + row * a_row, mask=row < m, other=0.0).to(tl.float64)
        x = tl.load(a + row * a_row + j.to(tl.int64) * a_column, mask=inside, other=0.0).to(tl.float64)
        other = tl.load(noise + row * noise_row + j * noise_column, mask=inside & empty, other=0.0)
        x = tl.where(empty, other.to(tl.float64), x - first * multiple)
        tl.store(work + (matrix * m + row) * n + j, x, mask=inside)


@jit(do_not_specialize=["n", "blocks"])
def _with(r, multiples, vanished, out, n, blocks, SIDE: tl.constexpr):
    """A block of R; those below the diagonal are not read."""
    matrix, i, j, inside = place_of_tile(n, n, blocks, blocks, SIDE, SIDE)
    here = (matrix * n + i) * n + j
    empty = tl.load(vanished + matrix * n + j, mask=j < n, other=0) != 0
    x = tl.load(r + here, mask=inside & (i <= j) & ~empty, other=0.0)
    if tl.program_id(0) % (blocks * blocks) < blocks:
        corner = tl.load(r + matrix * n * n)
        multiple = tl.load(multiples + matrix * n + j, mask=(j < n) & ~empty, other=0.0)
        x += tl.where(i == 0, multiple * corner, 0.0)
    tl.store(out + here, x.to(out.dtype.element_ty), mask=inside)
