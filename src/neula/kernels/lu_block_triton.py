r"""LU of a diagonal block by one thread block, and the solution of what lies beside it by all of them.

*Factorization* of r x r: a chain of r steps, each with a division, whatever the GPU can do: ``2/3 r^3`` flops
and the bytes are nothing beside that. So it runs beside the products that update the rest of the panel.

A leaf of 16 columns stays in registers, bordered by identities: elimination in ``[[A, I], [I, 0]]`` leaves
``[[L \\ U, L^-1], [U^-1, ...]]``, so that both inverses cost no steps of their own. Beyond it there are
only products, each of which takes 3 to 4 microseconds on an H200, however small it is.

*Solution* of m x r: ``2 m r^2`` flops and ``4 m r`` bytes, for r = 512 256 flops a byte: a thread block goes
through its rows from left to right. 32768 x 512 take 0.07 ms; the bytes need 0.016, the flops 0.03.
"""

# Triton knows the sum of tuples, not their unpacking.
# ruff: noqa: RUF005
# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from neula.kernels.lu_block import WIDTH
from neula.kernels.parts_triton import product_of_parts, remainder

LEAF = 16
"""Columns that are eliminated in registers."""

DEPTH = 64
"""Products that are summed at a time."""

ROWS = 128
"""Rows that a thread block solves for at a time."""

PRECISION = "tf32x3"
"""Of products inside the block: three products of parts, about as accurate as single precision."""

FACTOR_WARPS, SOLVE_WARPS, STAGES = 4, 8, 3


