"""Products of batches in half precision that scale, shift and round as they store, half of each where it is
symmetric.

An operand is one number of half precision for each element, or an unevaluated sum of two, which keeps 22 bits
(:mod:`neula.kernels.products.parts`). Polynomials of a symmetric matrix are made of such products alone:
``factor A B + shift I``. Where A and B are symmetric and commute, their product is, too, and only the tiles
on and below its diagonal are computed; those below are stored twice. Two parts of an operand take three
products of tensor cores: that of the leading parts is summed in runs, which are added in float32, since
tensor cores truncate their sums (:mod:`neula.kernels.products.gemm`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import ceil_div
from neula.kernels.triton_source import Tiles, jit, tl

SHIFT = 11
"""The second part of an operand is stored times ``2^11``, which keeps it from underflow."""

ALIGNED = 8
"""Rows start at multiples of so many elements, 16 bytes, where bulk copies can."""


@trial("The kernel of products of batches", "the library's products take its place")
def _tried(device: torch.device) -> None:
    one = split.kernel(torch.eye(16, dtype=torch.float32, device=device)[None], torch.float16, 2)
    joined.kernel(batched_product.kernel(one, one.mT, symmetric=True))


@kernel("batched_product_triton", trial=_tried, when=lambda a, b, *_, **__: 0 not in (*a.shape, *b.shape))
def batched_product(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    factor: float = 1.0,
    shift: float = 0.0,
    scales: torch.Tensor | None = None,
    symmetric: bool = False,
    wide: bool = False,
) -> torch.Tensor:
    """``scale (factor A B + shift I)`` for each pair of matrices, in the parts that A and B are in.

    A (parts, batch, m, k) is float16 or bfloat16, as :func:`split` makes it; so is B, or its transpose.
    ``scales`` (batch,) are float32. ``symmetric`` says that the result is known to be symmetric, and ``wide``
    that it is returned in float32, shape (1, batch, m, n), and not in parts.

    Examples
    --------
    >>> a = split(torch.tensor([[[1.0, 2.0], [2.0, 5.0]]]), torch.float16)
    >>> joined(batched_product(a, a, factor=0.5, shift=-1.0, symmetric=True))
    tensor([[[ 1.5000,  6.0000],
             [ 6.0000, 13.5000]]])
    """
    dtype = torch.float32 if len(a) == 1 else torch.float64
    product = factor * (joined(a, dtype) @ joined(b, dtype))
    if shift:
        product.diagonal(dim1=1, dim2=2).add_(shift)
    if scales is not None:
        product *= scales[:, None, None]
    return product.float()[None] if wide else split(product.float(), a.dtype, len(a))


@kernel("split_triton", trial=_tried, when=lambda x, *_, **__: 0 not in x.shape)
def split(
    x: torch.Tensor,
    dtype: torch.dtype,
    parts: int = 1,
    scales: torch.Tensor | None = None,
    factor: float = 1.0,
) -> torch.Tensor:
    """Numbers (batch, m, n) in one part or two of half precision, as a GPU reads them in one pass: rows
    contiguous, with room between them where n is not a multiple of :data:`ALIGNED`.

    Matrices are first multiplied by ``scales`` (batch,), in the dtype of x, at least float32, then by
    ``factor``: elements are then below the largest of the dtype.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if scales is not None:  # one after the other: together they may be out of range
        x = (x * scales[:, None, None]) * factor
    out = padded_empty(parts, *x.shape, dtype=dtype, device=x.device)
    out[0] = x.float()
    if parts == 2:
        out[1] = (x.float() - out[0].float()) * 2.0**SHIFT
    return out


