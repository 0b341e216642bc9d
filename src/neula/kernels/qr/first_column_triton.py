"""The passes of ``first_column``: a thread block has some columns of A, or a part of R."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from neula.kernels.launch import ceil_div
from neula.kernels.qr.first_column import ProjectedMatrices
from neula.kernels.triton_source import jit, tl

ROWS, COLUMNS, WARPS = 64, 32, 4
"""Shape of a block of A: its rows are read twice, the second time from the cache."""

SIDE = 64
"""Side of a block of R."""


def without_first_column_triton(a: torch.Tensor, noise: torch.Tensor) -> ProjectedMatrices:
    """``first_column.without_first_column`` by the kernel, queued on the current stream."""
    count, m, n = a.shape
    work = torch.empty(a.shape, dtype=torch.float64, device=a.device)
    multiples = work.new_empty(count, n)
    vanished = torch.empty(count, n, dtype=torch.bool, device=a.device)
    blocks = ceil_div(n, COLUMNS)
    with torch.cuda.device_of(a):
        _without[(count * blocks,)](
            *(a, noise, work, multiples, vanished.view(torch.uint8), m, n, blocks),
            *(*a.stride(), *noise.stride()),
            *(ROWS, COLUMNS),
            num_warps=WARPS,
        )
    return ProjectedMatrices(work, multiples, vanished)


def with_first_column_triton(
    r: torch.Tensor, multiples: torch.Tensor, vanished: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """:func:`neula.kernels.qr.first_column.with_first_column` by the kernel, queued on the current stream."""
    count, _, n = r.shape
    out = torch.empty(r.shape, dtype=dtype, device=r.device)
    blocks = ceil_div(n, SIDE)
    with torch.cuda.device_of(r):
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
    matrix, place = (tl.program_id(0) // (blocks * blocks)).to(tl.int64), tl.program_id(0) % (blocks * blocks)
    i = place // blocks * SIDE + tl.arange(0, SIDE)[:, None]
    j = place % blocks * SIDE + tl.arange(0, SIDE)[None, :]
    inside = (i < n) & (j < n)
    here = (matrix * n + i) * n + j
    empty = tl.load(vanished + matrix * n + j, mask=j < n, other=0) != 0
    x = tl.load(r + here, mask=inside & (i <= j) & ~empty, other=0.0)
    if place // blocks == 0:
        corner = tl.load(r + matrix * n * n)
        multiple = tl.load(multiples + matrix * n + j, mask=(j < n) & ~empty, other=0.0)
        x += tl.where(i == 0, multiple * corner, 0.0)
    tl.store(out + here, x.to(out.dtype.element_ty), mask=inside)
