"""Float32 matrices in parts of a low format, as operands of products: rows that bulk copies can fetch.

On a GPU one pass writes two halves (fp16), as many bytes as it reads, with k as the contiguous dimension,
whatever the strides: with the largest elements before, a tenth of the time of a product of order 8192. A
factorization subtracts products of what it has done with itself, and keeps its operands in parts, made a
block at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Self

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import ceil_div
from neula.kernels.products.parts import (
    SCHEMES,
    Scheme,
    parts_of,
    round_part,
    row_exponents,
    times_power_of_two,
)
from neula.kernels.products.parts_triton import exponents_of, round_to_bits
from neula.kernels.products.parts_triton import times_power_of_two as times_power
from neula.kernels.triton_source import jit, tl

ALIGNED = 16
"""Rows start at multiples of so many elements, where bulk copies can."""

TILE = (32, 128)
"""The tile of a thread block that splits: equally fast from 32 x 128 to 8 x 512."""


@dataclass(frozen=True)
class Kept:
    """A matrix in parts, or a block of one."""

    parts: torch.Tensor  # shape (parts, m, k): rows contiguous, or columns
    # Shape (m,): float32: no element of a row is larger in magnitude, from which its scale follows.
    largest: torch.Tensor
    scheme: Scheme = SCHEMES["fp16_cor"]

    @classmethod
    def from_matrix(
        cls,
        x: torch.Tensor,
        scheme: Scheme = SCHEMES["fp16_cor"],
        bound: float | torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> Self:
        """Split a float32 matrix, its rows scaled by their largest elements or by a ``bound`` on all.

        With ``scales`` (m,), which make its rows at most 1, it may be float64, and they are multiplied by
        these before.
        """
        m, k = x.shape
        bound = 1.0 if bound is None and scales is not None else bound
        if bound is None:
            largest = torch.linalg.vector_norm(x, torch.inf, dim=1) if k else x.new_zeros(m)
        elif isinstance(bound, torch.Tensor):
            largest = bound.repeat(m)
        else:
            largest = torch.full((m,), bound, dtype=torch.float32, device=x.device)
        whole = cls.empty(m, ceil_div(k, ALIGNED) * ALIGNED, largest, scheme)
        keep(x, whole, scales)
        return whole.block(slice(0, m), slice(0, k))

    @classmethod
    def empty(cls, m: int, k: int, largest: torch.Tensor, scheme: Scheme = SCHEMES["fp16_cor"]) -> Self:
        """Room for an m x k matrix."""
        across = ceil_div(k, ALIGNED) * ALIGNED
        parts = torch.empty(scheme.parts, m, across, dtype=scheme.dtype, device=largest.device)
        return cls(parts[..., :k], largest.float(), scheme)

    def block(self, rows: slice, columns: slice) -> Self:
        """A view."""
        return type(self)(self.parts[:, rows, columns], self.largest[rows], self.scheme)

    @property
    def mT(self) -> Self:
        """The transpose, whose columns are contiguous, of a matrix whose rows have one scale."""
        return type(self)(self.parts.mT, self.largest[:1].repeat(self.parts.shape[2]), self.scheme)

    @property
    def by_columns(self) -> bool:
        """Whether columns are contiguous, not rows."""
        return self.parts.stride(2) != 1

    @property
    def exponents(self) -> torch.Tensor:
        """Rows are ``2**exponents`` times what the parts stand for, shape (m,)."""
        return row_exponents(self.largest[:, None]) - self.scheme.top


@trial("The kernel that splits operands", "plain torch takes its place")
def _tried(device: torch.device) -> None:
    one = torch.ones(ALIGNED, ALIGNED, dtype=torch.float32, device=device)
    keep.kernel(one, Kept.empty(ALIGNED, ALIGNED, one[0]))


@kernel("keep_triton", trial=_tried, when=lambda x, into, scales=None: 0 not in x.shape)
def keep(x: torch.Tensor, into: Kept, scales: torch.Tensor | None = None) -> None:
    """Split a float32 matrix (m, k), its rows times ``scales``, into parts, whose memory is given; columns
    from k on become zeros.
    """
    x = x if scales is None else (x * scales[:, None]).float()
    scheme, k = into.scheme, x.shape[1]
    scaled = times_power_of_two(x, -into.exponents[:, None])
    parts = parts_of(scaled, partial(round_part, scheme=scheme), scheme.parts, 2.0**scheme.shift)
    into.parts[:, :, k:] = 0
    for room, part in zip(into.parts[:, :, :k], parts, strict=True):
        room.copy_(part)


def keep_triton(x, into, scales=None):
    (rows, k), padded, scheme = x.shape, into.parts.shape[2], into.scheme
    grid = (ceil_div(rows, TILE[0]) * ceil_div(padded, TILE[1]),)
    _split_kernel[grid](
        *(x, into.largest, into.largest if scales is None else scales, into.parts, rows, k, padded),
        *(*x.stride(), *into.parts.stride()[:2]),
        *(scheme.parts, scheme.significand, scheme.shift, scheme.top, scales is not None, *TILE),
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
    rest = times_power(rest, exponents[:, None])
    parts += i_wide * part_row + j_wide
    for part in tl.static_range(PARTS):
        # bf16 and tf32 by hand (there is no type for the latter): their exponents are those of float32.
        rounded = rest if parts.dtype.element_ty == tl.float16 else round_to_bits(rest, SIGNIFICAND)
        narrow = rounded.to(parts.dtype.element_ty)
        tl.store(parts + tl.cast(part_size, tl.int64) * part, narrow, mask=inside & (j < padded)[None, :])
        rest = (rest - narrow.to(tl.float32)) * (1 << SHIFT)
