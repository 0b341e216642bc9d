"""The kernel of :mod:`neula.kernels.cholesky.pivoted_cholesky`.

A pivot is a maximum over the diagonal, and a row of R a combination of those of the panel, in the cache: one
thread block does a panel, since waiting for others would take longer than the row does.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from neula.kernels.cholesky.pivoted_cholesky import PANEL
from neula.kernels.launch import next_power_of_2
from neula.kernels.triton_source import jit, tl

LOADED = 16384
"""Numbers of rows of R that are under way at a time."""


def eliminate_panel_triton(
    gram: torch.Tensor,
    diagonal: torch.Tensor,
    r: torch.Tensor,
    pivots: torch.Tensor,
    count: torch.Tensor,
    start: int,
    tolerance: float,
) -> None:
    """``pivoted_cholesky.eliminate_panel`` by the kernel, on the current stream."""
    n = len(gram)
    block = max(32, next_power_of_2(n))
    with torch.cuda.device_of(gram):
        _panel_kernel[(1,)](
            *(gram, gram.stride(0), diagonal, r, r.stride(0), pivots, count, start, n, tolerance),
            *(PANEL, min(8, max(1, LOADED // block)), block),
            num_warps=max(1, min(32, block // 64)),
        )


@jit(do_not_specialize=["start", "n", "tolerance"])
def _panel_kernel(
    gram, gram_row, diagonal, r, r_row, pivots, count, start, n, tolerance,
    PANEL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    d = tl.load(diagonal + i, mask=i < n, other=float("-inf"))
    known = tl.load(count)
    r += tl.cast(start, tl.int64) * r_row
    j = 0
    value, p = tl.max(d, axis=0, return_indices=True)
    while (j < PANEL) & (start + j < n) & (known == start + j) & (value > tolerance):
        row = tl.load(gram + tl.cast(p, tl.int64) * gram_row + i, mask=i < n, other=0.0)
        for first in range(0, j, ROWS):
            k = first + tl.arange(0, ROWS)
            place = r + tl.cast(k, tl.int64)[None, :] * r_row
            others = tl.load(place + i[:, None], mask=(k < j)[None, :] & (i < n)[:, None], other=0.0)
            row -= tl.sum(others * tl.load(place + p, mask=(k < j)[None, :], other=0.0), axis=1)
        row = tl.where(d == float("-inf"), 0.0, row / tl.sqrt(value))
        tl.store(r + tl.cast(j, tl.int64) * r_row + i, row, mask=i < n)
        tl.store(pivots + start + j, p)
        d = tl.where(i == p, float("-inf"), d - row * row)
        known += 1
        j += 1
        value, p = tl.max(d, axis=0, return_indices=True)
        # Others read what this thread has written.
        tl.debug_barrier()
    tl.store(diagonal + i, d, mask=i < n)
    tl.store(count, known)
