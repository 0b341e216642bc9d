"""The products of :mod:`neula.kernels.polar.batched_product` on tensor cores, a thread block for each tile.

Of a symmetric product tiles on and below the diagonal are computed, and those below are stored twice. Two
parts of an operand take three products of tensor cores: that of the leading parts is summed in runs, which
are added in float32, since tensor cores truncate their sums (:mod:`neula.kernels.products.gemm`).
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from neula.kernels.launch import ceil_div
from neula.kernels.polar.batched_product import SHIFT, room
from neula.kernels.tensor_map import Tiles
from neula.kernels.triton_source import jit, tl

GROUP = 8
"""Tiles are taken in bands of so many rows of tiles, whose operands stay in the cache."""


class BatchedProductConfig(NamedTuple):
    """How a product is cut up: the tile of a thread block, what is loaded at a time, warps, stages."""

    rows: int
    columns: int
    run: int
    warps: int
    stages: int


SQUARE = {1: BatchedProductConfig(128, 128, 64, 8, 3), 2: BatchedProductConfig(128, 128, 64, 8, 3)}
"""Configurations of symmetric products by the number of parts: diagonal tiles are squares."""

WIDE = {1: BatchedProductConfig(128, 256, 64, 8, 3), 2: BatchedProductConfig(128, 128, 64, 8, 3)}
"""Configurations of other products by the number of parts."""

SMALL = BatchedProductConfig(32, 32, 32, 4, 2)
"""For matrices of up to :data:`TINY` rows, and in Triton's interpreter."""

TINY = 64


def batched_product_triton(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    factor: float = 1.0,
    shift: float = 0.0,
    scales: torch.Tensor | None = None,
    symmetric: bool = False,
    wide: bool = False,
    config: BatchedProductConfig | None = None,
) -> torch.Tensor:
    """``batched_product.batched_product`` by the kernel, queued on the current stream."""
    (parts, batch, m, k), n = a.shape, b.shape[3]
    config = config or _config(m, n, parts, symmetric and a.is_cuda, on_gpu=a.is_cuda)
    out = room(1 if wide else parts, batch, m, n, dtype=torch.float32 if wide else a.dtype, device=a.device)
    by_columns = b.stride(2) == 1 and b.stride(3) != 1
    b_block = [config.columns, config.run] if by_columns else [config.run, config.columns]
    descriptors = (
        *_descriptors(a, [config.rows, config.run]),
        *_descriptors(b.mT if by_columns else b, b_block),
        *_descriptors(a if wide else out, [config.rows, config.columns]),
    )
    down, across = ceil_div(m, config.rows), ceil_div(n, config.columns)
    tiles = down * (down + 1) // 2 if symmetric else down * across
    with torch.cuda.device_of(a):
        _batched_product[(tiles * batch,)](
            *descriptors,
            *(out, *out.stride()[1:3], out if scales is None else scales.contiguous()),
            *(factor, shift, m, n, k, tiles),
            *(a.dtype, parts, SHIFT, symmetric, by_columns, scales is not None, wide, not a.is_cuda),
            *(config.rows, config.columns, config.run, GROUP),
            num_warps=config.warps,
            num_stages=config.stages,
        )
    return out


def _config(m: int, n: int, parts: int, symmetric: bool, *, on_gpu: bool) -> BatchedProductConfig:
    if not on_gpu or min(m, n) <= TINY:
        return SMALL
    return (SQUARE if symmetric else WIDE)[parts]


def _descriptors(operand: torch.Tensor, block: list[int]) -> list[Any]:
    """Descriptors of two parts; if there is one part, the kernel does not touch the second."""
    found = [Tiles(part, (1, *block)) for part in operand]
    return found + [found[-1]] * (2 - len(found))


