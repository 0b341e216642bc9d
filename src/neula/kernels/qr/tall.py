"""The two passes of Cholesky QR over a tall matrix: its Gram matrix, and its product with a small one.

Both in fp16 with error correction (Ootomo and Yokota, "TSQR on TensorCores with error correction", 2021), so
that they run at the speed of memory, with sums in float32 whose errors do not grow with the number of rows.
With ``A = H + L`` in two parts, ``H^T (H + 2 L)`` has the Gram matrix as its symmetric part, up to ``L^T L``;
W is in halves.

Parts are fp16 without a scale between them. A column is scaled as a whole so that its elements lie well above
the subnormal numbers: an absolute error of ``2^-25`` is then far below the rounding of float32. For the Gram
matrix each thread block scales by what it finds in a sample of its own rows, and undoes that in its part of
the sum; for the product columns are scaled by what is known of their size.

Elements move four at a time where a kernel can know that rows, or the columns of a column-major matrix, begin
and end at multiples of four. Copies into shared memory ahead of time would move others one by one, which
takes longer than to wait for them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.kernels.dispatch import kernel
from neula.kernels.launch import ceil_div, elements_at_a_time, multiprocessors, next_power_of_2, share
from neula.kernels.products.parts_triton import (
    exponents_of,
    power_of_two,
    product_of_parts,
    split,
    times_power_of_two,
)
from neula.kernels.triton_source import jit, tl

COLUMNS = (64, 128, 256)
"""Up to how many columns the kernels have a configuration: with more, W does not fit on the chip."""

PANEL_COLUMNS = 128
"""Up to how many columns a block of rows is multiplied at once, and can take the place of what it was."""

_CHUNK = 1 << 22
"""Elements that are converted to float64 at a time."""


def _fits(a: torch.Tensor, *_: torch.Tensor | None) -> bool:
    return a.dtype == torch.float32 and a.shape[1] <= COLUMNS[-1]


def tall_gram(a: torch.Tensor) -> torch.Tensor:
    """``A^H A``, float64, as accurate as a float32 product, on a GPU by a Triton kernel, elsewhere in
    float64.

    A (m, n) is float32, of at most 256 columns. Each column should be of about the same size all along: where
    elements are larger by a factor of 256 than in a sample of some thousand rows, the result may be infinite,
    and where they are smaller by a factor of ``2**20`` they lose bits.

    Examples
    --------
    >>> tall_gram(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[10., 14.],
            [14., 20.]], dtype=torch.float64)
    """
    total = half_gram(a)
    return total.add(total.mH).mul_(0.5)


@kernel("tall_product_triton", when=_fits)
def tall_product(a: torch.Tensor, w: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """``A W``, float32, as accurate as a float32 product, on a GPU by a Triton kernel, elsewhere in float64.

    A (m, n) is float32, of at most 256 columns; W is upper triangular: what lies below is not read. ``sizes``
    (n,) are at least the largest magnitude of each column of A, best not many times as large: scales for the
    kernel. The result is NaN where W is.
    """
    w = w.to(torch.promote_types(w.dtype, torch.float64)).triu()
    return torch.cat([(block @ w).to(a.dtype) for block in _blocks(a)])


@kernel("half_gram_triton", when=_fits)
def half_gram(a: torch.Tensor) -> torch.Tensor:
    """A matrix whose symmetric part is :func:`tall_gram`, all that a Cholesky factorization needs."""
    gram = a.new_zeros(a.shape[1], a.shape[1], dtype=torch.promote_types(a.dtype, torch.float64))
    for block in _blocks(a):
        gram += block.mH @ block
    return gram


def _is_panel(a: torch.Tensor, *_: torch.Tensor | None) -> bool:
    narrow = a.shape[1] <= PANEL_COLUMNS and a.stride(0) == 1
    return narrow and a.dtype in (torch.float16, torch.float32)


@kernel("multiply_panel_triton", when=_is_panel)
def multiply_panel(
    a: torch.Tensor, w: torch.Tensor, norms: torch.Tensor, low: torch.Tensor | None = None
) -> None:
    """``A W`` in place of A, as accurate as a float32 product and rounded once, and rounded to a narrower
    type in ``low``, column-major.

    A (m, n) is float32 or float16, column-major, of at most 128 columns; W is float32, upper triangular: what
    lies below is not read. ``norms`` of the columns of A are scales for the kernel.
    """
    a.copy_(tall_product.reference(a, w, norms))
    if low is not None:
        low.copy_(a)


def _blocks(a: torch.Tensor) -> list[torch.Tensor]:
    wide = torch.promote_types(a.dtype, torch.float64)
    return [block.to(wide) for block in a.split(max(1, _CHUNK // a.shape[1]))]


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
"""Blocks of rows that a thread block reads for its scales, if it has as many."""

GRAM_TOP = 7
"""Exponent that the largest elements of a sample are scaled to."""


def half_gram_triton(a):
    m, n = a.shape
    width = width_of(n)
    rows, warps, stages, blocks = config_for(GRAM, n)
    chunk = share(m, blocks * multiprocessors(a.device), max(rows, ACROSS.rows))
    parts = torch.empty(ceil_div(m, chunk), n, n, dtype=a.dtype, device=a.device)
    arguments = (a, parts, m, n, chunk, max(1, min(SAMPLES, chunk // rows)), *a.stride())
    vector, by_columns = elements_at_a_time(a), a.stride(0) == 1
    _gram_kernel[(len(parts), ceil_div(n, width))](
        *arguments,
        *(rows, width, stages if vector > 1 else 1, True, GRAM_TOP, vector, by_columns),
        num_warps=warps,
    )
    if n > width:
        rows, warps, stages, _ = ACROSS
        _gram_kernel[(len(parts), 1)](
            *arguments,
            *(rows, width, stages if vector > 1 else 1, False, GRAM_TOP, vector, by_columns),
            num_warps=warps,
        )
    return sum_of_blocks(parts, torch.empty(n, n, dtype=torch.float64, device=a.device))


def sum_of_blocks(parts: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Sum of float32 matrices in float64 into ``total``: torch would convert them first."""
    count, m, n = parts.shape
    _sum_kernel[(ceil_div(n, SUM[1]), m)](parts, total, count, m * n, n, *total.stride(), *SUM, num_warps=4)
    return total


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
            run = product_of_parts(tl.trans(x_high), tl.trans(x_low), y_high, y_low)
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


