"""Products of a matrix that is stored in a low format with a few vectors in a wider one.

A solve with the factors of an LU factorization reads every element once, for two flops: memory is the bound,
and to convert them first, to float32, would move five times as many bytes. On a GPU they are converted in
registers. In float64 a program has a block of rows and one column of X; in float32 all columns, which are
multiplied on matrix units: A, with at most 11 significant bits, is exact in TF32, and X is a sum of two such
matrices.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel
from neula.kernels.launch import ceil_div
from neula.kernels.precision import exact_matmul
from neula.kernels.products.parts_triton import round_to_bits
from neula.kernels.triton_source import jit, tl

VECTORS = 8
"""Up to as many columns the kernels take; for more it is worth while to convert A, and to multiply
matrices."""

_CHUNK = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Elements that the reference converts at a time: a CPU keeps them in its cache, and a GPU has enough to
do."""


@kernel(
    "subtract_product_triton",
    when=lambda a, x, y: a.shape[0] > 0 and a.dtype != x.dtype and x.shape[1] <= VECTORS,
)
def subtract_product(a: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``Y = Y - A X`` in the precision of X and Y, float32 or float64, for A (m, n) of any floating dtype.

    Some rows of A are converted at a time; on a GPU a Triton kernel converts them in registers, and in
    float32 multiplies on matrix units. Column-major A, blocks of larger matrices included, is read at full
    speed.

    Examples
    --------
    >>> subtract_product(torch.eye(2).half(), torch.ones(2, 1), torch.tensor([[3.0], [4.0]]))
    tensor([[2.],
            [3.]])
    """
    rows = len(a) if a.dtype == x.dtype else max(1, _CHUNK[a.device.type] // max(1, a.shape[1]))
    for low, target in zip(a.split(max(1, rows)), y.split(max(1, rows)), strict=True):
        target -= exact_matmul(low.to(x.dtype), x)
    return y


ROWS = 64
"""128 bytes of a column of fp16, a line of the cache."""

COLUMNS = 128
"""So many loads at a time hide the latency of memory."""

STAGES = 3


def subtract_product_triton(a, x, y):
    m, n = a.shape
    if x.dtype == torch.float32 != a.dtype:
        _few_vectors[(ceil_div(m, ROWS),)](
            *(a, x, y, m, n, *a.stride(), *x.stride(), *y.stride(), x.shape[1]),
            *(ROWS, COLUMNS, VECTORS, STAGES),
            num_warps=4,
        )
        return y
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    launch = _subtract_product[(ceil_div(m, ROWS), x.shape[1])]
    strides = (*a.stride(), *x.stride(), *y.stride())
    launch(a, x, y, m, n, *strides, ROWS, COLUMNS, wide, num_warps=8)
    return y


@jit
def _few_vectors(
    a, x, y, m, n, a_row, a_column, x_row, x_column, y_row, y_column, vectors,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTORS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block of rows of ``Y - A X``."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    v = tl.arange(0, VECTORS)
    rows = a + i.to(tl.int64)[:, None] * a_row
    total = tl.zeros((ROWS, VECTORS), tl.float32)
    for start in tl.range(0, n, COLUMNS, num_stages=STAGES):
        j = start + tl.arange(0, COLUMNS)
        inside = (i[:, None] < m) & (j[None, :] < n)
        block = tl.load(rows + j.to(tl.int64)[None, :] * a_column, mask=inside, other=0.0)
        place = x + j[:, None] * x_row + v[None, :] * x_column
        known = tl.load(place, mask=(j[:, None] < n) & (v[None, :] < vectors), other=0.0)
        wide = block.to(tl.float32)
        high = round_to_bits(known, 11)
        low = round_to_bits(known - high, 11)
        total = tl.dot(wide, low, total, input_precision="tf32")
        total = tl.dot(wide, high, total, input_precision="tf32")
    inside = (i[:, None] < m) & (v[None, :] < vectors)
    place = y + i.to(tl.int64)[:, None] * y_row + v[None, :] * y_column
    tl.store(place, tl.load(place, mask=inside, other=0.0) - total, mask=inside)


@jit
def _subtract_product(
    a, x, y, m, n, a_row, a_column, x_row, x_column, y_row, y_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A block of rows of one column of Y."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64)
    x += column * x_column
    total = tl.zeros((ROWS, COLUMNS), WIDE)
    for start in range(0, n, COLUMNS):
        j = start + tl.arange(0, COLUMNS).to(tl.int64)
        inside = (i[:, None] < m) & (j[None, :] < n)
        block = tl.load(a + i[:, None] * a_row + j[None, :] * a_column, mask=inside, other=0.0)
        total += block.to(WIDE) * tl.load(x + j * x_row, mask=j < n, other=0.0)[None, :]
    place = y + i * y_row + column * y_column
    before = tl.load(place, mask=i < m, other=0.0)
    tl.store(place, before - tl.sum(total, axis=1), mask=i < m)
