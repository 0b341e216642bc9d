"""Gram matrix and product of a tall matrix, each one pass at the speed of memory.

*Gram matrix* of m x n: ``4 m n^2`` flops in fp16 (with ``A = H + L`` in two parts, ``H^T (H + 2 L)`` has the
Gram matrix as its symmetric part, up to ``L^T L``), ``4 m n`` bytes: for n = 128 128 flops a byte, of which
an H200 can do 160.

*Product*: with W upper triangular, in halves, ``4.5 m n^2`` flops, ``8 m n`` bytes: 72 flops a byte.

Parts are fp16 without a scale between them. A column is scaled as a whole so that its elements lie well above
the subnormal numbers: an absolute error of ``2^-25`` is then far below the rounding of float32. Each thread
block scales by what it finds in a sample of its own rows, and undoes that in its part of the sum.

Elements move four at a time where a kernel can know that rows, or the columns of a column-major matrix,
begin and end at multiples of four. Copies into shared memory ahead of time would move others one by one,
which takes longer than to wait for them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.kernels.compiled import jit, require_triton
from neula.kernels.gemm_triton import _exponents, _times_power_of_two
from neula.kernels.tall import COLUMNS

try:
    import triton  # type: ignore[import-untyped, import-not-found]
    import triton.language as tl  # type: ignore[import-untyped, import-not-found]
except ImportError:  # the module can be read all the same
    triton = None

BLOCK_COLUMNS = 128


class Config(NamedTuple):
    """How a pass over the matrix is cut up.

    Rows of the Gram matrix are those that are summed on the unit, which truncates, before the sum is added
    outside.

    Attributes
    ----------
    rows, warps, stages : int
        Rows of a block, warps of a thread block, loads in flight.
    blocks : int
        Thread blocks of a multiprocessor: while one multiplies, the other loads or stores.
    """

    rows: int
    warps: int
    stages: int
    blocks: int


VECTOR = 4
"""Elements that a thread loads at a time."""

GRAM = {64: Config(32, 4, 4, 2), 128: Config(64, 8, 3, 1), 256: Config(64, 8, 3, 1)}
"""For matrices of up to so many columns, as measured on an H200: 4194304 x 128 take 0.76 ms, with blocks of
32 rows 0.81, of 128 rows 0.88."""

ACROSS = Config(64, 8, 3, 1)
"""For the block of the Gram matrix between the first 128 columns and the others: 1048576 x 256 take 0.78 ms,
with two stages 0.87."""

PRODUCT = {64: Config(64, 4, 2, 3), 128: Config(64, 4, 2, 2), 256: Config(64, 4, 2, 2)}
"""For the first 128 columns: 4194304 x 128 take 1.2 ms, with one thread block of 128 rows 1.6, and with W as
a whole, which leaves no room for a second thread block with its loads in flight, 1.44 at best."""

PANEL = {64: Config(64, 4, 2, 3), 128: Config(64, 4, 2, 2)}
"""For panels, in place."""

BEYOND = Config(128, 8, 1, 1)
"""For the columns beyond: 0.9 ms for 1048576 x 256, with 64 rows 1.2."""

SUM = (32, 128)
"""Matrices that are added at a time, and elements of each."""

SAMPLES = 4
"""Blocks of rows that a thread block looks at for its scales."""

GRAM_TOP, PRODUCT_TOP = 7, 14
"""Exponents that the largest elements are scaled to: those of a sample, and all."""

LARGEST = 126
"""Exponent of the largest scale, so that it and its inverse are normal numbers: columns of elements less than
``2^-112`` are scaled to less than the top and have less than the accuracy of float32."""


def tall_gram_triton(a: torch.Tensor, *, config: Config | None = None) -> torch.Tensor:
    """:func:`neula.kernels.tall.tall_gram` by the kernels, queued on the current stream.

    Raises
    ------
    ImportError
        Without Triton.
    """
    total = tall_half_gram_triton(a, config=config)
    return total.add(total.mT).mul_(0.5)


def tall_half_gram_triton(a: torch.Tensor, *, config: Config | None = None) -> torch.Tensor:
    """``H^T (H + 2 L)``: a matrix whose symmetric part is :func:`tall_gram_triton`.

    Raises
    ------
    ImportError
        Without Triton.
    """
    require_triton("the kernels for tall matrices need")
    m, n = a.shape
    width = _width(n, BLOCK_COLUMNS)
    rows, warps, stages, blocks = config or _config(GRAM, n)
    chunk = _chunk(m, max(rows, ACROSS.rows), blocks, a.device)
    parts = torch.empty(triton.cdiv(m, chunk), n, n, dtype=a.dtype, device=a.device)
    arguments = (a, parts, m, n, chunk, *a.stride())
    vector, by_columns = _vector(a), a.stride(0) == 1
    with torch.cuda.device_of(a):
        _gram_kernel[(len(parts), triton.cdiv(n, width))](
            *arguments,
            *(rows, width, stages if vector > 1 else 1, True, SAMPLES, GRAM_TOP, vector, by_columns),
            num_warps=warps,
        )
        if n > width:
            rows, warps, stages, _ = ACROSS
            _gram_kernel[(len(parts), 1)](
                *arguments,
                *(rows, width, stages if vector > 1 else 1, False, SAMPLES, GRAM_TOP, vector, by_columns),
                num_warps=warps,
            )
    return _sum(parts, torch.empty(n, n, dtype=torch.float64, device=a.device))


def _sum(parts: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Sum of float32 matrices in float64 into ``total``: torch would convert them first."""
    count, m, n = parts.shape
    with torch.cuda.device_of(parts):
        _sum_kernel[(triton.cdiv(n, SUM[1]), m)](
            parts, total, count, m * n, n, *total.stride(), *SUM, num_warps=4
        )
    return total


