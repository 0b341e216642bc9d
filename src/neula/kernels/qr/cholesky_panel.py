"""QR of narrow panels of a batch in double precision: Cholesky QR, twice.

Modified Gram-Schmidt of a panel is a chain of as many steps over all of its rows as it has columns. Cholesky
QR has such a chain on the small Gram matrix only; between are products, whose rows are dealt out to the whole
GPU. Where the first pass is not orthonormal, which is at condition numbers beyond 1e4, the second one is: it
is launched whatever comes out of the first, and ends at once where there is nothing to do.

Products are in Triton. R and its inverse are found in CUDA C++, by a warp for each panel: 32 reciprocals one
after the other, for which Triton, which has no lanes, takes several times as long.
"""

from __future__ import annotations

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.dispatch import kernel
from neula.kernels.launch import ceil_div, multiprocessors, share
from neula.kernels.triton_source import jit, tl

MAX_COLUMNS = 32
"""A Gram matrix that the registers of a thread block hold well."""

LOST = 2.0**-44
"""Part of its diagonal element that a pivot may owe to rounding errors."""


def _fits(a: torch.Tensor, r: torch.Tensor, narrow: torch.Tensor | None = None) -> bool:
    return a.dtype == torch.float64 and 0 < a.shape[2] <= MAX_COLUMNS and a.numel() > 0


@kernel("cholesky_panel_triton", when=_fits)
def cholesky_panel(a: torch.Tensor, r: torch.Tensor, narrow: torch.Tensor | None = None) -> None:
    """QR of each panel, Q in the place of A: orthonormal to the working precision up to a condition of 1e6.

    A (batch, m, n) is float64, of at most 32 columns whose squares neither overflow nor underflow; R (batch,
    n, n) and, float32, a rounded Q are written to the others. A pivot smaller than :data:`LOST` of the
    diagonal element is taken to be that, and what is right of it to be zero. ``A = Q R`` all the same: such a
    column of Q is short after the first pass, and the second one makes a unit vector of it. A column that
    vanishes becomes a zero column of Q and a zero on the diagonal of R; NaN and Inf stay in their matrix.

    Examples
    --------
    >>> a = torch.tensor([[[0.0, 3.0], [2.0, 5.0]]], dtype=torch.float64)
    >>> r = torch.empty_like(a)
    >>> cholesky_panel(a, r)
    >>> r
    tensor([[[2., 5.],
             [0., 3.]]], dtype=torch.float64)
    """
    first, inverse = _factors(a.mH @ a)
    q = a @ inverse
    second, inverse = _factors(q.mH @ q)
    a.copy_(q @ inverse)
    r.copy_(second @ first)
    if narrow is not None:
        narrow.copy_(a)