def factor_block_triton(block: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`neula.kernels.lu_block.factor_block` by the kernels, queued on the current stream."""
    r = block.shape[0]
    inverses = block.new_empty(2, triton.cdiv(r, width), width, width, dtype=torch.float32)
    small = block.new_empty(2, LEAF, LEAF, dtype=torch.float32)
    work = block.new_empty(width, width, dtype=torch.float32)
    with torch.cuda.device_of(block):
        for start in range(0, r, width):
            wide = inverses[:, start // width]
            _factor_kernel[(1,)](
                *(block, *block.stride(), wide, wide.stride(0), small, work, start, r),
                *(width, LEAF, DEPTH, PRECISION, STAGES),
                num_warps=FACTOR_WARPS,
            )
            if start + width < r:
                _strip_kernel[(triton.cdiv(r - start - width, ROWS), 2)](
                    *(block, *block.stride(), wide, wide.stride(0), start, r),
                    *(ROWS, width, DEPTH, _low(block), STAGES),
                    num_warps=SOLVE_WARPS,
                )
    # The kernels store them by columns.
    return inverses[0].mT, inverses[1].mT


def solve_upper_triton(b: torch.Tensor, upper: torch.Tensor, inverses: torch.Tensor) -> torch.Tensor:
    """:func:`neula.kernels.lu_block.solve_upper` by the kernel, queued on the current stream."""
    (m, r), width = b.shape, inverses.shape[-1]
    with torch.cuda.device_of(b):
        _solve_kernel[(triton.cdiv(m, ROWS),)](
            *(b, *b.stride(), upper, *upper.stride(), inverses, *inverses.stride(), m, r),
            # Products with narrow inverses cost little, also in full precision.
            *(ROWS, width, DEPTH, _low(b) if width == WIDTH else tl.float32, STAGES),
            num_warps=SOLVE_WARPS,
        )
    return b


def _low(block: torch.Tensor) -> object:
    """The format of the parts in products with inverses, which have the range of single precision."""
    # The interpreter cannot multiply in bf16.
    return tl.bfloat16 if block.is_cuda else tl.float16


@triton.jit
def products(
    a, a_row, a_column, b, b_row, b_column, i, j, rows, columns, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum of the first ``depth`` products of rows i of A with columns j of B."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, depth, DEPTH, num_stages=STAGES):
        k = start + tl.arange(0, DEPTH).to(tl.int64)
        more = k < depth
        left = tl.load(
            a + i[:, None] * a_row + k[None, :] * a_column,
            mask=(i < rows)[:, None] & more[None, :],
            other=0.0,
        )
        right = tl.load(
            b + k[:, None] * b_row + j[None, :] * b_column,
            mask=more[:, None] & (j < columns)[None, :],
            other=0.0,
        )
        total = tl.dot(left, right, total)
    return total


@triton.jit
def _product(a, b, LOW: tl.constexpr):
    """``A B`` of float32 matrices, as they are, or in two parts of 8 bits each, which hides behind fp16."""
    if LOW == tl.float32:  # noqa: SIM300
        return tl.dot(a, b, input_precision="tf32x3")
    a_high, b_high = a.to(LOW), b.to(LOW)
    a_low, b_low = remainder(a, a_high, 1.0), remainder(b, b_high, 1.0)
    return product_of_parts(a_high, a_low, b_high, b_low)


@triton.jit
def _solve_rows(
    b, b_row, b_column, u, u_row, u_column, inverse, i, j, rows, columns, done,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, LOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``X U = B`` for rows i and columns j, those to the left being ``done``."""
    place = b + i[:, None] * b_row + j[None, :] * b_column
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    known = products(
        b, b_row, b_column, u, u_row, u_column, i, j, rows, columns, done, ROWS, WIDTH, DEPTH, STAGES
    )
    rest = tl.load(place, mask=inside, other=0.0).to(tl.float32) - known
    tl.store(place, _product(rest, inverse, LOW).to(b.dtype.element_ty), mask=inside)


@triton.jit
def _solve_kernel(
    b, b_row, b_column, u, u_row, u_column, inverses, stride_inverse, inverse_row, inverse_column, m, r,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, LOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``X U = B`` for some rows of B, in place."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w = tl.arange(0, WIDTH).to(tl.int64)
    inverse = inverses + w[:, None] * inverse_row + w[None, :] * inverse_column
    for start in range(0, r, WIDTH):
        j = start + w
        _solve_rows(
            b, b_row, b_column, u, u_row, u_column, tl.load(inverse), i, j, m, r, start, ROWS, WIDTH,
            DEPTH, LOW, STAGES,
        )  # fmt: skip
        inverse += stride_inverse
        # A barrier: the next products read what other threads have stored.
        tl.debug_barrier()


@triton.jit
def _strip_kernel(
    a, a_row, a_column, inverses, stride_u, start, r,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, LOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some rows of L below, or columns of U to the right of a block on the diagonal."""
    i = start + WIDTH + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w = tl.arange(0, WIDTH)
    j = start + w.to(tl.int64)
    if tl.program_id(1) == 0:
        inverse = tl.load(inverses + stride_u + w[:, None] + w[None, :] * WIDTH)
        _solve_rows(
            a, a_row, a_column, a, a_row, a_column, inverse, i, j, r, r, start, ROWS, WIDTH, DEPTH, LOW,
            STAGES,
        )  # fmt: skip
    else:
        inverse = tl.load(inverses + w[None, :] + w[:, None] * WIDTH)
        _solve_rows(
            a, a_column, a_row, a, a_column, a_row, inverse, i, j, r, r, start, ROWS, WIDTH, DEPTH, LOW,
            STAGES,
        )  # fmt: skip


@triton.jit
def _factor_kernel(
    a, a_row, a_column, inverses, stride_u, small, work, start, r,
    WIDTH: tl.constexpr, LEAF: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """``L U = A`` for a block on the diagonal, in place, with the inverses of both.

    Elimination in ``[[A, I], [I, 0]]`` by leaves. As soon as rows of U and columns of L are known they leave
    for A, and the inverses take their places: that of L below the diagonal, where the operations on rows go
    on, that of U above it, where those on columns do.
    """
    w = tl.arange(0, WIDTH)
    v = tl.arange(0, LEAF)
    j = start + w.to(tl.int64)
    tile = work + w[:, None] + w[None, :] * WIDTH
    inside = (j < r)[:, None] & (j < r)[None, :]
    place = a + j[:, None] * a_row + j[None, :] * a_column
    known = products(a, a_row, a_column, a, a_row, a_column, j, j, r, r, start, WIDTH, WIDTH, DEPTH, STAGES)
    block = tl.load(place, mask=inside, other=0.0).to(tl.float32) - known
    # Beyond the last row and column the block is bordered by an identity.
    tl.store(tile, tl.where(inside, block, tl.where(w[:, None] == w[None, :], 1.0, 0.0)))
    leaf = v[:, None] + v[None, :] * LEAF
    for first in range(0, WIDTH, LEAF):
        corner = work + first * WIDTH + first + v[:, None] + v[None, :] * WIDTH
        k = start + first + v.to(tl.int64)
        tl.debug_barrier()
        _eliminate(work + first * WIDTH + first, small, small + LEAF * LEAF, WIDTH, LEAF)
        tl.debug_barrier()
        lower, upper = tl.load(small + leaf), tl.load(small + LEAF * LEAF + leaf)
        factors = tl.load(corner)
        here, beyond = (w >= first) & (w < first + LEAF), w >= first + LEAF
        diagonal = tl.where(w[:, None] == (first + v)[None, :], 1.0, 0.0)
        columns = tl.load(work + w[:, None] + (first + v)[None, :] * WIDTH)
        columns = tl.dot(tl.where(here[:, None], diagonal, columns), upper, input_precision=PRECISION)
        diagonal = tl.where((first + v)[:, None] == w[None, :], 1.0, 0.0)
        rows = tl.load(work + (first + v)[:, None] + w[None, :] * WIDTH)
        rows = tl.dot(lower, tl.where(here[None, :], diagonal, rows), input_precision=PRECISION)
        rest = tl.load(tile)
        rest = tl.where(here[:, None] | here[None, :], 0.0, rest)
        rest -= tl.dot(columns, rows, input_precision=PRECISION)
        # A barrier: all threads have read what is overwritten now.
        tl.debug_barrier()
        changed = beyond[:, None] | beyond[None, :]
        tl.store(tile, rest, mask=changed)
        tl.store(work + w[:, None] + (first + v)[None, :] * WIDTH, columns, mask=(w < first)[:, None])
        tl.store(work + (first + v)[:, None] + w[None, :] * WIDTH, rows, mask=(w < first)[None, :])
        tl.store(corner, tl.where(v[:, None] > v[None, :], lower, upper))
        low = a.dtype.element_ty
        known_leaf = (k < r)[:, None] & (k < r)[None, :]
        tl.store(a + k[:, None] * a_row + k[None, :] * a_column, factors.to(low), mask=known_leaf)
        below = (beyond & (j < r))[:, None] & (k < r)[None, :]
        tl.store(a + j[:, None] * a_row + k[None, :] * a_column, columns.to(low), mask=below)
        right = (k < r)[:, None] & (beyond & (j < r))[None, :]
        tl.store(a + k[:, None] * a_row + j[None, :] * a_column, rows.to(low), mask=right)
    tl.debug_barrier()
    both = tl.load(tile)
    tile = w[:, None] + w[None, :] * WIDTH
    identity = tl.where(w[:, None] == w[None, :], 1.0, 0.0)
    tl.store(inverses + tile, tl.where(w[:, None] > w[None, :], both, identity))
    tl.store(inverses + stride_u + tile, tl.where(w[:, None] <= w[None, :], both, 0.0))


@triton.jit
def _eliminate(a, l_inverse, u_inverse, WIDTH: tl.constexpr, LEAF: tl.constexpr):
    """Elimination in a leaf bordered by identities, one column after the other.

    Each column is a vector of its own, so that a warp has an element of it in each thread and all columns in
    registers: an element reaches the others by a shuffle. All warps do the same.
    """
    i = tl.arange(0, LEAF)
    columns, below, right = (), (), ()
    for k in tl.static_range(LEAF):
        unit = tl.where(i == k, 1.0, 0.0)
        columns = columns + (tl.load(a + i + k * WIDTH),)
        below, right = below + (unit,), right + (unit,)
    for j in tl.static_range(LEAF):
        here = i * 0 + j
        reciprocal = 1.0 / tl.gather(columns[j], here, 0)
        factors = tl.where(i > j, columns[j] * reciprocal, 0.0)
        u_column = below[j] * reciprocal
        new_columns, new_below, new_right = (), (), ()
        for k in tl.static_range(LEAF):
            if k > j:
                row = tl.gather(columns[k], here, 0)
                new_columns = new_columns + (columns[k] - factors * row,)
                new_below = new_below + (below[k] - u_column * row,)
                new_right = new_right + (right[k],)
            elif k == j:
                new_columns = new_columns + (tl.where(i > j, factors, columns[k]),)
                new_below = new_below + (u_column,)
                new_right = new_right + (right[k] - factors,)
            else:
                new_columns = new_columns + (columns[k],)
                new_below = new_below + (below[k],)
                new_right = new_right + (right[k] - factors * tl.gather(right[k], here, 0),)
        columns, below, right = new_columns, new_below, new_right
    # A barrier: all threads have read what is overwritten now.
    tl.debug_barrier()
    for k in tl.static_range(LEAF):
        tl.store(a + i + k * WIDTH, columns[k])
        tl.store(u_inverse + i + k * LEAF, below[k])
        tl.store(l_inverse + i + k * LEAF, right[k])
