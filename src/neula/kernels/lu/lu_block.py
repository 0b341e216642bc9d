r"""LU factorization of a small block without pivoting, and of panels with the inverses of its triangles.

Panels are solved with these inverses: products are what is fast. A block of 128 x 128 is 128 pivots one after
the other, each of which needs a tenth of a microsecond: 30 us on an H200 with both inverses, which other
warps find meanwhile, in CUDA C++ for the reasons of :mod:`neula.kernels.cholesky.cholesky`. It runs
concurrently with the products that update the rest of the panel.

The solution of m x r takes ``2 m r^2`` flops and ``4 m r`` bytes: a thread block goes through its rows from
left to right. 32768 x 512 take 0.07 ms; the bytes need 0.016, the flops 0.03.
"""

from __future__ import annotations

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import ceil_div
from neula.kernels.precision import exact_matmul
from neula.kernels.products.parts_triton import product_of_parts, split
from neula.kernels.triangular_inverse import triangular_inverses
from neula.kernels.triton_source import jit, tl

LEAF = 16
"""Columns at which the recursion of the reference stops."""

WIDTH = 128
"""Inner panels that the kernels have."""


def lu_unpivoted(block: torch.Tensor) -> torch.Tensor:
    """Overwrite a square block, float32 or float64, with its factors: U, and L below the diagonal.

    It never waits for the device: a zero pivot stays on the diagonal, and what is divided by it is NaN or
    Inf.

    Examples
    --------
    >>> lu_unpivoted(torch.tensor([[2.0, 4.0], [1.0, 5.0]]))
    tensor([[2.0000, 4.0000],
            [0.5000, 3.0000]])
    """
    if not block.is_cuda:
        return lu_unpivoted_reference(block)
    if block.T.is_contiguous():  # as the library has it: in its place
        pivots, info = (block.new_empty(shape, dtype=torch.int32) for shape in (len(block), ()))
        torch.linalg.lu_factor_ex(block, pivot=False, out=(block, pivots, info))
        return block
    return block.copy_(torch.linalg.lu_factor_ex(block, pivot=False).LU)


def lu_unpivoted_reference(block: torch.Tensor) -> torch.Tensor:
    """:func:`lu_unpivoted` in plain torch, on any device: recursive down to :data:`LEAF` columns."""
    n = block.shape[0]
    if n <= LEAF:
        for j in range(n - 1):
            column = block[j + 1 :, j]
            column /= block[j, j].clone()
            block[j + 1 :, j + 1 :].addr_(column, block[j, j + 1 :], alpha=-1)
        return block
    k = n // 2
    lu_unpivoted_reference(block[:k, :k])
    factors, right, below = block[:k, :k], block[:k, k:], block[k:, :k]
    right.copy_(torch.linalg.solve_triangular(factors, right, upper=False, unitriangular=True))
    below.copy_(torch.linalg.solve_triangular(factors, below, upper=True, left=False))
    # In double: no switch for float32 products has a say.
    wide = torch.promote_types(block.dtype, torch.float64)
    block[k:, k:] -= (below.to(wide) @ right.to(wide)).to(block.dtype)
    lu_unpivoted_reference(block[k:, k:])
    return block


@trial("The kernels for blocks of LU", "many calls of the library take their place, several times slower")
def _tried(device: torch.device) -> None:
    block = torch.eye(WIDTH + 1, dtype=torch.float16, device=device)
    solve_off_diagonal.kernel(block, WIDTH, *factor_block.kernel(block[:WIDTH, :WIDTH], WIDTH))


def kernels_take(dtype: torch.dtype, device: torch.device, width: int) -> bool:
    """Whether :func:`factor_block` and :func:`solve_off_diagonal` have kernels for a matrix and panel."""
    return dtype.itemsize == 2 and width == WIDTH and factor_block.runs(device)


@kernel(
    "factor_diagonal_cuda",
    trial=_tried,
    when=lambda work, out, *_: out.dtype.itemsize == 2 and len(work) == WIDTH,
)
def factor_diagonal(
    work: torch.Tensor, out: torch.Tensor, l_inverse: torch.Tensor, u_inverse: torch.Tensor
) -> None:
    """Factors of one block, and their inverses, without synchronizing.

    ``work`` (width, width), float32 and row-major, is the block, bordered by an identity; it may be
    overwritten. U, and L below the diagonal, are written to ``out``, of a low format, and the inverses,
    float32 and column-major, to the others.
    """
    n = len(out)
    factors = lu_unpivoted_reference(work)
    out.copy_(factors[:n, :n])
    for inverse, found in zip((l_inverse, u_inverse), triangular_inverses(factors), strict=True):
        inverse.copy_(found)