def _factors(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """R and its inverse: operations on columns that turn G into ``R^H`` turn the identity into ``R^-1``."""
    n = gram.shape[1]
    least = LOST * gram.diagonal(dim1=1, dim2=2).real
    left, inverse = gram.clone(), torch.eye(n, dtype=gram.dtype, device=gram.device).repeat(len(gram), 1, 1)
    r = torch.zeros_like(gram)
    for k in range(n):
        row, pivot = left[:, k].clone(), left[:, k, k].real
        lost = pivot < least[:, k]
        pivot = torch.where(lost, least[:, k], pivot)
        row[:, : k + 1], row[:, k + 1 :] = 0, row[:, k + 1 :].masked_fill(lost[:, None], 0.0)
        reciprocal = torch.where(pivot == 0, 0.0, 1 / pivot)[:, None]
        for x in (left, inverse):
            x -= x[:, :, k : k + 1] * (row * reciprocal)[:, None]
        row[:, k] = pivot
        root = reciprocal.sqrt()
        r[:, k] = row * root
        inverse[:, :, k] *= root
    return r, inverse


ROWS, WARPS = 32, 4
"""Rows that are multiplied at a time, and warps of a thread block."""

EACH = 4
"""Thread blocks for each multiprocessor, that enough loads are under way."""

PARTS = 16
"""Gram matrices that are added up, at most."""

THREADS = 64
"""Of a thread block that finds R: one warp does, the other one helps to add up. With more of them a
multiprocessor cannot hold five."""


def factorize_cuda(*arguments: torch.Tensor | int) -> None:
    parts, kept = arguments[:2]
    assert isinstance(parts, torch.Tensor)
    assert isinstance(kept, torch.Tensor)
    kernel = compiled("cholesky_panel", "panel_factors", parts.device)
    kernel((len(kept), 1, 1), (THREADS, 1, 1), list(arguments))


def cholesky_panel_triton(a, r, narrow=None, *, factorize=factorize_cuda):
    count, m, n = a.shape
    among = min(PARTS, max(1, EACH * multiprocessors(a.device) // count))
    chunk = share(m, among, ROWS)
    blocks = ceil_div(m, chunk)
    room = a.new_empty(count * (blocks + 2), MAX_COLUMNS, MAX_COLUMNS)
    parts, kept, inverse = room.split([count * blocks, count, count])
    done = torch.empty(count, dtype=torch.int32, device=a.device)
    rounds, place = narrow is not None, a if narrow is None else narrow
    sizes, constants = (m, n, chunk, blocks), (ROWS, MAX_COLUMNS)
    of_factors = (parts, kept, inverse, done, r, blocks, n, *r.stride())
    of_product = (a, place, inverse, parts, done, *sizes, *a.stride(), *place.stride())
    grid = (count * blocks,)
    _gram[grid](a, parts, *sizes, *a.stride(), *constants, num_warps=WARPS)
    for second in (False, True):
        factorize(*of_factors, int(second))
        _multiply[grid](*of_product, second, rounds, *constants, num_warps=WARPS)


@jit(do_not_specialize=["m", "n", "chunk", "blocks"])
def _gram(
    a, parts, m, n, chunk, blocks, a_batch, a_row, a_column,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Gram matrix of the rows of this program."""
    matrix, part = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, SIZE)[None, :]
    place = a + matrix * a_batch + j.to(tl.int64) * a_column
    last = tl.minimum(part * chunk + chunk, m)
    gram = tl.zeros((SIZE, SIZE), tl.float64)
    for start in range(part * chunk, last, ROWS):
        row = start + i
        x = tl.load(place + row.to(tl.int64) * a_row, mask=(row < last) & (j < n), other=0.0)
        gram = tl.dot(tl.trans(x), x, gram, input_precision="ieee", out_dtype=tl.float64)
    k = tl.arange(0, SIZE)[:, None]
    tl.store(parts + tl.program_id(0).to(tl.int64) * SIZE * SIZE + k * SIZE + j, gram)


@jit(do_not_specialize=["m", "n", "chunk", "blocks"])
def _multiply(
    a, narrow, inverses, parts, done, m, n, chunk, blocks, a_batch, a_row, a_column, narrow_batch, narrow_row,
    narrow_column,
    SECOND: tl.constexpr, ROUNDS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The rows of this program times the inverse of R, and their Gram matrix if they are not final."""
    matrix, part = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    enough = tl.load(done + matrix) != 0
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, SIZE)[None, :]
    here = tl.arange(0, SIZE)[:, None] * SIZE + j
    place = a + matrix * a_batch + j.to(tl.int64) * a_column
    narrow += matrix * narrow_batch + j.to(tl.int64) * narrow_column
    first, last = part * chunk, tl.minimum(part * chunk + chunk, m)
    inverse = tl.load(inverses + matrix * SIZE * SIZE + here)
    if enough != SECOND:  # a second pass that is wanted, or a first one that is all
        for start in range(first, last, ROWS):
            row, inside = (start + i).to(tl.int64), (start + i < last) & (j < n)
            x = _multiplied(place + row * a_row, inside, inverse)
            if ROUNDS:
                tl.store(narrow + row * narrow_row, x.to(tl.float32), mask=inside)
    elif not SECOND:
        gram = tl.zeros((SIZE, SIZE), tl.float64)
        for start in range(first, last, ROWS):
            row, inside = (start + i).to(tl.int64), (start + i < last) & (j < n)
            x = _multiplied(place + row * a_row, inside, inverse)
            gram = tl.dot(tl.trans(x), x, gram, input_precision="ieee", out_dtype=tl.float64)
        tl.store(parts + tl.program_id(0).to(tl.int64) * SIZE * SIZE + here, gram)


@jit
def _multiplied(place, inside, inverse):
    """Some rows, replaced by their product."""
    x = tl.load(place, mask=inside, other=0.0)
    x = tl.dot(x, inverse, input_precision="ieee", out_dtype=tl.float64)
    tl.store(place, x, mask=inside)
    return x