@jit(do_not_specialize=["m", "n", "k", "tiles", "wide_batch", "wide_row"])
def _batched_product(
    a1_parts, a2_parts, b1_parts, b2_parts, c1_parts, c2_parts, wide, wide_batch, wide_row, scales, factor,
    shift, m, n, k, tiles, LOW: tl.constexpr,
    PARTS: tl.constexpr, SHIFT: tl.constexpr, SYMMETRIC: tl.constexpr, BY_COLUMNS: tl.constexpr,
    SCALED: tl.constexpr, WIDE: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of one of the products."""
    batch, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if SYMMETRIC:
        # Tiles of the lower triangle, row by row.
        below = ((tl.sqrt(8.0 * tile.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
        below = tl.where(below * (below + 1) // 2 > tile, below - 1, below)
        below = tl.where((below + 1) * (below + 2) // 2 <= tile, below + 1, below)
        row, column = below * ROWS, (tile - below * (below + 1) // 2) * COLUMNS
    else:
        down, across = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
        first = tile // (GROUP * across) * GROUP
        height = tl.minimum(down - first, GROUP)
        row = (first + tile % (GROUP * across) % height) * ROWS
        column = tile % (GROUP * across) // height * COLUMNS

    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    small = tl.zeros((ROWS, COLUMNS), tl.float32)
    for l in range(0, k, RUN):  # noqa: E741
        a1 = _load(a1_parts, batch, row, l, ROWS, RUN, WIDEN)
        b1 = _load_b(b1_parts, batch, l, column, RUN, COLUMNS, BY_COLUMNS, WIDEN)
        if PARTS == 1:
            total = tl.dot(a1, b1, total)
        else:
            a2 = _load(a2_parts, batch, row, l, ROWS, RUN, WIDEN)
            b2 = _load_b(b2_parts, batch, l, column, RUN, COLUMNS, BY_COLUMNS, WIDEN)
            # The bound keeps Triton from adding to the total on the matrix unit, which truncates.
            total += tl.dot(a1, b1, input_precision="tf32", max_num_imprecise_acc=RUN)
            small = tl.dot(a1, b2, small, input_precision="tf32")
            small = tl.dot(a2, b1, small, input_precision="tf32")
    if PARTS == 2:
        total += small * (1.0 / (1 << SHIFT))

    total *= factor
    i, j = row + tl.arange(0, ROWS)[:, None], column + tl.arange(0, COLUMNS)[None, :]
    if (row < column + COLUMNS) & (column < row + ROWS):
        total += tl.where(i == j, shift, 0.0)
    if SCALED:
        total *= tl.load(scales + batch)
    if SYMMETRIC:  # noqa: SIM102 (the other is no constant)
        if row == column:  # sums of two parts are not symmetric to the last bit
            total = tl.where(i >= j, total, tl.trans(total))
    if WIDE:
        target = wide + batch.to(tl.int64) * wide_batch
        tl.store(target + i.to(tl.int64) * wide_row + j, total, mask=(i < m) & (j < n))
        if SYMMETRIC:  # noqa: SIM102 (the other is no constant)
            if row != column:
                i_turned = row + tl.arange(0, ROWS)[None, :]
                j_turned = column + tl.arange(0, COLUMNS)[:, None]
                inside = (i_turned < m) & (j_turned < n)
                tl.store(target + j_turned.to(tl.int64) * wide_row + i_turned, tl.trans(total), mask=inside)
    else:
        c1 = total.to(LOW)
        _store(c1_parts, batch, row, column, c1, SYMMETRIC)
        if PARTS == 2:
            c2 = ((total - c1.to(tl.float32)) * (1 << SHIFT)).to(LOW)
            _store(c2_parts, batch, row, column, c2, SYMMETRIC)


@jit
def _store(parts, batch, row, column, tile, SYMMETRIC: tl.constexpr):
    """A tile of a matrix, and of a symmetric one its transpose as well."""
    parts.store([batch, row, column], tile.reshape(1, tile.shape[0], tile.shape[1]))
    if SYMMETRIC:  # noqa: SIM102 (the other is no constant)
        if row != column:
            parts.store([batch, column, row], tl.trans(tile).reshape(1, tile.shape[1], tile.shape[0]))


@jit
def _load(parts, batch, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDEN: tl.constexpr):
    """A block of a matrix, zeros beyond its edges; float32 for the interpreter, which has no bf16 product."""
    block = parts.load([batch, row, column]).reshape(ROWS, COLUMNS)
    return block.to(tl.float32) if WIDEN else block


@jit
def _load_b(
    parts, batch, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_COLUMNS: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    if BY_COLUMNS:
        return _load(parts, batch, column, row, COLUMNS, ROWS, WIDEN).T
    return _load(parts, batch, row, column, ROWS, COLUMNS, WIDEN)
