"""Gram matrix and product of a tall matrix, each one pass at the speed of memory.

*Gram matrix* of m x n: ``4 m n^2`` flops in fp16 (with ``A = H + L`` in two parts, ``H^T (H + 2 L)`` has the
Gram matrix as its symmetric part, up to ``L^T L``), ``4 m n`` bytes: for n = 128 128 flops a byte, of which
an H200 can do 160.

*Product*: ``6 m n^2`` flops, ``8 m n`` bytes: 96 flops a byte.

Parts are fp16 without a scale between them. A column is scaled as a whole so that its elements lie well above
the subnormal numbers: an absolute error of ``2^-25`` is then far below the rounding of float32. Each thread
block scales by what it finds in a sample of its own rows, and undoes that in its part of the sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.kernels.gemm_triton import _exponents, _times_power_of_two, jit
from neula.kernels.tall import COLUMNS

try:
    import triton  # type: ignore[import-untyped, import-not-found]
    import triton.language as tl  # type: ignore[import-untyped, import-not-found]
except ImportError:  # the module can be read all the same
    triton = None

BLOCK_COLUMNS = 128


class Config(NamedTuple):
    """How a pass over the matrix is cut up: rows of a block, warps of a thread block, loads in flight.

    Rows of the Gram matrix are those that are summed on the unit, which truncates, before the sum is added
    outside.
    """

    rows: int
    warps: int
    stages: int


GRAM = {64: Config(32, 4, 3), 128: Config(64, 8, 3), 256: Config(64, 8, 3)}
PRODUCT = {64: Config(64, 4, 3), 128: Config(128, 8, 2), 256: Config(64, 8, 1)}
"""For matrices of up to so many columns, as measured on an H200."""

SAMPLES = 4
"""Blocks of rows that a thread block looks at for its scales."""

GRAM_TOP, PRODUCT_TOP = 7, 14
"""Exponents that the largest elements are scaled to: those of a sample, and all."""


def tall_gram_triton(a: torch.Tensor, *, config: Config | None = None) -> torch.Tensor:
    """:func:`neula.kernels.tall.tall_gram` by the kernel, queued on the current stream.

    Raises
    ------
    ImportError
        Without Triton.
    """
    _require_triton()
    m, n = a.shape
    width, across = _width(n)
    rows, warps, stages = config or _config(GRAM, n)
    chunk = _chunk(m, rows, a.device)
    parts = torch.empty(triton.cdiv(m, chunk), n, n, device=a.device)
    with torch.cuda.device_of(a):
        _gram_kernel[(len(parts), across * (across + 1) // 2)](
            *(a, parts, m, n, chunk, *a.stride()),
            *(rows, width, SAMPLES, GRAM_TOP),
            num_warps=warps,
            num_stages=stages,
        )
    total = parts.sum(0, dtype=torch.float64)
    return total.add(total.mT).mul_(0.5)


def tall_product_triton(
    a: torch.Tensor, w: torch.Tensor, sizes: torch.Tensor, *, config: Config | None = None
) -> torch.Tensor:
    """:func:`neula.kernels.tall.tall_product` by the kernel, queued on the current stream.

    Raises
    ------
    ImportError
        Without Triton.
    """
    _require_triton()
    m, n = a.shape
    width, across = _width(n)
    exponents = PRODUCT_TOP - torch.frexp(sizes).exponent
    scaled = torch.ldexp(w, -exponents[:, None])
    back = torch.frexp(torch.linalg.vector_norm(scaled, float("inf"), dim=0)).exponent - PRODUCT_TOP
    scaled = torch.ldexp(scaled, -back).contiguous()
    high = scaled.half()
    low = (scaled - high).half()
    q = torch.empty(m, n, device=a.device)
    rows, warps, stages = config or _config(PRODUCT, n)
    chunk = _chunk(m, rows, a.device)
    with torch.cuda.device_of(a):
        _product_kernel[(triton.cdiv(m, chunk), across)](
            *(a, high, low, exponents, back, q, m, n, chunk, *a.stride()),
            *(rows, width, across == 2),
            num_warps=warps,
            num_stages=stages,
        )
    return q


def _require_triton() -> None:
    if triton is None:
        raise ImportError("the kernels for tall matrices need Triton: pip install triton")


def _config(table: dict[int, Config], n: int) -> Config:
    return table[next(columns for columns in COLUMNS if n <= columns)]


def _width(n: int) -> tuple[int, int]:
    """Columns of a block, and how many blocks there are."""
    width = min(BLOCK_COLUMNS, max(16, int(triton.next_power_of_2(n))))
    return width, int(triton.cdiv(n, width))


def _chunk(m: int, rows: int, device: torch.device) -> int:
    """Rows of a thread block: so that there is one for each multiprocessor."""
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    return int(triton.cdiv(triton.cdiv(m, units), rows)) * rows


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
    SAMPLES: tl.constexpr,
    TOP: tl.constexpr,
):
    """What the rows of this program add to a block of ``H^T (H + 2 L)``."""
    first = tl.program_id(0).to(tl.int64) * chunk
    last = tl.minimum(first + chunk, m)
    left, right = tl.program_id(1) // 2 * WIDTH, (tl.program_id(1) + 1) // 2 * WIDTH
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, WIDTH)[None, :]
    x_column = a + (left + j).to(tl.int64) * stride_column
    y_column = a + (right + j).to(tl.int64) * stride_column

    x_largest = tl.zeros((WIDTH,), tl.float32)
    y_largest = tl.zeros((WIDTH,), tl.float32)
    for sample in range(SAMPLES):
        row = first + (last - first) * sample // SAMPLES + i
        x = tl.load(x_column + row * stride_row, mask=(row < last) & (left + j < n), other=0.0)
        y = tl.load(y_column + row * stride_row, mask=(row < last) & (right + j < n), other=0.0)
        x_largest = tl.maximum(x_largest, tl.max(tl.abs(x), axis=0))
        y_largest = tl.maximum(y_largest, tl.max(tl.abs(y), axis=0))
    x_exponents, y_exponents = TOP - _exponents(x_largest), TOP - _exponents(y_largest)

    total = tl.zeros((WIDTH, WIDTH), tl.float32)
    for start in range(first, last, ROWS):
        row = start + i
        x = tl.load(x_column + row * stride_row, mask=(row < last) & (left + j < n), other=0.0)
        x_high, x_low = _split(_times_power_of_two(x, x_exponents[None, :]))
        if left == right:
            run = tl.dot(tl.trans(x_high), x_low + x_low)
            run = tl.dot(tl.trans(x_high), x_high, run)
        else:
            y = tl.load(y_column + row * stride_row, mask=(row < last) & (right + j < n), other=0.0)
            y_high, y_low = _split(_times_power_of_two(y, y_exponents[None, :]))
            run = tl.dot(tl.trans(x_high), y_low)
            run = tl.dot(tl.trans(x_low), y_high, run)
            run = tl.dot(tl.trans(x_high), y_high, run)
        total += run  # outside of the unit: rounded to nearest

    k = tl.arange(0, WIDTH)
    exponents = -(x_exponents[:, None] + y_exponents[None, :])
    total = _times_power_of_two(total, exponents)
    rows, columns = left + k[:, None], right + k[None, :]
    inside = (rows < n) & (columns < n)
    parts += tl.program_id(0).to(tl.int64) * n * n
    tl.store(parts + rows * n + columns, total, mask=inside)
    if left != right:
        tl.store(parts + columns * n + rows, total, mask=inside)


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
    WIDTH: tl.constexpr,
    SECOND: tl.constexpr,
):
    """Some rows of a block of columns of ``A W``, W upper triangular, which stays on the chip."""
    first = tl.program_id(0).to(tl.int64) * chunk
    last = tl.minimum(first + chunk, m)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    i = tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, WIDTH)
    undo = tl.load(back + columns, mask=columns < n, other=0)
    scale = tl.load(exponents + k, mask=k < n, other=0)
    inside = (k[:, None] < n) & (columns < n)
    w_high = tl.load(high + k[:, None] * n + columns, mask=inside, other=0.0)
    w_low = tl.load(low + k[:, None] * n + columns, mask=inside, other=0.0)
    if SECOND:
        scale_2 = tl.load(exponents + WIDTH + k, mask=WIDTH + k < n, other=0)
        inside = (WIDTH + k[:, None] < n) & (columns < n)
        w_high_2 = tl.load(high + (WIDTH + k[:, None]) * n + columns, mask=inside, other=0.0)
        w_low_2 = tl.load(low + (WIDTH + k[:, None]) * n + columns, mask=inside, other=0.0)
    for start in range(first, last, ROWS):
        row = start + i
        rows = a + row * stride_row
        x = tl.load(
            rows + k[None, :].to(tl.int64) * stride_column, mask=(row < last) & (k[None, :] < n), other=0.0
        )
        total = _product(x, scale, w_high, w_low)
        if SECOND:
            x = tl.load(
                rows + (WIDTH + k[None, :]).to(tl.int64) * stride_column,
                mask=(row < last) & (WIDTH + k[None, :] < n),
                other=0.0,
            )
            total += _product(x, scale_2, w_high_2, w_low_2)
        tl.store(q + row * n + columns, _times_power_of_two(total, undo), mask=(row < last) & (columns < n))


@jit()
def _product(x, exponents, w_high, w_low):  # type: ignore[no-untyped-def]
    x_high, x_low = _split(_times_power_of_two(x, exponents[None, :]))
    small = tl.dot(x_high, w_low, tl.dot(x_low, w_high))
    return tl.dot(x_high, w_high, small)


@jit()
def _split(x):  # type: ignore[no-untyped-def]
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)
