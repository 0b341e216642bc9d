"""``Y = Y - A X`` with A in a low format, converted in registers.

One program has a block of rows and one column of X. It walks along the columns of A, a few at a time, and
adds up in the precision of X: ``2 m n`` bytes are read for ``2 m n`` flops, so memory is the bound in float32
and in float64. Sums are over n in blocks, in an order that does not depend on what finishes first.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 64
"""128 bytes of a column of fp16, a line of the cache."""

COLUMNS = 128
"""So many loads at a time hide the latency of memory."""


def subtract_product_triton(a: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """:func:`neula.kernels.mixed_product.subtract_product` by the kernel, queued on the current stream."""
    m, n = a.shape
    wide = tl.float64 if x.dtype == torch.float64 else tl.float32
    with torch.cuda.device_of(a):
        launch = _subtract_product[(triton.cdiv(m, ROWS), x.shape[1])]
        strides = (*a.stride(), *x.stride(), *y.stride())
        launch(a, x, y, m, n, *strides, ROWS, COLUMNS, wide, num_warps=8)
    return y


@triton.jit
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
