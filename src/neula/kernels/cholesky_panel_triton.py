"""The panels of :mod:`neula.kernels.cholesky_panel`: products in Triton, factors between them in CUDA C++.

Gram matrices of blocks of rows are added up where R and its inverse are found, by a warp for each panel: what
follows are 32 reciprocals one after the other, and Triton, which has no lanes, takes several times as long.
A second pass is launched whatever comes out of the first; it ends at once where there is nothing to do.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from neula.kernels.cholesky_panel import WIDTH
from neula.kernels.cuda_source import compiled
from neula.kernels.launch import multiprocessors, share

ROWS, WARPS = 32, 4
"""Rows that are multiplied at a time, and warps of a thread block."""

EACH = 4
"""Thread blocks for each multiprocessor, that enough loads are under way."""

PARTS = 16
"""Gram matrices that are added up, at most."""

THREADS = 128
"""Of a thread block that finds R: one warp does, the others help to add up."""

Factorize = Callable[..., None]


def factorize_cuda(*arguments: torch.Tensor | int) -> None:
    """R and its inverse of each Gram matrix: ``panel_factors`` in ``cholesky_panel.cu``.

    Raises
    ------
    ImportError
        Without a torch that compiles CUDA.
    """
    parts, kept = arguments[:2]
    assert isinstance(parts, torch.Tensor)
    assert isinstance(kept, torch.Tensor)
    kernel = compiled("cholesky_panel", "panel_factors", parts.device)
    kernel((len(kept), 1, 1), (THREADS, 1, 1), list(arguments))


def cholesky_panel_triton(
    a: torch.Tensor,
    r: torch.Tensor,
    narrow: torch.Tensor | None = None,
    *,
    factorize: Factorize = factorize_cuda,
) -> None:
    """:func:`neula.kernels.cholesky_panel.cholesky_panel` by the kernels, queued on the current stream."""
    count, m, n = a.shape
    among = min(PARTS, max(1, EACH * multiprocessors(a.device) // count))
    chunk = share(m, among, ROWS)
    blocks = triton.cdiv(m, chunk)
    room = a.new_empty(count * (2 * blocks + 2), WIDTH, WIDTH)
    parts, common, kept, inverse = room.split([count * blocks, count * blocks, count, count])
    done = torch.empty(count, dtype=torch.int32, device=a.device)
    place = a if narrow is None else narrow
    left, right = slice(0, min(n, WIDTH)), slice(min(n, WIDTH), n)
    with torch.cuda.device_of(a):
        for columns in (left, right) if n > WIDTH else (left,):
            some, beside, rounded = a[..., columns], a[..., right], place[..., columns]
            sizes = (m, some.shape[2], chunk, blocks)
            grid, constants = (count * blocks,), (ROWS, WIDTH)
            if columns is left:
                _gram[grid](some, parts, *sizes, *a.stride(), *constants, num_warps=WARPS)
            else:
                known = (a[..., left], some, common, r[:, left, right], parts)
                _project[grid](*known, *sizes, *a.stride(), *r.stride(), *constants, num_warps=WARPS)
            block = r[:, columns, columns]
            others = 0 if columns is right else beside.shape[2]
            for second in (False, True):
                factorize(parts, kept, inverse, done, block, blocks, sizes[1], *r.stride(), int(second))
                _multiply[grid](
                    *(some, rounded, beside, inverse, parts, common, done, *sizes, others),
                    *(*a.stride(), *place.stride(), second, narrow is not None, others > 0, *constants),
                    num_warps=WARPS,
                )


@triton.jit(do_not_specialize=["m", "n", "chunk", "blocks"])
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


@triton.jit(do_not_specialize=["m", "n", "chunk", "blocks"])
def _project(
    q, a, common, r, parts, m, n, chunk, blocks, a_batch, a_row, a_column, r_batch, r_row, r_column,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The rows of this program without what they have in common with Q, and their Gram matrix."""
    matrix, part = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, SIZE)[None, :]
    k = tl.arange(0, SIZE)[:, None]
    here = k * SIZE + j
    product = tl.zeros((SIZE, SIZE), tl.float64)
    for block in range(blocks):
        product += tl.load(common + (matrix * blocks + block) * SIZE * SIZE + here)
    if part == 0:
        place = r + matrix * r_batch + k.to(tl.int64) * r_row + j.to(tl.int64) * r_column
        tl.store(place, product, mask=(k < SIZE) & (j < n))
    column = matrix * a_batch + j.to(tl.int64) * a_column
    last = tl.minimum(part * chunk + chunk, m)
    gram = tl.zeros((SIZE, SIZE), tl.float64)
    for start in range(part * chunk, last, ROWS):
        row, inside = (start + i).to(tl.int64), (start + i < last) & (j < n)
        known = tl.load(q + column + row * a_row, mask=start + i < last, other=0.0)
        x = tl.load(a + column + row * a_row, mask=inside, other=0.0)
        x -= tl.dot(known, product, input_precision="ieee", out_dtype=tl.float64)
        tl.store(a + column + row * a_row, x, mask=inside)
        gram = tl.dot(tl.trans(x), x, gram, input_precision="ieee", out_dtype=tl.float64)
    tl.store(parts + tl.program_id(0).to(tl.int64) * SIZE * SIZE + here, gram)


