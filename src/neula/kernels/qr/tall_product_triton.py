"""Product of a tall matrix with a small upper triangular one, in one pass at the speed of memory.

With W in halves ``4.5 m n^2`` flops in fp16, ``8 m n`` bytes: for n = 128 72 flops a byte, of which an H200
can do 160. Parts are those of :mod:`neula.kernels.qr.tall_gram_triton`, which says as well how elements move;
columns of A are scaled by what is known of their size.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from neula.kernels.launch import ceil_div, elements_at_a_time, multiprocessors, share
from neula.kernels.products.parts_triton import (
    exponents_of,
    power_of_two,
    product_of_parts,
    split,
    times_power_of_two,
)
from neula.kernels.qr.tall_gram_triton import BLOCK_COLUMNS, TallGramConfig, config_for, width_of
from neula.kernels.triton_source import jit, tl

PRODUCT = {
    64: TallGramConfig(64, 4, 2, 3),
    128: TallGramConfig(64, 4, 2, 2),
    256: TallGramConfig(64, 4, 2, 2),
}
"""For the first 128 columns: 4194304 x 128 take 1.2 ms, with one thread block of 128 rows 1.6, and with W as
a whole, which leaves no room for a second thread block with its loads in flight, 1.44 at best."""

PANEL = {64: TallGramConfig(64, 4, 2, 3), 128: TallGramConfig(64, 4, 2, 2)}
"""For panels, in place."""

NARROW_PANEL = {64: TallGramConfig(64, 4, 3, 3), 128: TallGramConfig(64, 4, 3, 2)}
"""For those in half precision."""

BEYOND = TallGramConfig(128, 8, 1, 1)
"""For the columns beyond: 0.9 ms for 1048576 x 256, with 64 rows 1.2."""

TOP = 14
"""Exponent that the largest elements are scaled to."""

LARGEST = 126
"""Exponent of the largest scale, so that it and its inverse are normal numbers: columns of elements less than
``2^-112`` are scaled to less than the top and have less than the accuracy of float32."""


def tall_product_triton(
    a: torch.Tensor, w: torch.Tensor, sizes: torch.Tensor, *, config: TallGramConfig | None = None
) -> torch.Tensor:
    """:func:`neula.kernels.qr.tall.tall_product` by the kernels, queued on the current stream.

    Of W only the upper triangle counts, and blocks below the diagonal are not read.
    """
    m, n = a.shape
    if a.stride(0) == 1 and n <= BLOCK_COLUMNS:
        q = a.new_empty(n, m).mT
        _multiply_columns(a, w.float(), sizes.float(), q, None, config)
        return q
    exponents = (TOP - torch.frexp(sizes).exponent).clamp_(-LARGEST, LARGEST)
    scaled = torch.ldexp(w, -exponents[:, None])
    largest = torch.linalg.vector_norm(scaled, float("inf"), dim=0)
    back = (torch.frexp(largest).exponent - TOP).clamp_(-LARGEST, LARGEST)
    scaled = torch.ldexp(scaled, -back).contiguous()
    high = scaled.half()
    low = (scaled - high).half()
    q = a.new_empty(m, n)
    rows, warps, stages, blocks = config or config_for(PRODUCT, n)
    chunk = share(m, blocks * multiprocessors(a.device), rows)
    arguments = (a, high, low, exponents, back, q, m, n)
    vector = 1 if a.stride(0) == 1 else elements_at_a_time(a)
    with torch.cuda.device_of(a):
        _product_kernel[(ceil_div(m, chunk),)](
            *(*arguments, chunk, *a.stride(), rows, width_of(n) // 2, stages, vector),
            num_warps=warps,
        )
        if n > BLOCK_COLUMNS:
            rows, warps, stages, blocks = BEYOND
            chunk = share(m, blocks * multiprocessors(a.device), rows)
            _product_beyond_kernel[(ceil_div(m, chunk),)](
                *(*arguments, chunk, *a.stride(), rows, BLOCK_COLUMNS, stages, vector), num_warps=warps
            )
    return q


def multiply_panel_triton(
    a: torch.Tensor,
    w: torch.Tensor,
    norms: torch.Tensor,
    low: torch.Tensor | None = None,
    *,
    config: TallGramConfig | None = None,
) -> None:
    """:func:`neula.kernels.qr.tall.multiply_panel` by the kernel, queued on the current stream."""
    _multiply_columns(a, w, norms, a, low, config)


def _multiply_columns(
    a: torch.Tensor,
    w: torch.Tensor,
    sizes: torch.Tensor,
    q: torch.Tensor,
    low: torch.Tensor | None,
    config: TallGramConfig | None,
) -> None:
    """``Q = A W`` for column-major A and Q, which may be one."""
    m, n = a.shape
    rows, warps, stages, blocks = config or config_for(NARROW_PANEL if a.itemsize == 2 else PANEL, n)
    chunk = share(m, blocks * multiprocessors(a.device), rows)
    vector = min(elements_at_a_time(x) for x in (a, q, low) if x is not None)
    rounded = q if low is None else low
    with torch.cuda.device_of(a):
        _panel_kernel[(ceil_div(m, chunk),)](
            *(a, w, sizes, q, rounded, m, n, chunk, a.stride(1), *w.stride(), q.stride(1), rounded.stride(1)),
            *(rows, width_of(n) // 2, stages, vector, TOP),
            low is not None,
            num_warps=warps,
        )


@jit(do_not_specialize=["m", "n", "chunk"])
def _product_kernel(
    a, high, low, exponents, back, q, m, n, chunk, stride_row, stride_column,
    ROWS: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Some rows of the first columns of ``A W``, W upper triangular: three quarters of it stay here."""
    # Multiples of VECTOR, as the compiler has to see to move so many elements at a time.
    n, stride_row = n // VECTOR * VECTOR, stride_row // VECTOR * VECTOR
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


