"""Recursive butterflies: rows that are mixed in fours, each four by a matrix of its own, in one launch.

Rows mixed in fours: each element is read and written once.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import ceil_div
from neula.kernels.triton_source import jit, tl

WAYS = 4
"""Rows that are mixed with each other: those at one place in each quarter."""

_BLOCK = 1 << 24
"""Elements that the reference mixes at a time: temporaries are small compared with the matrix."""


@trial("The kernel of butterflies", "the library's operations take several times as long")
def _tried(device: torch.device, itemsize: int) -> None:
    x = torch.ones(WAYS, 1, dtype=torch.float64 if itemsize == 8 else torch.float32, device=device)
    mixed.kernel(x, x, torch.ones(WAYS, WAYS, 1, dtype=torch.float64, device=device))


def _exact(out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> bool:
    return x.dtype == out.dtype and x.dtype in (torch.float32, torch.float64) and x.numel() > 0


@kernel("mixed_triton", trial=_tried, when=_exact, variant=lambda out, x, weights: x.dtype.itemsize)
def mixed(out: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``out[q h + i] = sum_p weights[q, p, i] x[p h + i]`` for rows of x, of which there are up to ``4 h``.

    Rows that are lacking are zero. ``out`` takes the first rows of the result, and may be x.
    """
    if x.is_complex():
        x = x.resolve_conj()
        for part, target in ((x.real, out.real), (x.imag, out.imag)):
            mixed(target, part, weights)
        return out
    order = WAYS * weights.shape[-1]
    weights = weights.to(x.dtype)[..., None]
    width = max(1, _BLOCK // max(1, order))
    for target, block in zip(out.split(width, 1), x.split(width, 1), strict=True):
        rows = torch.nn.functional.pad(block, (0, 0, 0, order - len(x))).unflatten(0, (WAYS, -1))
        found = torch.stack([(weight * rows).sum(0) for weight in weights])
        target.copy_(found.flatten(0, 1)[: len(out)])
    return out


LONG, SHORT, WARPS = 128, 4, 4
"""Elements of a tile along memory, and across."""


def mixed_triton(out, x, weights):
    h, k = weights.shape[-1], x.shape[1]
    rows, columns = (LONG, SHORT) if x.stride(0) == 1 or k <= SHORT else (SHORT, LONG)
    grid = (ceil_div(h, rows) * ceil_div(k, columns),)
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