PRODUCT = {
    64: TallGramConfig(64, 4, 2, 3),
    128: TallGramConfig(64, 4, 2, 2),
    256: TallGramConfig(64, 4, 2, 2),
}
"""For the first 128 columns: 4194304 x 128 take 1.2 ms, with one thread block of 128 rows 1.6, and with W as
a whole, which leaves no room for a second thread block with its loads in flight, 1.44 at best."""

NARROW_PANEL = {64: TallGramConfig(64, 4, 3, 3), 128: TallGramConfig(64, 4, 3, 2)}
"""For panels in half precision."""

BEYOND = TallGramConfig(128, 8, 1, 1)
"""For the columns beyond: 0.9 ms for 1048576 x 256, with 64 rows 1.2."""

TOP = 14
"""Exponent that the largest elements are scaled to."""

REGISTERS = 1 << 16
"""Of a multiprocessor, which thread blocks share."""


def tall_product_triton(a, w, sizes):
    m, n = a.shape
    q = a.new_empty(n, m).mT if a.stride(0) == 1 else a.new_empty(m, n)
    w, sizes, first = w.float(), sizes.float(), slice(0, BLOCK_COLUMNS)
    _multiply(a[:, first], w[first, first], sizes[first], q[:, first], config_for(PRODUCT, n))
    if n > BLOCK_COLUMNS:
        _multiply(a, w, sizes, q, BEYOND, beyond=True)
    return q


def multiply_panel_triton(a, w, norms, low=None):
    config = config_for(NARROW_PANEL if a.itemsize == 2 else PRODUCT, a.shape[1])
    _multiply(a, w, norms, a, config, low)


