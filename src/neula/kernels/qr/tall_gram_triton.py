"""Gram matrix of a tall matrix, in one pass at the speed of memory.

For m x n ``4 m n^2`` flops in fp16 (with ``A = H + L`` in two parts, ``H^T (H + 2 L)`` has the Gram matrix as
its symmetric part, up to ``L^T L``), ``4 m n`` bytes: for n = 128 128 flops a byte, of which an H200 can do
160.

Parts are fp16 without a scale between them. A column is scaled as a whole so that its elements lie well above
the subnormal numbers: an absolute error of ``2^-25`` is then far below the rounding of float32. Each thread
block scales by what it finds in a sample of its own rows, and undoes that in its part of the sum.

Elements move four at a time where a kernel can know that rows, or the columns of a column-major matrix,
begin and end at multiples of four. Copies into shared memory ahead of time would move others one by one,
which takes longer than to wait for them.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.kernels.launch import ceil_div, elements_at_a_time, multiprocessors, next_power_of_2, share
from neula.kernels.products.parts_triton import exponents_of, power_of_two, split, times_power_of_two
from neula.kernels.qr.tall import COLUMNS
from neula.kernels.triton_source import jit, tl

BLOCK_COLUMNS = 128


class TallGramConfig(NamedTuple):
    """How a pass over the matrix is cut up.

    Rows of the Gram matrix are those that are summed on the unit, which truncates, before the sum is added
    outside.
    """

    # rows, warps, stages: rows of a block, warps of a thread block, loads in flight.
    rows: int
    warps: int
    stages: int
    blocks: int  # thread blocks of a multiprocessor: while one multiplies, the other loads or stores


GRAM = {64: TallGramConfig(32, 4, 4, 2), 128: TallGramConfig(64, 8, 3, 1), 256: TallGramConfig(64, 8, 3, 1)}
"""For matrices of up to so many columns, as measured on an H200: 4194304 x 128 take 0.76 ms, with blocks of
32 rows 0.81, of 128 rows 0.88."""

ACROSS = TallGramConfig(64, 8, 3, 1)
"""For the block of the Gram matrix between the first 128 columns and the others: 1048576 x 256 take 0.78 ms,
with two stages 0.87."""

SUM = (32, 128)
"""Matrices that are added at a time, and elements of each."""

SAMPLES = 4
"""Blocks of rows that a thread block looks at for its scales, if it has as many."""

TOP = 7
"""Exponent that the largest elements of a sample are scaled to."""


def tall_gram_triton(a: torch.Tensor, *, config: TallGramConfig | None = None) -> torch.Tensor:
    """:func:`neula.kernels.qr.tall.tall_gram` by the kernels, queued on the current stream."""
    total = tall_half_gram_triton(a, config=config)
    return total.add(total.mT).mul_(0.5)


def tall_half_gram_triton(a: torch.Tensor, *, config: TallGramConfig | None = None) -> torch.Tensor:
    """``H^T (H + 2 L)``: a matrix whose symmetric part is :func:`tall_gram_triton`."""
    m, n = a.shape
    width = width_of(n)
    rows, warps, stages, blocks = config or config_for(GRAM, n)
    chunk = share(m, blocks * multiprocessors(a.device), max(rows, ACROSS.rows))
    parts = torch.empty(ceil_div(m, chunk), n, n, dtype=a.dtype, device=a.device)
    arguments = (a, parts, m, n, chunk, samples_of(chunk, rows), *a.stride())
    vector, by_columns = elements_at_a_time(a), a.stride(0) == 1
    with torch.cuda.device_of(a):
        _gram_kernel[(len(parts), ceil_div(n, width))](
            *arguments,
            *(rows, width, stages if vector > 1 else 1, True, TOP, vector, by_columns),
            num_warps=warps,
        )
        if n > width:
            rows, warps, stages, _ = ACROSS
            _gram_kernel[(len(parts), 1)](
                *arguments,
                *(rows, width, stages if vector > 1 else 1, False, TOP, vector, by_columns),
                num_warps=warps,
            )
    return sum_of_blocks(parts, torch.empty(n, n, dtype=torch.float64, device=a.device))


def sum_of_blocks(parts: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Sum of float32 matrices in float64 into ``total``: torch would convert them first."""
    count, m, n = parts.shape
    with torch.cuda.device_of(parts):
        _sum_kernel[(ceil_div(n, SUM[1]), m)](
            parts, total, count, m * n, n, *total.stride(), *SUM, num_warps=4
        )
    return total