@triton.jit(do_not_specialize=["m", "n", "chunk", "blocks", "others"])
def _multiply(
    a, narrow, beside, inverses, parts, common, done, m, n, chunk, blocks, others, a_batch, a_row, a_column,
    narrow_batch, narrow_row, narrow_column,
    SECOND: tl.constexpr, ROUNDS: tl.constexpr, BESIDE: tl.constexpr,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The rows of this program times the inverse of R; what others have of them if they are final,
    and else their Gram matrix.
    """
    matrix, part = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    enough = tl.load(done + matrix) != 0
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, SIZE)[None, :]
    here = tl.arange(0, SIZE)[:, None] * SIZE + j
    there = tl.program_id(0).to(tl.int64) * SIZE * SIZE + here
    column = matrix * a_batch + j.to(tl.int64) * a_column
    narrow += matrix * narrow_batch + j.to(tl.int64) * narrow_column
    first, last = part * chunk, tl.minimum(part * chunk + chunk, m)
    inverse = tl.load(inverses + matrix * SIZE * SIZE + here)
    product = tl.zeros((SIZE, SIZE), tl.float64)
    if enough != SECOND:  # a second pass that is wanted, or a first one that is all
        for start in range(first, last, ROWS):
            row, inside = (start + i).to(tl.int64), (start + i < last) & (j < n)
            x = _multiplied(a + column + row * a_row, inside, inverse)
            if ROUNDS:
                tl.store(narrow + row * narrow_row, x.to(tl.float32), mask=inside)
            if BESIDE:
                y = tl.load(beside + column + row * a_row, mask=(row < last) & (j < others), other=0.0)
                product = tl.dot(tl.trans(x), y, product, input_precision="ieee", out_dtype=tl.float64)
        if BESIDE:
            tl.store(common + there, product)
    elif not SECOND:
        for start in range(first, last, ROWS):
            row, inside = (start + i).to(tl.int64), (start + i < last) & (j < n)
            x = _multiplied(a + column + row * a_row, inside, inverse)
            product = tl.dot(tl.trans(x), x, product, input_precision="ieee", out_dtype=tl.float64)
        tl.store(parts + there, product)


@triton.jit
def _multiplied(place, inside, inverse):
    """Some rows, replaced by their product."""
    x = tl.load(place, mask=inside, other=0.0)
    x = tl.dot(x, inverse, input_precision="ieee", out_dtype=tl.float64)
    tl.store(place, x, mask=inside)
    return x
