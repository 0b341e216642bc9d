"""Products of a large matrix with a few vectors in a wider precision, of which certificates are made, and
solutions by factors in a low format.

``4 m n`` bytes in float32, and 4 or 8 multiply-adds for each element, for which even float64 is fast enough.
A is converted in registers. A tile is long in the direction in which A is contiguous; every thread adds up
its own elements, and those of a row are added to each other at the end. Where rows are few, the columns are
divided as well.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from neula.kernels.dispatch import kernel, trial
from neula.kernels.few_vectors.vectors_triton import add_rows_times, load_vectors
from neula.kernels.launch import ceil_div, elements_at_a_time, multiprocessors, share
from neula.kernels.precision import exact_matmul
from neula.kernels.triton_source import jit, tl

VECTORS = 8
"""Up to how many vectors the kernel takes."""

_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Elements that are converted at a time: what a cache holds, and what fills a GPU."""


@trial("The kernel of thin products", "library calls take its place")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, dtype=torch.float32, device=device)
    thin_product.kernel(one, one.double())


@kernel("thin_product_triton", trial=_tried, when=lambda a, x: 0 < x.shape[1] <= VECTORS and 0 not in a.shape)
def thin_product(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``A X`` in the precision of X, float32 or float64, complex if A is, for A (m, n) of any dtype and
    strides.

    Some rows of A are converted at a time. On a GPU a Triton kernel reads A once, at the speed of memory.

    Examples
    --------
    >>> thin_product(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(2, 1, dtype=torch.float64))
    tensor([[3.],
            [7.]], dtype=torch.float64)
    """
    if a.is_conj():
        return thin_product(a.conj(), x.conj().resolve_conj()).conj()
    if a.is_cuda and a.is_complex() and 1 in a.stride() and x.shape[1] <= VECTORS:
        return _product_of_parts(a, x.resolve_conj())
    # Products of a few rows take a third of the time of those of a few columns in MKL.
    x = x.mT.contiguous()
    if a.dtype == x.dtype:
        return exact_matmul(x, a.mT).mT
    rows = max(1, _CHUNK[a.device.type] // max(1, a.shape[1]))
    return torch.cat([exact_matmul(x, block.to(x.dtype).mT) for block in a.split(rows)], 1).mT


def _product_of_parts(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Multiply a complex matrix as the real matrix of its parts, interleaved in memory, by twice as many
    vectors, which the kernel does.
    """
    if x.shape[1] > VECTORS // 2:
        return torch.cat([_product_of_parts(a, some) for some in x.split(VECTORS // 2, 1)], 1)
    if a.stride(1) == 1:
        vectors = torch.stack([torch.view_as_real(x), torch.view_as_real(1j * x)], 1).flatten(2)
        parts = thin_product(torch.view_as_real(a).flatten(1), vectors.flatten(0, 1))
        return torch.view_as_complex(parts.unflatten(1, (-1, 2)).contiguous())
    vectors = torch.view_as_real(x).flatten(1)
    parts = thin_product(torch.view_as_real(a.mT).flatten(1).mT, vectors).unflatten(0, (-1, 2))
    real, imaginary = parts.unflatten(2, (-1, 2)).unbind(3)
    return torch.complex(real[:, 0] - imaginary[:, 1], real[:, 1] + imaginary[:, 0])


BY_COLUMNS, BY_ROWS = (512, 2), (8, 128)
"""Rows and columns of a tile, where A is contiguous in columns (8192 x 8192 in half precision, eight vectors:
0.14 ms, and 0.20 in tiles of 256 x 4), and where it is in rows, which share what is read of the vectors
(50000 x 4000: 0.40 ms, and 0.47 in tiles of 4 x 256)."""

BLOCKS = 12
"""Thread blocks for each multiprocessor, so that enough loads are in flight."""

MIN_PIECE = 64
"""Columns of A that are not divided any further: a thread block reads its piece one tile after the other."""

STAGES = 3
"""Loads in flight."""


def thin_product_triton(a, x):
    m, n = a.shape
    vectors = x.shape[1]
    k = 4 if vectors <= 4 else 8
    # By columns: rows of eight vectors are lines of the cache, of which each load would take a part.
    x = (x.mT if vectors == k else functional.pad(x.mT, (0, 0, 0, k - vectors))).contiguous().mT
    rows, columns = BY_COLUMNS if a.stride(0) == 1 else BY_ROWS
    down = ceil_div(m, rows)
    pieces = max(1, min(BLOCKS * multiprocessors(a.device) // down, n // MIN_PIECE))
    piece = share(n, pieces, columns)
    sums = torch.empty(pieces, k, m, dtype=x.dtype, device=a.device)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    vector = elements_at_a_time(a)
    _thin_product[(down, pieces)](
        *(a, x, sums, m, n, piece, *a.stride(), *x.stride()),
        *(rows, columns, k, wide, a.stride(0) == 1, vector, STAGES if vector > 1 else 1),
        num_warps=4,
    )
    return (sums[0] if pieces == 1 else sums.sum(0)).mT[:, :vectors]


@jit(do_not_specialize=["m", "n", "piece", "x_column"])
def _thin_product(
    a, x, sums, m, n, piece, a_row, a_column, x_row, x_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTORS: tl.constexpr, WIDE: tl.constexpr,
    BY_COLUMNS: tl.constexpr, VECTOR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block of rows of the product of a piece of the columns."""
    m, x_column = m.to(tl.int64), x_column.to(tl.int64)  # offsets may exceed 2^31
    # Multiples of VECTOR, as the compiler has to see to move so many elements at a time.
    piece = piece // COLUMNS * COLUMNS
    if BY_COLUMNS:
        m, a_column = m // VECTOR * VECTOR, a_column // VECTOR * VECTOR
    elif VECTOR > 1:
        n, a_row = n // VECTOR * VECTOR, a_row // VECTOR * VECTOR
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * piece
    last = tl.minimum(first + piece, n)
    rows = a + i.to(tl.int64)[:, None] * a_row
    totals = (tl.zeros((ROWS, COLUMNS), WIDE),) * VECTORS
    for start in tl.range(first, last, COLUMNS, num_stages=STAGES):
        j = start + tl.arange(0, COLUMNS)
        inside = (i[:, None] < m) & (j[None, :] < last)
        block = tl.load(rows + j.to(tl.int64)[None, :] * a_column, mask=inside, other=0.0).to(WIDE)
        vectors = load_vectors(x + j.to(tl.int64) * x_row, x_column, j < last, VECTORS, WIDE)
        totals = add_rows_times(totals, block, vectors, VECTORS)
    sums += tl.program_id(1).to(tl.int64) * VECTORS * m + i
    for v in tl.static_range(VECTORS):
        tl.store(sums + v * m, tl.sum(totals[v], axis=1), mask=i < m)