def samples_of(chunk: int, rows: int) -> int:
    """Blocks of rows to look at of a chunk of them: of a short one all, once."""
    return max(1, min(SAMPLES, chunk // rows))


def config_for(table: dict[int, TallGramConfig], n: int) -> TallGramConfig:
    return table[next(columns for columns in COLUMNS if n <= columns)]


def width_of(n: int) -> int:
    """Columns of a block: of two halves which the unit can multiply."""
    return min(BLOCK_COLUMNS, max(32, next_power_of_2(n)))


@jit(do_not_specialize=["m", "n", "chunk", "samples"])
def _gram_kernel(
    a, parts, m, n, chunk, samples, stride_row, stride_column,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, DIAGONAL: tl.constexpr,
    TOP: tl.constexpr, VECTOR: tl.constexpr, BY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Partial sums of a block of ``H^T (H + 2 L)`` over the rows of this program."""
    # Multiples of VECTOR, as the compiler has to see to move so many elements at a time.
    if BY_COLUMNS:
        m, stride_column, stride_row = m // VECTOR * VECTOR, stride_column // VECTOR * VECTOR, 1
        chunk = chunk // ROWS * ROWS
    else:
        n, stride_row = n // VECTOR * VECTOR, stride_row // VECTOR * VECTOR
    first = tl.program_id(0).to(tl.int64) * chunk
    last = tl.minimum(first + chunk, m)
    left = tl.program_id(1) * WIDTH
    right = left if DIAGONAL else left + WIDTH
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, WIDTH)[None, :]
    x_column, x_exists = a + (left + j).to(tl.int64) * stride_column, left + j < n
    y_column, y_exists = a + (right + j).to(tl.int64) * stride_column, right + j < n
    x_exponents = _sampled(x_column, x_exists, i, first, last, samples, stride_row, WIDTH, TOP)
    y_exponents = x_exponents
    if not DIAGONAL:
        y_exponents = _sampled(y_column, y_exists, i, first, last, samples, stride_row, WIDTH, TOP)
    x_scale, y_scale = power_of_two(x_exponents)[None, :], power_of_two(y_exponents)[None, :]

    total = tl.zeros((WIDTH, WIDTH), tl.float32)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + i
        x = tl.load(x_column + row * stride_row, mask=(row < last) & x_exists, other=0.0)
        if DIAGONAL:
            x_high, x_low = split(x * x_scale, tl.float16)
            run = tl.dot(tl.trans(x_high), x_low + x_low)
            run = tl.dot(tl.trans(x_high), x_high, run)
        else:
            y = tl.load(y_column + row * stride_row, mask=(row < last) & y_exists, other=0.0)
            x_high, x_low = split(x * x_scale, tl.float16)
            y_high, y_low = split(y * y_scale, tl.float16)
            run = tl.dot(tl.trans(x_high), y_low)
            run = tl.dot(tl.trans(x_low), y_high, run)
            run = tl.dot(tl.trans(x_high), y_high, run)
        total += run  # by an ordinary addition, rounded to nearest: the matrix unit truncates

    k = tl.arange(0, WIDTH)
    total = times_power_of_two(total, -(x_exponents[:, None] + y_exponents[None, :]))
    rows, columns = left + k[:, None], right + k[None, :]
    inside = (rows < n) & (columns < n)
    parts += tl.program_id(0).to(tl.int64) * n * n
    tl.store(parts + rows * n + columns, total, mask=inside)
    if not DIAGONAL:
        tl.store(parts + columns * n + rows, total, mask=inside)


@jit(do_not_specialize=["count", "size", "n"])
def _sum_kernel(
    parts, total, count, size, n, total_row, total_column,
    PARTS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Some elements of a row of the sum."""
    j = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    parts += tl.program_id(1) * n
    total += tl.program_id(1).to(tl.int64) * total_row
    i = tl.arange(0, PARTS)
    sums = tl.zeros((PARTS, ELEMENTS), tl.float64)
    for start in range(0, count, PARTS):
        inside = (start + i < count)[:, None] & (j < n)[None, :]
        place = parts + (start + i)[:, None].to(tl.int64) * size + j[None, :]
        sums += tl.load(place, mask=inside, other=0.0).to(tl.float64)
    place = total + j.to(tl.int64) * total_column
    tl.store(place, tl.sum(sums, axis=0).to(total.dtype.element_ty), mask=j < n)


@jit
def _sampled(column, exists, i, first, last, samples, stride_row, WIDTH: tl.constexpr, TOP: tl.constexpr):
    """Exponents of the scales of columns, by the largest elements of some blocks of rows."""
    largest = tl.zeros((WIDTH,), tl.float32)
    for sample in range(samples):
        row = first + (last - first) * sample // samples + i
        x = tl.load(column + row * stride_row, mask=(row < last) & exists, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=0))
    # Columns that are zero in the sample are taken as they are: most often they are zeros and ones.
    return tl.where(largest == 0.0, 0, tl.minimum(TOP - exponents_of(largest), 126))