def _multiply(
    a: torch.Tensor,
    w: torch.Tensor,
    sizes: torch.Tensor,
    q: torch.Tensor,
    config: TallGramConfig,
    low: torch.Tensor | None = None,
    *,
    beyond: bool = False,
) -> None:
    """``Q = A W`` for A and Q, which may be one, in the same order; or its columns from 128 on."""
    (m, n), (rows, warps, stages, blocks) = a.shape, config
    chunk = share(m, blocks * multiprocessors(a.device), rows)
    vector = min(elements_at_a_time(x) for x in (a, q, low) if x is not None)
    half = BLOCK_COLUMNS if beyond else width_of(n) // 2
    rounded = q if low is None else low
    _product_kernel[(ceil_div(m, chunk),)](
        *(a, w, sizes, q, rounded, m, n, chunk, *a.stride(), *w.stride(), *q.stride(), rounded.stride(1)),
        *(rows, half, stages, vector, TOP, a.stride(0) == 1, beyond, low is not None),
        num_warps=warps,
        maxnreg=min(255, REGISTERS // (32 * warps * blocks) // 8 * 8),
    )


@jit(do_not_specialize=["m", "n", "chunk"])
def _product_kernel(
    a, w, sizes, q, rounded, m, n, chunk, a_row, a_column, w_row, w_column, q_row, q_column, rounded_column,
    ROWS: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr, VECTOR: tl.constexpr, TOP: tl.constexpr,
    BY_COLUMNS: tl.constexpr, BEYOND: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Some rows of two halves of ``Q = A W``, or of the second alone, and rounded in ``rounded``, whose
    columns are contiguous. W is upper triangular: three quarters of it stay here.
    """
    # Multiples of VECTOR, as the compiler has to see to move so many elements at a time.
    if BY_COLUMNS:
        m, chunk, a_row, q_row = m // VECTOR * VECTOR, chunk // ROWS * ROWS, 1, 1
        a_column, q_column = a_column // VECTOR * VECTOR, q_column // VECTOR * VECTOR
        rounded_column = rounded_column // VECTOR * VECTOR
    else:
        n, a_row, q_row = n // VECTOR * VECTOR, a_row // VECTOR * VECTOR, q_row // VECTOR * VECTOR
    first = tl.program_id(0).to(tl.int64) * chunk
    last = tl.minimum(first + chunk, m)
    i = tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, HALF)
    j_0, j_1 = k[None, :], HALF + k[None, :]
    up_0 = _exponents_to(TOP, tl.load(sizes + k, mask=k < n, other=1.0))
    up_1 = _exponents_to(TOP, tl.load(sizes + HALF + k, mask=HALF + k < n, other=1.0))
    w_01 = _rows_scaled(w, k[:, None], j_1, w_row, w_column, n, up_0)
    w_11 = _rows_scaled(w, HALF + k[:, None], j_1, w_row, w_column, n, up_1)
    of_1 = _exponents_to(TOP, tl.maximum(tl.max(tl.abs(w_01), axis=0), tl.max(tl.abs(w_11), axis=0)))
    scale_0, scale_1 = power_of_two(up_0)[None, :], power_of_two(up_1)[None, :]
    back_1 = power_of_two(-of_1)[None, :]
    high_01, low_01 = split(w_01 * power_of_two(of_1)[None, :], tl.float16)
    high_11, low_11 = split(w_11 * power_of_two(of_1)[None, :], tl.float16)
    if not BEYOND:
        w_00 = _rows_scaled(w, k[:, None], j_0, w_row, w_column, n, up_0)
        of_0 = _exponents_to(TOP, tl.max(tl.abs(w_00), axis=0))
        back_0 = power_of_two(-of_0)[None, :]
        high_00, low_00 = split(w_00 * power_of_two(of_0)[None, :], tl.float16)
    rounded_0 = rounded + j_0.to(tl.int64) * rounded_column
    rounded_1 = rounded + j_1.to(tl.int64) * rounded_column
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + i
        inside_0, inside_1 = (row < last) & (j_0 < n), (row < last) & (j_1 < n)
        x_0 = tl.load(a + row * a_row + j_0.to(tl.int64) * a_column, mask=inside_0, other=0.0).to(tl.float32)
        x_1 = tl.load(a + row * a_row + j_1.to(tl.int64) * a_column, mask=inside_1, other=0.0).to(tl.float32)
        x_0, x_1 = x_0 * scale_0, x_1 * scale_1
        if BEYOND:
            y_1 = _product(x_0, high_01, low_01) + _product(x_1, high_11, low_11)
        else:
            if a.dtype.element_ty.primitive_bitwidth == 16:  # which scales leave as they are
                x_0, x_1 = x_0.to(tl.float16), x_1.to(tl.float16)
                y_0 = tl.dot(x_0, high_00, tl.dot(x_0, low_00))
                y_1 = tl.dot(x_1, low_11, tl.dot(x_0, low_01))
                y_1 = tl.dot(x_1, high_11, tl.dot(x_0, high_01, y_1))
            else:
                y_0, y_1 = _halves(x_0, x_1, high_00, low_00, high_01, low_01, high_11, low_11)
            y_0 *= back_0
            tl.store(q + row * q_row + j_0.to(tl.int64) * q_column, y_0.to(q.dtype.element_ty), mask=inside_0)
            if ROUNDS:
                tl.store(rounded_0 + row, y_0.to(rounded.dtype.element_ty), mask=inside_0)
        y_1 *= back_1
        tl.store(q + row * q_row + j_1.to(tl.int64) * q_column, y_1.to(q.dtype.element_ty), mask=inside_1)
        if ROUNDS:
            tl.store(rounded_1 + row, y_1.to(rounded.dtype.element_ty), mask=inside_1)


@jit
def _exponents_to(TOP: tl.constexpr, largest):
    """Exponents of scales, so that these and their inverses are normal numbers: what is less than ``2^-112``
    is scaled to less than the top and has less than the accuracy of float32.
    """
    return tl.minimum(TOP - 1 - exponents_of(largest), 126)


@jit
def _rows_scaled(w, i, j, w_row, w_column, n, up):
    """A block of W, without what the scales of the columns of A bring."""
    block = tl.load(w + i * w_row + j * w_column, mask=(i < n) & (j < n), other=0.0)
    return times_power_of_two(block, -up[:, None])


@jit
def _halves(x, z, high_00, low_00, high_01, low_01, high_11, low_11):
    """Two halves of rows times an upper triangular matrix in three blocks."""
    x_high, x_low = split(x, tl.float16)
    y_0 = product_of_parts(x_high, x_low, high_00, low_00)
    y_1 = tl.dot(x_high, low_01, tl.dot(x_low, high_01))
    z_high, z_low = split(z, tl.float16)
    y_1 = tl.dot(z_high, low_11, tl.dot(z_low, high_11, y_1))
    y_1 = tl.dot(x_high, high_01, y_1)
    y_1 = tl.dot(z_high, high_11, y_1)
    return y_0, y_1


@jit
def _product(x, w_high, w_low):
    x_high, x_low = split(x, tl.float16)
    return product_of_parts(x_high, x_low, w_high, w_low)