@kernel(
    "factor_block_triton",
    trial=_tried,
    when=lambda block, width: block.dtype.itemsize == 2 and width == WIDTH,
)
def factor_block(block: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Overwrite a block of a low format with its factors, by inner panels in float32 (Lopez and Mary,
    Algorithm 5.1).

    Returns float32 inverses of the triangles on the diagonal, ``l_inverses`` and ``u_inverses`` (ceil(r /
    width), width, width), before they were rounded. Where r is no multiple of the width, the last ones are
    bordered by an identity.
    """
    r = block.shape[0]
    inverses = block.new_empty(2, -(-r // width), width, width, dtype=torch.float32)
    for start in range(0, r, width):
        k, done, rest = slice(start, start + width), slice(0, start), slice(start + width, None)
        work = torch.eye(width, dtype=torch.float32, device=block.device)
        diagonal, (l_inverse, u_inverse) = block[k, k], inverses[:, start // width]
        n = len(diagonal)
        work[:n, :n] = diagonal.float() - _wide_product(block[k, done], block[done, k])
        below = block[rest, k].float() - _wide_product(block[rest, done], block[done, k])
        right = block[k, rest].float() - _wide_product(block[k, done], block[done, rest])
        factor_diagonal.reference(work, diagonal, l_inverse, u_inverse)
        block[rest, k] = exact_matmul(below, u_inverse[:n, :n]).to(block.dtype)
        block[k, rest] = exact_matmul(l_inverse[:n, :n], right).to(block.dtype)
    return inverses[0], inverses[1]


@kernel(
    "solve_upper_triton",
    trial=_tried,
    when=lambda b, upper, inverses: (
        b.numel() > 0 and b.dtype.itemsize == 2 and inverses.shape[-1] in (32, WIDTH)
    ),
)
def solve_upper(b: torch.Tensor, upper: torch.Tensor, inverses: torch.Tensor) -> torch.Tensor:
    """``X U = B`` in place; with ``b.T``, ``lower.T`` and ``l_inverses.mT`` it is ``L X = B``.

    B (m, r) and U (r, r) are of one low format; only what is above the blocks on the diagonal is read of U,
    whose inverses are from :func:`factor_block`; on a GPU a kernel takes 32 or :data:`WIDTH` columns.
    """
    if b.numel() == 0:
        return b
    for index, columns in enumerate(b.split(inverses.shape[-1], 1)):
        start, n = index * inverses.shape[-1], columns.shape[1]
        rest = columns.float() - _wide_product(b[:, :start], upper[:start, start : start + n])
        columns.copy_(exact_matmul(rest, inverses[index, :n, :n]))
    return b


@kernel(
    "solve_off_diagonal_triton",
    trial=_tried,
    when=lambda a, r, l_inverses, u_inverses: (
        r < len(a) and a.dtype.itemsize == 2 and l_inverses.shape[-1] == WIDTH
    ),
)
def solve_off_diagonal(
    a: torch.Tensor, r: int, l_inverses: torch.Tensor, u_inverses: torch.Tensor
) -> torch.Tensor:
    """``X U = B`` below a leading block of order r that is factorized, and ``L X = B`` to the right of it, in
    place, with the inverses from :func:`factor_block`.
    """
    factors, below, right = a[:r, :r], a[r:, :r], a[:r, r:]
    solve_upper.reference(below, factors, u_inverses)
    solve_upper.reference(right.T, factors.T, l_inverses.mT)
    return a


def _wide_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return exact_matmul(a.float(), b.float())


THREADS = 512

SHARED_BYTES = 4 * (128 * 132 + 128 * 20 + 16 * 132 + 16 * 20 + 4 * 64)
"""The block, what a step of 16 columns computes, and rows on their way."""


def factor_diagonal_cuda(work, out, l_inverse, u_inverse):
    macros = "#define BFLOAT16\n" if out.dtype == torch.bfloat16 else ""
    kernel = compiled("lu_block", "lu_block", work.device, macros, shared_bytes=SHARED_BYTES)
    arguments = [work, out, l_inverse, u_inverse, len(out), *out.stride()]
    kernel((1, 1, 1), (THREADS, 1, 1), arguments, SHARED_BYTES)


DEPTH = 64
"""Products that are summed at a time."""

ROWS = 128
"""Rows that a thread block solves for at a time."""

TILE = 64
"""Rows and columns of a diagonal block that a thread block updates."""

STRIP = 64
"""Rows next to a diagonal block that a thread block solves for: few, so that the next one waits not long."""

PRECISION = "tf32x3"
"""Of products with inverses where those are narrow: three products of parts, about as accurate as single
precision."""

FACTOR_WARPS, SOLVE_WARPS, STAGES = 4, 8, 3


def factor_block_triton(block, width):
    r = block.shape[0]
    # Column-major.
    inverses = block.new_empty(2, ceil_div(r, width), width, width, dtype=torch.float32).mT
    work = block.new_empty(width, width, dtype=torch.float32)
    # The interpreter has no CUDA.
    factor = factor_diagonal.kernel if block.is_cuda else factor_diagonal.reference
    for index, start in enumerate(range(0, r, width)):
        k, (l_inverse, u_inverse) = slice(start, start + width), inverses[:, index : index + 1]
        _diagonal_kernel[(width // TILE, width // TILE)](
            *(block, *block.stride(), work, start, r, TILE, width, DEPTH, STAGES), num_warps=FACTOR_WARPS
        )
        factor(work, block[k, k], l_inverse[0], u_inverse[0])
        if start + width < r:
            _solve_off_diagonal(block, start, start + width, l_inverse, u_inverse, STRIP)
    return inverses[0], inverses[1]


def solve_off_diagonal_triton(a, r, l_inverses, u_inverses):
    _solve_off_diagonal(a, 0, r, l_inverses, u_inverses, ROWS)
    return a


def _solve_off_diagonal(
    a: torch.Tensor, first: int, stop: int, l_inverses: torch.Tensor, u_inverses: torch.Tensor, rows: int
) -> None:
    """Below and to the right of blocks on the diagonal, to the left of which all is done."""
    n, width = len(a), l_inverses.shape[-1]
    _off_diagonal_kernel[(ceil_div(n - stop, rows), 2)](
        *(a, *a.stride(), l_inverses, *l_inverses.stride(), u_inverses, *u_inverses.stride()),
        *(first, stop, n, rows, width, DEPTH, _low(a), STAGES),
        num_warps=SOLVE_WARPS,
    )


def solve_upper_triton(b, upper, inverses):
    (m, r), width = b.shape, inverses.shape[-1]
    _solve_kernel[(ceil_div(m, ROWS),)](
        *(b, *b.stride(), upper, *upper.stride(), inverses, *inverses.stride(), m, r),
        # Products with narrow inverses cost little, also in full precision.
        *(ROWS, width, DEPTH, _low(b) if width == WIDTH else torch.float32, STAGES),
        num_warps=SOLVE_WARPS,
    )
    return b


def _low(block: torch.Tensor) -> object:
    """The format of the parts in products with inverses, which have the range of single precision."""
    # The interpreter cannot multiply in bf16.
    return torch.bfloat16 if block.is_cuda else torch.float16


@jit
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


@jit
def _product(a, b, LOW: tl.constexpr):
    """``A B`` of float32 matrices, as they are, or in two parts of 8 bits each, which hides behind fp16."""
    if LOW == tl.float32:  # noqa: SIM300
        return tl.dot(a, b, input_precision="tf32x3")
    a_high, a_low = split(a, LOW)
    b_high, b_low = split(b, LOW)
    return product_of_parts(a_high, a_low, b_high, b_low)


@jit
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


@jit
def _solve_columns(
    b, b_row, b_column, u, u_row, u_column, inverse, next_inverse, i, m, first, stop,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, LOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``X U = B`` for rows i and some columns, from left to right."""
    for start in range(first, stop, WIDTH):
        j = start + tl.arange(0, WIDTH).to(tl.int64)
        _solve_rows(
            b, b_row, b_column, u, u_row, u_column, tl.load(inverse), i, j, m, stop, start, ROWS, WIDTH,
            DEPTH, LOW, STAGES,
        )  # fmt: skip
        inverse += next_inverse
        # A barrier: the next products read what other threads have stored.
        tl.debug_barrier()


@jit
def _solve_kernel(
    b, b_row, b_column, u, u_row, u_column, inverses, next_inverse, inverse_row, inverse_column, m, r,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, LOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``X U = B`` for some rows of B, in place."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w = tl.arange(0, WIDTH).to(tl.int64)
    inverse = inverses + w[:, None] * inverse_row + w[None, :] * inverse_column
    _solve_columns(
        b, b_row, b_column, u, u_row, u_column, inverse, next_inverse, i, m, 0, r, ROWS, WIDTH, DEPTH, LOW,
        STAGES,
    )  # fmt: skip


@jit
def _off_diagonal_kernel(
    a, a_row, a_column, l_inverses, next_l, l_row, l_column, u_inverses, next_u, u_row, u_column, first, stop,
    n,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, LOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some rows of L below, or columns of U to the right of blocks on the diagonal."""
    i = stop + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    w = tl.arange(0, WIDTH)
    if tl.program_id(1) == 0:
        inverse = u_inverses + w[:, None] * u_row + w[None, :] * u_column
        _solve_columns(
            a, a_row, a_column, a, a_row, a_column, inverse, next_u, i, n, first, stop, ROWS, WIDTH,
            DEPTH, LOW, STAGES,
        )  # fmt: skip
    else:
        inverse = l_inverses + w[None, :] * l_row + w[:, None] * l_column
        _solve_columns(
            a, a_column, a_row, a, a_column, a_row, inverse, next_l, i, n, first, stop, ROWS, WIDTH,
            DEPTH, LOW, STAGES,
        )  # fmt: skip


@jit
def _diagonal_kernel(
    a, a_row, a_column, work, start, r,
    TILE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of an updated block on the diagonal, which an identity borders where the matrix ends."""
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row, column = start + i.to(tl.int64), start + j.to(tl.int64)
    known = products(
        a, a_row, a_column, a, a_row, a_column, row, column, r, r, start, TILE, TILE, DEPTH, STAGES
    )
    inside = (row < r)[:, None] & (column < r)[None, :]
    block = tl.load(a + row[:, None] * a_row + column[None, :] * a_column, mask=inside, other=0.0)
    border = tl.where(i[:, None] == j[None, :], 1.0, 0.0)
    tl.store(work + i[:, None] * WIDTH + j[None, :], tl.where(inside, block.to(tl.float32) - known, border))
