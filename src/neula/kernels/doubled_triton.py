"""``A X`` in twice the precision of float64 on a GPU: sums, and beside them sums of their rounding errors.

``8 m n`` bytes, and for each element and vector eleven operations in float64: two for a product and its
rounding error (a fused multiply-add), six for a sum and its rounding error, the rest to add up errors
(T. Ogita, S. M. Rump and S. Oishi, "Accurate sum and dot product", SIAM J. Sci. Comput. 26, 2005, algorithm
Dot2). An H200 does some twenty in the time of an element, so for one or two vectors memory decides. A tile is
long in the direction in which A is contiguous; every thread adds up its own elements, and those of a row are
added to each other at the end. Where rows are few, the columns are divided as well; a second kernel adds the
pieces, in an order that does not depend on what finishes first.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from neula.kernels.launch import multiprocessors, share

ALONG, ACROSS = 128, 8
"""A tile for one vector, in the direction in which A is contiguous and in the other.

For more vectors it is shorter in the other direction: the sums of all vectors are in registers.
"""

MANY = (64, 16)
"""Of a matrix whose rows are contiguous, for several vectors: 30000 x 1500 with 20 of them takes 1.3 ms on an
H200, and 2.3."""

LENGTHS = (8, 32, ALONG)
"""Of tiles: of matrices with short rows most of a long tile would be empty."""

WIDEST = 32
"""Tile in the other direction at most."""

VECTORS = 4
"""For how many vectors at most an element is read once."""

MANY_DOWN = (ALONG, 4)
"""The same where columns are: 1.1 ms, and 1.8."""

BLOCKS = 12
"""Thread blocks for each multiprocessor, so that enough loads are in flight; twice as many for several
vectors and contiguous columns, which have a warp each."""

MIN_TILES = 8
"""Tiles of a row that are not divided any further."""

ROWS = 128
"""Elements of the result for which one thread block adds pieces."""


def doubled_product_triton(
    a: torch.Tensor,
    x: torch.Tensor,
    x_low: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *,
    along: int | None = None,
    across: int = ACROSS,
    min_tiles: int = MIN_TILES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``A (x + x_low)``, or ``b - A (x + x_low)`` where b is given, queued on the current stream.

    Parameters
    ----------
    a : Tensor, shape (batch, m, n)
        float64, as all others, and of any strides, as all others.
    x : Tensor, shape (batch, n, k)
    x_low : Tensor, shape (batch, n, k), optional
        Of the size of the rounding errors of x at most.
    b : Tensor, shape (batch, m, k), optional
    along, across : int
        The tile: powers of two. By default one no longer than the matrix by much, with as many elements.
    min_tiles : int
        Tiles of a row that are not divided any further.

    Returns
    -------
    high, low : Tensor, shape (batch, m, k)
        The result as a sum that is not evaluated; low is at most the rounding error of high.
    """
    (batch, m, n), k = a.shape, x.shape[2]
    result = torch.empty(2, batch, k, m, dtype=a.dtype, device=a.device)
    high, low = result.mT.unbind(0)
    if result.numel() == 0:
        return high, low
    vectors = min(VECTORS, triton.next_power_of_2(k))
    by_columns = a.stride(1) == 1 and a.stride(2) != 1
    many = vectors == VECTORS
    if along is None and many and (m if by_columns else n) > MANY[0]:
        along, across = MANY_DOWN if by_columns else MANY
    if along is None:
        along = next(size for size in LENGTHS if size >= min(m if by_columns else n, ALONG))
        across = min(across * ALONG // along, WIDEST)
    across = max(1, across // vectors)
    rows, columns = (along, across) if by_columns else (across, along)
    tasks = triton.cdiv(m, rows) * triton.cdiv(k, vectors) * batch
    blocks = (2 if many and by_columns else 1) * BLOCKS * multiprocessors(a.device)
    pieces = max(1, min(blocks // tasks, n // (min_tiles * columns)))
    piece = share(n, pieces, columns)
    sums = torch.empty(2, pieces, batch * k, m, dtype=a.dtype, device=a.device)
    low_strides = (0, 0, 0) if x_low is None else x_low.stride()
    b_strides = (0, 0, 0) if b is None else b.stride()
    # Contracted to a multiply-add, a sum that is to be made of rounded products has another rounding error.
    with torch.cuda.device_of(a):
        _pieces[(tasks * pieces,)](
            *(a, x, x if x_low is None else x_low, *sums, m, n, k, batch * k * m, pieces, piece),
            *(*a.stride(), *x.stride(), *low_strides),
            *(rows, columns, vectors, x_low is not None, a.is_cuda),
            num_warps=4 if rows * columns >= 512 else 1,
            enable_fp_fusion=False,
        )
        _sum_of_pieces[(triton.cdiv(m, ROWS) * batch * k,)](
            *(*sums, high if b is None else b, *result, m, k, batch * k * m, pieces, *b_strides),
            *(ROWS, b is not None),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return high, low


@triton.jit(
    do_not_specialize=[
        "m",
        "n",
        "k",
        "size",
        "pieces",
        "piece",
        "a_batch",
        "x_batch",
        "x_column",
        "low_batch",
        "low_column",
        *("x", "x_low", "high", "low"),
    ]
)
def _pieces(
    a, x, x_low, high, low, m, n, k, size, pieces, piece, a_batch, a_row, a_column, x_batch, x_row, x_column,
    low_batch, low_row, low_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTORS: tl.constexpr, HAS_LOW: tl.constexpr,
    FUSED: tl.constexpr,
):  # fmt: skip
    """Some rows of the product of a piece of the columns with up to four vectors."""
    m, k, size = m.to(tl.int64), k.to(tl.int64), size.to(tl.int64)  # offsets may exceed 2^31
    groups, blocks = tl.cdiv(k, VECTORS), tl.cdiv(m, ROWS)
    task = tl.program_id(0).to(tl.int64)  # tasks of one tile follow each other, so that A is read once
    vector, task = task % groups * VECTORS, task // groups
    part, task = task % pieces, task // pieces
    i, member = task % blocks * ROWS + tl.arange(0, ROWS), task // blocks
    a += member * a_batch + i[:, None] * a_row
    x += member * x_batch + vector * x_column
    x_low += member * low_batch + vector * low_column
    zero = tl.zeros((ROWS, COLUMNS), tl.float64)
    s0, c0, s1, c1, s2, c2, s3, c3 = zero, zero, zero, zero, zero, zero, zero, zero
    last = tl.minimum((part + 1) * piece, n)
    for start in range(part * piece, last, COLUMNS):
        j = start + tl.arange(0, COLUMNS).to(tl.int64)
        inside = j < last
        block = tl.load(a + j[None, :] * a_column, mask=(i[:, None] < m) & inside[None, :], other=0.0)
        xj, lj = x + j * x_row, x_low + j * low_row
        s0, c0 = _add(s0, c0, block, xj, lj, inside, HAS_LOW, FUSED)
        if VECTORS > 1:
            more = j < tl.where(vector + 1 < k, last, 0)
            s1, c1 = _add(s1, c1, block, xj + x_column, lj + low_column, more, HAS_LOW, FUSED)
        if VECTORS > 2:
            more = j < tl.where(vector + 2 < k, last, 0)
            s2, c2 = _add(s2, c2, block, xj + 2 * x_column, lj + 2 * low_column, more, HAS_LOW, FUSED)
            more = j < tl.where(vector + 3 < k, last, 0)
            s3, c3 = _add(s3, c3, block, xj + 3 * x_column, lj + 3 * low_column, more, HAS_LOW, FUSED)
    place = part * size + (member * k + vector) * m + i
    _store(high + place, low + place, s0, c0, i < m)
    if VECTORS > 1:
        _store(high + place + m, low + place + m, s1, c1, i < tl.where(vector + 1 < k, m, 0))
    if VECTORS > 2:
        _store(high + place + 2 * m, low + place + 2 * m, s2, c2, i < tl.where(vector + 2 < k, m, 0))
        _store(high + place + 3 * m, low + place + 3 * m, s3, c3, i < tl.where(vector + 3 < k, m, 0))


@triton.jit(
    do_not_specialize=[
        *("m", "k", "size", "pieces", "b_batch", "b_row", "b_column", "high", "low", "b", "to_high", "to_low")
    ]
)
def _sum_of_pieces(
    high, low, b, to_high, to_low, m, k, size, pieces, b_batch, b_row, b_column,
    ROWS: tl.constexpr, FROM_B: tl.constexpr,
):  # fmt: skip
    """Some elements of one column of the result."""
    m, size = m.to(tl.int64), size.to(tl.int64)
    blocks = tl.cdiv(m, ROWS)
    column = tl.program_id(0).to(tl.int64) // blocks
    i = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    place = column * m + i
    total = tl.zeros((ROWS,), tl.float64)
    errors = tl.zeros((ROWS,), tl.float64)
    for part in range(pieces):
        total, error = two_sum(total, tl.load(high + part * size + place, mask=i < m, other=0.0))
        errors += error + tl.load(low + part * size + place, mask=i < m, other=0.0)
    if FROM_B:
        b += column // k * b_batch + column % k * b_column
        total, error = two_sum(tl.load(b + i * b_row, mask=i < m, other=0.0), -total)
        errors = error - errors
    total, errors = two_sum(total, errors)
    tl.store(to_high + place, total, mask=i < m)
    tl.store(to_low + place, errors, mask=i < m)


@triton.jit
def _add(s, c, block, x, x_low, mask, HAS_LOW: tl.constexpr, FUSED: tl.constexpr):
    """A block times elements of a vector, added to sums and to the sums of their errors."""
    factor = tl.load(x, mask=mask, other=0.0)[None, :]
    product = block * factor
    s, error = two_sum(s, product)
    c += error + product_error(block, factor, product, FUSED)
    if HAS_LOW:
        c += block * tl.load(x_low, mask=mask, other=0.0)[None, :]
    return s, c


@triton.jit
def product_error(a, b, product, FUSED: tl.constexpr):
    """``a b - product``, without a fused multiply-add (Dekker) where Triton's interpreter may round twice."""
    if FUSED:
        error = tl.fma(a, b, -product)
    else:
        a_high, a_low = _halves(a)
        b_high, b_low = _halves(b)
        error = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    return error


@triton.jit
def _halves(a):
    """A number as the sum of two of half as many bits (Veltkamp)."""
    shifted = a * 134217729.0  # 2^27 + 1
    high = shifted - (shifted - a)
    return high, a - high


@triton.jit
def two_sum(a, b):
    """``a + b`` and its rounding error (Knuth)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


@triton.jit
def add_pairs(a, a_low, b, b_low):
    total, error = two_sum(a, b)
    return total, error + (a_low + b_low)


@triton.jit
def _store(high, low, s, c, mask):
    """The sums over columns, added in doubled precision."""
    total, errors = tl.reduce((s, c), 1, add_pairs)
    tl.store(high, total, mask=mask)
    tl.store(low, errors, mask=mask)