def tall_product_triton(
    a: torch.Tensor, w: torch.Tensor, sizes: torch.Tensor, *, config: Config | None = None
) -> torch.Tensor:
    """:func:`neula.kernels.tall.tall_product` by the kernels, queued on the current stream.

    Of W only the upper triangle counts, and blocks below the diagonal are not read.

    Raises
    ------
    ImportError
        Without Triton.
    """
    require_triton("the kernels for tall matrices need")
    m, n = a.shape
    if a.stride(0) == 1 and n <= BLOCK_COLUMNS:
        q = a.new_empty(n, m).mT
        _multiply_columns(a, w.float(), sizes.float(), q, None, config)
        return q
    exponents = (PRODUCT_TOP - torch.frexp(sizes).exponent).clamp_(-LARGEST, LARGEST)
    scaled = torch.ldexp(w, -exponents[:, None])
    largest = torch.linalg.vector_norm(scaled, float("inf"), dim=0)
    back = (torch.frexp(largest).exponent - PRODUCT_TOP).clamp_(-LARGEST, LARGEST)
    scaled = torch.ldexp(scaled, -back).contiguous()
    high = scaled.half()
    low = (scaled - high).half()
    q = a.new_empty(m, n)
    rows, warps, stages, blocks = config or _config(PRODUCT, n)
    chunk = _chunk(m, rows, blocks, a.device)
    arguments = (a, high, low, exponents, back, q, m, n)
    vector = 1 if a.stride(0) == 1 else _vector(a)
    with torch.cuda.device_of(a):
        _product_kernel[(triton.cdiv(m, chunk),)](
            *(*arguments, chunk, *a.stride(), rows, _width(n, BLOCK_COLUMNS) // 2, stages, vector),
            num_warps=warps,
        )
        if n > BLOCK_COLUMNS:
            rows, warps, stages, blocks = BEYOND
            chunk = _chunk(m, rows, blocks, a.device)
            _product_beyond_kernel[(triton.cdiv(m, chunk),)](
                *(*arguments, chunk, *a.stride(), rows, BLOCK_COLUMNS, stages, vector), num_warps=warps
            )
    return q


def multiply_panel_triton(
    a: torch.Tensor,
    w: torch.Tensor,
    norms: torch.Tensor,
    low: torch.Tensor | None = None,
    *,
    config: Config | None = None,
) -> None:
    """:func:`neula.kernels.tall.multiply_panel` by the kernel, queued on the current stream.

    Raises
    ------
    ImportError
        Without Triton.
    """
    require_triton("the kernels for tall matrices need")
    _multiply_columns(a, w, norms, a, low, config)


def _multiply_columns(
    a: torch.Tensor,
    w: torch.Tensor,
    sizes: torch.Tensor,
    q: torch.Tensor,
    low: torch.Tensor | None,
    config: Config | None,
) -> None:
    """``Q = A W`` for column-major A and Q, which may be one."""
    m, n = a.shape
    rows, warps, stages, blocks = config or _config(PANEL, n)
    chunk = _chunk(m, rows, blocks, a.device)
    aligned = all(_vector(x) > 1 for x in (a, q, low) if x is not None)
    rounded = q if low is None else low
    with torch.cuda.device_of(a):
        _panel_kernel[(triton.cdiv(m, chunk),)](
            *(a, w, sizes, q, rounded, m, n, chunk, a.stride(1), *w.stride(), q.stride(1), rounded.stride(1)),
            *(rows, _width(n, BLOCK_COLUMNS) // 2, stages, VECTOR if aligned else 1, PRODUCT_TOP),
            low is not None,
            num_warps=warps,
        )


def _config(table: dict[int, Config], n: int) -> Config:
    return table[next(columns for columns in COLUMNS if n <= columns)]


def _width(n: int, most: int) -> int:
    """Columns of a block: of two halves which the unit can multiply."""
    return min(most, max(32, int(triton.next_power_of_2(n))))


def _vector(a: torch.Tensor) -> int:
    """How many elements a kernel can load at a time."""
    row, column = a.stride()
    length, next_, unit = (a.shape[0], column, row) if row == 1 else (a.shape[1], row, column)
    sizes = (length, next_, a.data_ptr() // a.element_size())
    return VECTOR if unit == 1 and all(size % VECTOR == 0 for size in sizes) else 1


def _chunk(m: int, rows: int, blocks: int, device: torch.device) -> int:
    """Rows of a thread block: so that there are so many for each multiprocessor."""
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    return int(triton.cdiv(triton.cdiv(m, units * blocks), rows)) * rows


@jit("m", "n", "chunk")
def _gram_kernel(  # type: ignore[no-untyped-def]
    a,
    parts,
    m,
    n,
    chunk,
    stride_row,
    stride_column,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    DIAGONAL: tl.constexpr,
    SAMPLES: tl.constexpr,
    TOP: tl.constexpr,
    VECTOR: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
):
    """What the rows of this program add to a block of ``H^T (H + 2 L)``."""
    if BY_COLUMNS:  # tells what are multiples of what
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
    x_exponents = _sampled(x_column, x_exists, i, first, last, stride_row, WIDTH, SAMPLES, TOP)
    y_exponents = x_exponents
    if not DIAGONAL:
        y_exponents = _sampled(y_column, y_exists, i, first, last, stride_row, WIDTH, SAMPLES, TOP)
    x_scale, y_scale = _power_of_two(x_exponents)[None, :], _power_of_two(y_exponents)[None, :]

    total = tl.zeros((WIDTH, WIDTH), tl.float32)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + i
        x = tl.load(x_column + row * stride_row, mask=(row < last) & x_exists, other=0.0)
        if DIAGONAL:
            x_high, x_low = _split(x * x_scale)
            run = tl.dot(tl.trans(x_high), x_low + x_low)
            run = tl.dot(tl.trans(x_high), x_high, run)
        else:
            y = tl.load(y_column + row * stride_row, mask=(row < last) & y_exists, other=0.0)
            x_high, x_low = _split(x * x_scale)
            y_high, y_low = _split(y * y_scale)
            run = tl.dot(tl.trans(x_high), y_low)
            run = tl.dot(tl.trans(x_low), y_high, run)
            run = tl.dot(tl.trans(x_high), y_high, run)
        total += run  # outside of the unit: rounded to nearest

    k = tl.arange(0, WIDTH)
    total = _times_power_of_two(total, -(x_exponents[:, None] + y_exponents[None, :]))
    rows, columns = left + k[:, None], right + k[None, :]
    inside = (rows < n) & (columns < n)
    parts += tl.program_id(0).to(tl.int64) * n * n
    tl.store(parts + rows * n + columns, total, mask=inside)
    if not DIAGONAL:
        tl.store(parts + columns * n + rows, total, mask=inside)


@jit("count", "size", "n")
def _sum_kernel(  # type: ignore[no-untyped-def]
    parts, total, count, size, n, total_row, total_column, PARTS: tl.constexpr, ELEMENTS: tl.constexpr
):
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


@jit("m", "n", "chunk")
def _product_kernel(  # type: ignore[no-untyped-def]
    a,
    high,
    low,
    exponents,
    back,
    q,
    m,
    n,
    chunk,
    stride_row,
    stride_column,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Some rows of the first columns of ``A W``, W upper triangular: three quarters of it stay here."""
    n, stride_row = n // VECTOR * VECTOR, stride_row // VECTOR * VECTOR  # tells that they are multiples
    first = tl.program_id(0).to(tl.int64) * chunk
    last = tl.minimum(first + chunk, m)
    i = tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, HALF)
    j_0, j_1 = k[None, :], HALF + k[None, :]
    scale_0, scale_1 = _scale(exponents, j_0, n), _scale(exponents, j_1, n)
    undo_0, undo_1 = _scale(back, j_0, n), _scale(back, j_1, n)
    high_00, low_00 = _block(high, low, k[:, None], j_0, n)
    high_01, low_01 = _block(high, low, k[:, None], j_1, n)
    high_11, low_11 = _block(high, low, HALF + k[:, None], j_1, n)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + i
        rows = a + row * stride_row
        x_0 = tl.load(rows + j_0.to(tl.int64) * stride_column, mask=(row < last) & (j_0 < n), other=0.0)
        x_1 = tl.load(rows + j_1.to(tl.int64) * stride_column, mask=(row < last) & (j_1 < n), other=0.0)
        y_0, y_1 = _halves(x_0 * scale_0, x_1 * scale_1, high_00, low_00, high_01, low_01, high_11, low_11)
        tl.store(q + row * n + j_0, y_0 * undo_0, mask=(row < last) & (j_0 < n))
        tl.store(q + row * n + j_1, y_1 * undo_1, mask=(row < last) & (j_1 < n))


@jit("m", "n", "chunk")
def _product_beyond_kernel(  # type: ignore[no-untyped-def]
    a,
    high,
    low,
    exponents,
    back,
    q,
    m,
    n,
    chunk,
    stride_row,
    stride_column,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Some rows of a second block of columns of ``A W``."""
    n, stride_row = n // VECTOR * VECTOR, stride_row // VECTOR * VECTOR  # tells that they are multiples
    first = tl.program_id(0).to(tl.int64) * chunk
    last = tl.minimum(first + chunk, m)
    i = tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, WIDTH)
    j_0, j_1 = k[None, :], WIDTH + k[None, :]
    scale_0, scale_1, undo = _scale(exponents, j_0, n), _scale(exponents, j_1, n), _scale(back, j_1, n)
    high_0, low_0 = _block(high, low, k[:, None], j_1, n)
    high_1, low_1 = _block(high, low, WIDTH + k[:, None], j_1, n)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + i
        rows = a + row * stride_row
        x = tl.load(rows + j_0.to(tl.int64) * stride_column, mask=(row < last) & (j_0 < n), other=0.0)
        z = tl.load(rows + j_1.to(tl.int64) * stride_column, mask=(row < last) & (j_1 < n), other=0.0)
        y = _product(x * scale_0, high_0, low_0) + _product(z * scale_1, high_1, low_1)
        tl.store(q + row * n + j_1, y * undo, mask=(row < last) & (j_1 < n))


@jit()
def _sampled(  # type: ignore[no-untyped-def]
    column,
    exists,
    i,
    first,
    last,
    stride_row,
    WIDTH: tl.constexpr,
    SAMPLES: tl.constexpr,
    TOP: tl.constexpr,
):
    """Exponents of the scales of columns, by the largest elements of some blocks of rows."""
    largest = tl.zeros((WIDTH,), tl.float32)
    for sample in range(SAMPLES):
        row = first + (last - first) * sample // SAMPLES + i
        x = tl.load(column + row * stride_row, mask=(row < last) & exists, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=0))
    # Columns that are zero in the sample are taken as they are: most often they are zeros and ones.
    return tl.where(largest == 0.0, 0, tl.minimum(TOP - _exponents(largest), 126))


@jit()
def _power_of_two(exponents):  # type: ignore[no-untyped-def]
    """``2**exponents``, where that is a normal number."""
    return ((exponents + 127) << 23).to(tl.float32, bitcast=True)


@jit()
def _scale(exponents, j, n):  # type: ignore[no-untyped-def]
    return _power_of_two(tl.load(exponents + j, mask=j < n, other=0))


@jit()
def _block(high, low, i, j, n):  # type: ignore[no-untyped-def]
    """A block of both parts of W."""
    place, inside = i * n + j, (i < n) & (j < n)
    return tl.load(high + place, mask=inside, other=0.0), tl.load(low + place, mask=inside, other=0.0)


@jit("m", "n", "chunk")
def _panel_kernel(  # type: ignore[no-untyped-def]
    a,
    w,
    sizes,
    q,
    rounded,
    m,
    n,
    chunk,
    a_column,
    w_row,
    w_column,
    q_column,
    rounded_column,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    STAGES: tl.constexpr,
    VECTOR: tl.constexpr,
    TOP: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Some rows of ``Q = A W``, and rounded in ``rounded``; columns are contiguous."""
    m, chunk = m // VECTOR * VECTOR, chunk // ROWS * ROWS
    a_column, q_column = a_column // VECTOR * VECTOR, q_column // VECTOR * VECTOR
    rounded_column = rounded_column // VECTOR * VECTOR
    first = tl.program_id(0).to(tl.int64) * chunk
    last = tl.minimum(first + chunk, m)
    i = tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, HALF)
    j_0, j_1 = k[None, :], HALF + k[None, :]
    up_0 = TOP - 1 - _exponents(tl.load(sizes + k, mask=k < n, other=1.0))
    up_1 = TOP - 1 - _exponents(tl.load(sizes + HALF + k, mask=HALF + k < n, other=1.0))
    w_00 = _rows_scaled(w, k[:, None], j_0, w_row, w_column, n, up_0)
    w_01 = _rows_scaled(w, k[:, None], j_1, w_row, w_column, n, up_0)
    w_11 = _rows_scaled(w, HALF + k[:, None], j_1, w_row, w_column, n, up_1)
    back_0 = _exponents(tl.max(tl.abs(w_00), axis=0)) - TOP + 1
    back_1 = _exponents(tl.maximum(tl.max(tl.abs(w_01), axis=0), tl.max(tl.abs(w_11), axis=0))) - TOP + 1
    high_00, low_00 = _split(_times_power_of_two(w_00, -back_0[None, :]))
    high_01, low_01 = _split(_times_power_of_two(w_01, -back_1[None, :]))
    high_11, low_11 = _split(_times_power_of_two(w_11, -back_1[None, :]))
    a_0, a_1 = a + j_0.to(tl.int64) * a_column, a + j_1.to(tl.int64) * a_column
    q_0, q_1 = q + j_0.to(tl.int64) * q_column, q + j_1.to(tl.int64) * q_column
    rounded_0 = rounded + j_0.to(tl.int64) * rounded_column
    rounded_1 = rounded + j_1.to(tl.int64) * rounded_column
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + i
        inside_0, inside_1 = (row < last) & (j_0 < n), (row < last) & (j_1 < n)
        x_0 = _times_power_of_two(tl.load(a_0 + row, mask=inside_0, other=0.0), up_0[None, :])
        x_1 = _times_power_of_two(tl.load(a_1 + row, mask=inside_1, other=0.0), up_1[None, :])
        y_0, y_1 = _halves(x_0, x_1, high_00, low_00, high_01, low_01, high_11, low_11)
        y_0 = _times_power_of_two(y_0, back_0[None, :])
        y_1 = _times_power_of_two(y_1, back_1[None, :])
        tl.store(q_0 + row, y_0, mask=inside_0)
        tl.store(q_1 + row, y_1, mask=inside_1)
        if ROUNDS:
            tl.store(rounded_0 + row, y_0.to(rounded.dtype.element_ty), mask=inside_0)
            tl.store(rounded_1 + row, y_1.to(rounded.dtype.element_ty), mask=inside_1)


@jit()
def _rows_scaled(w, i, j, w_row, w_column, n, up):  # type: ignore[no-untyped-def]
    """A block of W, without what the scales of the columns of A bring."""
    block = tl.load(w + i * w_row + j * w_column, mask=(i < n) & (j < n), other=0.0)
    return _times_power_of_two(block, -up[:, None])


@jit()
def _halves(x, z, high_00, low_00, high_01, low_01, high_11, low_11):  # type: ignore[no-untyped-def]
    """Two halves of rows times an upper triangular matrix in three blocks."""
    x_high, x_low = _split(x)
    y_0 = tl.dot(x_high, low_00, tl.dot(x_low, high_00))
    y_0 = tl.dot(x_high, high_00, y_0)
    y_1 = tl.dot(x_high, low_01, tl.dot(x_low, high_01))
    z_high, z_low = _split(z)
    y_1 = tl.dot(z_high, low_11, tl.dot(z_low, high_11, y_1))
    y_1 = tl.dot(x_high, high_01, y_1)
    y_1 = tl.dot(z_high, high_11, y_1)
    return y_0, y_1


@jit()
def _product(x, w_high, w_low):  # type: ignore[no-untyped-def]
    x_high, x_low = _split(x)
    small = tl.dot(x_high, w_low, tl.dot(x_low, w_high))
    return tl.dot(x_high, w_high, small)


@jit()
def _split(x):  # type: ignore[no-untyped-def]
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)
