"""Rows mixed in fours: each element is read and written once."""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from neula.kernels.launch import ceil_div
from neula.kernels.lu.butterfly import WAYS
from neula.kernels.triton_source import jit, tl

LONG, SHORT, WARPS = 128, 4, 4
"""Elements of a tile along memory, and across."""


def mixed_triton(out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """:func:`neula.kernels.lu.butterfly.mixed` by the kernel, queued on the current stream."""
    h, k = weights.shape[-1], x.shape[1]
    rows, columns = (LONG, SHORT) if x.stride(0) == 1 or k <= SHORT else (SHORT, LONG)
    grid = (ceil_div(h, rows) * ceil_div(k, columns),)
    with torch.cuda.device_of(x):
        _mixed_kernel[grid](
            *(x, weights, out, len(x), len(out), k, h, *x.stride(), *out.stride()),
            *(rows, columns, WAYS),
            num_warps=WARPS,
        )
    return out


@jit
def _mixed_kernel(
    x, weights, out, n, m, k, h, x_row, x_column, out_row, out_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(k, COLUMNS)
    i = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = (tl.program_id(0) % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    there, inside = i < h, (j < k)[None, :]
    x0 = _rows(x, i, j, n, there, inside, x_row, x_column)
    x1 = _rows(x, i + h, j, n, there, inside, x_row, x_column)
    x2 = _rows(x, i + 2 * h, j, n, there, inside, x_row, x_column)
    x3 = _rows(x, i + 3 * h, j, n, there, inside, x_row, x_column)
    for q in tl.static_range(WAYS):
        weight = weights + q * WAYS * h + i
        # All rows have been read by the thread that overwrites them.
        found = tl.load(weight, mask=there, other=0.0).to(x0.dtype)[:, None] * x0
        found += tl.load(weight + h, mask=there, other=0.0).to(x0.dtype)[:, None] * x1
        found += tl.load(weight + 2 * h, mask=there, other=0.0).to(x0.dtype)[:, None] * x2
        found += tl.load(weight + 3 * h, mask=there, other=0.0).to(x0.dtype)[:, None] * x3
        row = i + q * h
        target = out + row[:, None] * out_row + j[None, :] * out_column
        tl.store(target, found, mask=(there & (row < m))[:, None] & inside)


@jit
def _rows(x, row, j, n, there, inside, x_row, x_column):
    mask = (there & (row < n))[:, None] & inside
    return tl.load(x + row[:, None] * x_row + j[None, :] * x_column, mask=mask, other=0.0)