@jit(do_not_specialize=["m", "n", "chunk"])
def _product_beyond_kernel(
    a, high, low, exponents, back, q, m, n, chunk, stride_row, stride_column,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Some rows of a second block of columns of ``A W``."""
    # Multiples of VECTOR, as the compiler has to see to move so many elements at a time.
    n, stride_row = n // VECTOR * VECTOR, stride_row // VECTOR * VECTOR
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


@jit
def _scale(exponents, j, n):
    return power_of_two(tl.load(exponents + j, mask=j < n, other=0))


@jit
def _block(high, low, i, j, n):
    """A block of both parts of W."""
    place, inside = i * n + j, (i < n) & (j < n)
    return tl.load(high + place, mask=inside, other=0.0), tl.load(low + place, mask=inside, other=0.0)


@jit(do_not_specialize=["m", "n", "chunk"])
def _panel_kernel(
    a, w, sizes, q, rounded, m, n, chunk, a_column, w_row, w_column, q_column, rounded_column,
    ROWS: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr, VECTOR: tl.constexpr, TOP: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """Some rows of ``Q = A W``, and rounded in ``rounded``; columns are contiguous."""
    m, chunk = m // VECTOR * VECTOR, chunk // ROWS * ROWS
    a_column, q_column = a_column // VECTOR * VECTOR, q_column // VECTOR * VECTOR
    rounded_column = rounded_column // VECTOR * VECTOR
    first = tl.program_id(0).to(tl.int64) * chunk
    last = tl.minimum(first + chunk, m)
    i = tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, HALF)
    j_0, j_1 = k[None, :], HALF + k[None, :]
    up_0 = TOP - 1 - exponents_of(tl.load(sizes + k, mask=k < n, other=1.0))
    up_1 = TOP - 1 - exponents_of(tl.load(sizes + HALF + k, mask=HALF + k < n, other=1.0))
    w_00 = _rows_scaled(w, k[:, None], j_0, w_row, w_column, n, up_0)
    w_01 = _rows_scaled(w, k[:, None], j_1, w_row, w_column, n, up_0)
    w_11 = _rows_scaled(w, HALF + k[:, None], j_1, w_row, w_column, n, up_1)
    back_0 = exponents_of(tl.max(tl.abs(w_00), axis=0)) - TOP + 1
    back_1 = exponents_of(tl.maximum(tl.max(tl.abs(w_01), axis=0), tl.max(tl.abs(w_11), axis=0))) - TOP + 1
    high_00, low_00 = split(times_power_of_two(w_00, -back_0[None, :]), tl.float16)
    high_01, low_01 = split(times_power_of_two(w_01, -back_1[None, :]), tl.float16)
    high_11, low_11 = split(times_power_of_two(w_11, -back_1[None, :]), tl.float16)
    a_0, a_1 = a + j_0.to(tl.int64) * a_column, a + j_1.to(tl.int64) * a_column
    q_0, q_1 = q + j_0.to(tl.int64) * q_column, q + j_1.to(tl.int64) * q_column
    rounded_0 = rounded + j_0.to(tl.int64) * rounded_column
    rounded_1 = rounded + j_1.to(tl.int64) * rounded_column
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + i
        inside_0, inside_1 = (row < last) & (j_0 < n), (row < last) & (j_1 < n)
        x_0 = tl.load(a_0 + row, mask=inside_0, other=0.0).to(tl.float32)
        x_1 = tl.load(a_1 + row, mask=inside_1, other=0.0).to(tl.float32)
        x_0, x_1 = times_power_of_two(x_0, up_0[None, :]), times_power_of_two(x_1, up_1[None, :])
        if a.dtype.element_ty.primitive_bitwidth == 16:  # which scales leave as they are
            x_0, x_1 = x_0.to(tl.float16), x_1.to(tl.float16)
            y_0 = tl.dot(x_0, high_00, tl.dot(x_0, low_00))
            y_1 = tl.dot(x_1, low_11, tl.dot(x_0, low_01))
            y_1 = tl.dot(x_1, high_11, tl.dot(x_0, high_01, y_1))
        else:
            y_0, y_1 = _halves(x_0, x_1, high_00, low_00, high_01, low_01, high_11, low_11)
        y_0 = times_power_of_two(y_0, back_0[None, :])
        y_1 = times_power_of_two(y_1, back_1[None, :])
        tl.store(q_0 + row, y_0.to(q.dtype.element_ty), mask=inside_0)
        tl.store(q_1 + row, y_1.to(q.dtype.element_ty), mask=inside_1)
        if ROUNDS:
            tl.store(rounded_0 + row, y_0.to(rounded.dtype.element_ty), mask=inside_0)
            tl.store(rounded_1 + row, y_1.to(rounded.dtype.element_ty), mask=inside_1)


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