@kernel(
    "joined_triton",
    trial=_tried,
    when=lambda parts, dtype=torch.float32: (
        len(parts) == 2 and dtype == torch.float32 and 0 not in parts.shape
    ),
)
def joined(parts: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers that parts stand for, shape (batch, m, n)."""
    leading = parts[0].to(dtype)
    return leading if len(parts) == 1 else leading + parts[1].to(dtype) * 2.0**-SHIFT


def padded_empty(
    parts: int, batch: int, m: int, n: int, *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Uninitialized, with aligned rows."""
    across = -(-n // ALIGNED) * ALIGNED
    return torch.empty(parts, batch, m, across, dtype=dtype, device=device)[..., :n]


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


def batched_product_triton(a, b, *, factor=1.0, shift=0.0, scales=None, symmetric=False, wide=False):
    (parts, batch, m, k), n = a.shape, b.shape[3]
    config = _config(m, n, parts, symmetric and a.is_cuda, on_gpu=a.is_cuda)
    out = padded_empty(
        1 if wide else parts, batch, m, n, dtype=torch.float32 if wide else a.dtype, device=a.device
    )
    by_columns = b.stride(2) == 1 and b.stride(3) != 1
    b_block = [config.columns, config.run] if by_columns else [config.run, config.columns]
    descriptors = (
        *_descriptors(a, [config.rows, config.run]),
        *_descriptors(b.mT if by_columns else b, b_block),
        *_descriptors(a if wide else out, [config.rows, config.columns]),
    )
    down, across = ceil_div(m, config.rows), ceil_div(n, config.columns)
    tiles = down * (down + 1) // 2 if symmetric else down * across
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


TILE = 64


def split_triton(x, dtype, parts=1, scales=None, factor=1.0):
    batch, m, n = x.shape
    out = padded_empty(parts, batch, m, n, dtype=dtype, device=x.device)
    down, across = ceil_div(m, TILE), ceil_div(n, TILE)
    # The second and third index of a grid end at 65535.
    _split_kernel[(batch * down * across,)](
        *(x, x if scales is None else scales, out, factor, m, n, down, across),
        *(*x.stride(), *out.stride()[:3], SHIFT, parts, scales is not None, x.dtype == torch.float64),
        TILE,
    )
    return out


def joined_triton(parts, dtype=torch.float32):
    _, batch, m, n = parts.shape
    out = torch.empty(batch, m, n, dtype=dtype, device=parts.device)
    down, across = ceil_div(m, TILE), ceil_div(n, TILE)
    _joined_kernel[(batch * down * across,)](parts, out, m, n, down, across, *parts.stride(), SHIFT, TILE)
    return out


@jit
def place_of_tile(m, n, down, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Which matrix this thread block has, rows and columns of its tile, and which of them there are."""
    batch, tile = (tl.program_id(0) // (down * across)).to(tl.int64), tl.program_id(0) % (down * across)
    i = ((tile // across) * ROWS + tl.arange(0, ROWS))[:, None]
    j = ((tile % across) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    return batch, i.to(tl.int64), j.to(tl.int64), (i < m) & (j < n)


@jit(do_not_specialize=["m", "n", "down", "across", "x_batch", "out_part", "out_batch", "out_row"])
def _split_kernel(
    x, scales, out, factor, m, n, down, across, x_batch, x_row, x_column, out_part, out_batch, out_row,
    SHIFT: tl.constexpr, PARTS: tl.constexpr, SCALED: tl.constexpr, DOUBLE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    batch, i, j, inside = place_of_tile(m, n, down, across, TILE, TILE)
    value = tl.load(x + batch * x_batch + i * x_row + j * x_column, mask=inside, other=0.0)
    value = value.to(tl.float64 if DOUBLE else tl.float32)
    if SCALED:
        # One factor after the other: together they may be out of range.
        value = value * tl.load(scales + batch) * factor
    value = value.to(tl.float32)
    first = value.to(out.dtype.element_ty)
    target = out + batch * out_batch + i * out_row + j
    tl.store(target, first, mask=inside)
    if PARTS == 2:
        rest = ((value - first.to(tl.float32)) * (1 << SHIFT)).to(first.dtype)
        tl.store(target + out_part, rest, mask=inside)


@jit(do_not_specialize=["m", "n", "down", "across", "part", "batch_step"])
def _joined_kernel(
    parts, out, m, n, down, across, part, batch_step, row, column, SHIFT: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    batch, i, j, inside = place_of_tile(m, n, down, across, TILE, TILE)
    source = parts + batch * batch_step + i * row + j * column
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    rest = tl.load(source + part, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + (batch * m + i) * n + j, first + rest * (1.0 / (1 << SHIFT)), mask=inside)
