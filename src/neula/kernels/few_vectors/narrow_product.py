"""Products of a large float32 matrix with up to 32 vectors, near the speed of memory.

A number of A is a sum of two in TF32, and so is one of X: three products on the matrix unit are as accurate
as one in float32, since sums on the unit, which truncates, are short. Libraries multiply in float32 itself,
which for 32 vectors takes twice the time that A takes to be read. Where A has few rows, the columns are
divided.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from neula.kernels.dispatch import kernel
from neula.kernels.launch import ceil_div, elements_at_a_time, multiprocessors, next_power_of_2, share
from neula.kernels.precision import exact_matmul
from neula.kernels.triton_source import jit, tl

MOST = 32
"""Vectors at most: 50000 x 4000 with 32 take an H200 0.29 ms (the library 0.36, or 0.75 where they lie by
columns), with 8 0.22 (0.36), with 40 0.84 (0.56)."""

SMALLEST = 1 << 27
"""Elements of a matrix from which on more is gained than what it takes the host to launch."""


def _pays(a: torch.Tensor, x: torch.Tensor) -> bool:
    single = a.dtype == x.dtype == torch.float32 and a.ndim == 2
    return single and a.numel() >= SMALLEST and 0 < x.shape[1] <= MOST and elements_at_a_time(a) > 1


@kernel("narrow_product_triton", when=_pays)
def narrow_product(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``A X`` of float32 matrices, as accurate as in float32, on a GPU by a Triton kernel in three products
    of TF32.

    The kernel takes large A, contiguous in rows or in columns; its result is column-major.

    Examples
    --------
    >>> narrow_product(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(2, 1))
    tensor([[3.],
            [7.]])
    """
    return exact_matmul(a, x)


class NarrowProductConfig(NamedTuple):
    """How a product is dealt out."""

    # rows, terms: of a tile of A.
    rows: int
    terms: int
    # warps, stages: of a thread block; loads in flight.
    warps: int
    stages: int
    blocks: int  # thread blocks for each multiprocessor


BY_ROWS, BY_COLUMNS = NarrowProductConfig(128, 32, 8, 4, 2), NarrowProductConfig(128, 64, 8, 3, 2)
"""Configurations for an A with contiguous rows, and with contiguous columns."""

LEAST = 16
"""Columns of the smallest product of the unit."""


def narrow_product_triton(a, x):
    (m, n), k = a.shape, x.shape[1]
    by_rows = a.stride(1) == 1
    rows, terms, warps, stages, blocks = BY_ROWS if by_rows else BY_COLUMNS
    width = max(LEAST, next_power_of_2(k))
    x = functional.pad(x, (0, width - k)).contiguous()
    down = ceil_div(m, rows)
    pieces = max(1, min(blocks * multiprocessors(a.device) // down, n // terms))
    piece = share(n, pieces, terms)
    sums = torch.empty(ceil_div(n, piece), k, m, dtype=a.dtype, device=a.device)
    vector = elements_at_a_time(a)
    _product[(down, len(sums))](
        *(a, x, sums, m, n, k, piece, a.stride(0) if by_rows else a.stride(1)),
        *(rows, terms, width, stages, by_rows, vector),
        num_warps=warps,
    )
    return (sums[0] if len(sums) == 1 else sums.sum(0)).mT


@jit(do_not_specialize=["m", "n", "k", "piece"])
def _product(
    a, x, sums, m, n, k, piece, apart,
    ROWS: tl.constexpr, TERMS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
    BY_ROWS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """A block of rows of the product of a piece of the columns."""
    # Multiples of VECTOR, as the compiler has to see to move so many elements at a time.
    apart, piece = apart // VECTOR * VECTOR, piece // TERMS * TERMS
    i, j = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    first = tl.program_id(1) * piece
    if BY_ROWS:
        n = n // VECTOR * VECTOR
        rows = a + i.to(tl.int64)[:, None] * apart
    else:
        m = m // VECTOR * VECTOR
        rows = a + i[:, None]
    last = tl.minimum(first + piece, n)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in tl.range(first, last, TERMS, num_stages=STAGES):
        term = start + tl.arange(0, TERMS)
        columns = term[None, :] if BY_ROWS else term.to(tl.int64)[None, :] * apart
        block = tl.load(rows + columns, mask=(i < m)[:, None] & (term < last)[None, :], other=0.0)
        place = x + term.to(tl.int64)[:, None] * WIDTH + j[None, :]
        vectors = tl.load(place, mask=(term < last)[:, None], other=0.0)
        # By an ordinary addition, rounded to nearest: the unit truncates.
        total += tl.dot(block, vectors, input_precision="tf32x3")
    sums += (tl.program_id(1).to(tl.int64) * k + j[None, :]) * m + i[:, None]
    tl.store(sums, total, mask=(i < m)[:, None] & (j < k)[None, :])
