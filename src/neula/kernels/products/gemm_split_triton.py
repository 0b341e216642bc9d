"""Float32 matrices as sums of narrower ones, in rows that bulk copies can fetch: operands of a product, and
how it is cut up.

Writes two halves (fp16), as many bytes as it reads, with k as the contiguous dimension, whatever the strides:
with the largest elements before, a tenth of the time of a product of order 8192.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.kernels.launch import ceil_div
from neula.kernels.products.parts import Scheme
from neula.kernels.products.parts_triton import exponents_of, round_to_bits, times_power_of_two
from neula.kernels.triton_source import jit, tl

PAD = 16
"""Rows of parts are filled up with zeros to a multiple of this, so that they start where bulk copies can."""

SPLIT = (32, 128)
"""The tile of a thread block that splits: equally fast from 32 x 128 to 8 x 512."""


class Parts(NamedTuple):
    parts: torch.Tensor
    """Shape (parts, rows, k), k padded."""
    largest: torch.Tensor
    """Of each row, from which the scale follows."""

    @property
    def by_columns(self) -> bool:
        """Whether columns are contiguous, not rows."""
        return self.parts.stride(2) != 1

    def transposed(self, rows: int) -> Parts:
        """The first ``rows`` columns as rows, all of one scale, as those here are."""
        return Parts(self.parts[:, :, :rows].mT, self.largest[:1].repeat(rows))


def split(
    x: torch.Tensor,
    scheme: Scheme,
    bound: float | torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> Parts:
    """Scale the rows of ``x``, by their largest elements or a bound on all, and split its elements.

    With scales, which make its rows at most 1, the rows are multiplied by these before.
    """
    bound = 1.0 if bound is None and scales is not None else bound
    rows, k = x.shape
    padded = ceil_div(k, PAD) * PAD
    if bound is None:
        largest = torch.linalg.vector_norm(x, float("inf"), dim=1)
    elif isinstance(bound, torch.Tensor):
        largest = bound.repeat(rows)
    else:
        largest = torch.full((rows,), bound, dtype=torch.float32, device=x.device)
    parts = torch.empty((scheme.parts, rows, padded), dtype=scheme.dtype, device=x.device)
    split_into(parts, x, largest, scheme, scales)
    return Parts(parts, largest)


def split_into(
    parts: torch.Tensor,
    x: torch.Tensor,
    largest: torch.Tensor,
    scheme: Scheme,
    scales: torch.Tensor | None = None,
) -> None:
    """Split x into given parts, which may have additional columns of zeros."""
    (rows, k), padded = x.shape, parts.shape[2]
    grid = (ceil_div(rows, SPLIT[0]) * ceil_div(padded, SPLIT[1]),)
    _split_kernel[grid](
        *(x, largest, largest if scales is None else scales, parts, rows, k, padded),
        *(*x.stride(), *parts.stride()[:2]),
        *(scheme.parts, scheme.significand, scheme.shift, scheme.top, scales is not None, *SPLIT),
    )


@jit(do_not_specialize=["rows", "k"])
def _split_kernel(
    x, largest, scales, parts, rows, k, padded, stride_row, stride_column, part_size, part_row,
    PARTS: tl.constexpr, SIGNIFICAND: tl.constexpr, SHIFT: tl.constexpr, TOP: tl.constexpr,
    SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Scale and split a tile of ``x``; columns from k on become zeros."""
    across = tl.cdiv(padded, COLUMNS)
    i = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    j = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    i_wide, j_wide = i.to(tl.int64)[:, None], j.to(tl.int64)[None, :]  # offsets may exceed 2^31
    inside = (i < rows)[:, None]
    rest = tl.load(
        x + i_wide * stride_row + j_wide * stride_column, mask=inside & (j < k)[None, :], other=0.0
    )
    if SCALED:
        rest = (rest * tl.load(scales + i, mask=i < rows, other=1.0)[:, None]).to(tl.float32)
    exponents = TOP - exponents_of(tl.load(largest + i, mask=i < rows, other=0.0))
    rest = times_power_of_two(rest, exponents[:, None])
    parts += i_wide * part_row + j_wide
    for part in tl.static_range(PARTS):
        # bf16 and tf32 by hand (there is no type for the latter): their exponents are those of float32.
        rounded = rest if parts.dtype.element_ty == tl.float16 else round_to_bits(rest, SIGNIFICAND)
        narrow = rounded.to(parts.dtype.element_ty)
        tl.store(parts + tl.cast(part_size, tl.int64) * part, narrow, mask=inside & (j < padded)[None, :])
        rest = (rest - narrow.to(tl.float32)) * (1 << SHIFT)


class GemmConfig(NamedTuple):
    """How the product is cut up."""

    # rows, columns: the tile of C of a thread block.
    rows: int
    columns: int
    run: int  # products that are summed on the unit before they are added outside; what is loaded at a time
    # warps, stages: warps of a thread block, and loads in flight.
    warps: int
    stages: int


def configs(scheme: Scheme) -> list[GemmConfig]:
    """How products may be cut up, what is best for large ones first."""
    run = 128 // scheme.dtype.itemsize
    if scheme.parts == 1:
        return [
            GemmConfig(128, 256, run, 8, 3),
            GemmConfig(128, 128, run, 8, 4),
            GemmConfig(64, 64, run, 4, 3),
        ]
    less = scheme.parts - 2  # a third part needs the room of a stage
    return [
        GemmConfig(128, 128, run, 8, 3 - less),
        GemmConfig(64, 128, run, 4, 2),
        GemmConfig(64, 64, run, 4, 3 - less),
        GemmConfig(64, 64, run // 2, 4, 2),
    ]
