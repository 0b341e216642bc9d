"""Orthogonalize a matrix against a few orthonormal columns, in float32 accuracy.

On a GPU in fp16 with error correction: elements are split where they are used, so that nothing is written but
the results. Scales are fixed: columns of Q have norm 1, and those of A were scaled to elements of about 1.
Overflow shows in the certificate. Sums on the unit are short, and are added outside of it (``gemm``).
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import ceil_div, elements_at_a_time, multiprocessors, share
from neula.kernels.precision import exact_matmul
from neula.kernels.products.gemm import RUN, Total
from neula.kernels.products.parts_triton import product_of_parts, split
from neula.kernels.qr.tall import sum_of_blocks
from neula.kernels.triton_source import jit, tl

MAX_COLUMNS = 512
"""Up to how many columns on either side the kernels are better than products of whole matrices."""


@trial("The kernels of projections", "library calls take their place")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, dtype=torch.float32, device=device)
    project_out.kernel(one, one.clone(), one.clone())


def _narrow(q: torch.Tensor, a: torch.Tensor, r: torch.Tensor, total: Total | None = None) -> bool:
    """Few columns, all of them contiguous, in float32."""
    narrow = max(q.shape[1], a.shape[1]) <= MAX_COLUMNS and q.stride(0) == a.stride(0) == 1
    return narrow and q.dtype == a.dtype == torch.float32


@kernel("project_out_triton", trial=_tried, when=_narrow)
def project_out(q: torch.Tensor, a: torch.Tensor, r: torch.Tensor, total: Total | None = None) -> None:
    """``R = Q^H A``, then ``A = A - Q R``, on a GPU by Triton kernels in fp16 with error correction.

    Q (m, k) has elements of at most 1 in magnitude: orthonormal columns, or nearly; columns of A (m, n) are
    scaled to elements of about 1. ``total`` is called with R before A is changed, where Q and A are some rows
    of theirs.
    """
    r.copy_(exact_matmul(q.mH, a))
    if total is not None:
        total(r)
    a.sub_(exact_matmul(q, r))


WIDTH = 128
"""Columns of a block."""

ROWS = 128
"""Rows of a block of the difference."""

Q_SCALE, A_SCALE = 2.0**14, 2.0**6
"""Elements of A and R may be up to 1023: more than the norm of a column of 2^19 rows."""


def project_out_triton(q, a, r, total=None):
    (m, k), n = q.shape, a.shape[1]
    vector = min(elements_at_a_time(q), elements_at_a_time(a))
    tiles = (ceil_div(k, WIDTH), ceil_div(n, WIDTH))
    pieces = max(1, min(multiprocessors(a.device) // (tiles[0] * tiles[1]), ceil_div(m, RUN)))
    chunk = share(m, pieces, RUN)
    parts = torch.empty(ceil_div(m, chunk), n, k, dtype=torch.float32, device=a.device)
    _coefficients[(len(parts), *tiles)](
        *(q, a, parts, m, k, n, chunk, q.stride(1), a.stride(1)),
        *(RUN, WIDTH, 3 if vector > 1 else 1, vector, Q_SCALE, A_SCALE),
        num_warps=8,
    )
    sum_of_blocks(parts, r.mT)
    if total is not None:
        total(r)
    _subtract[(ceil_div(m, ROWS), tiles[1])](
        *(q, r, a, m, k, n, q.stride(1), *r.stride(), a.stride(1)),
        *(ROWS, WIDTH, RUN, 2 if vector > 1 else 1, vector, Q_SCALE, A_SCALE),
        num_warps=8,
    )


@jit(do_not_specialize=["m", "k", "n", "chunk"])
def _coefficients(
    q, a, parts, m, k, n, chunk, q_column, a_column,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr, VECTOR: tl.constexpr,
    Q_SCALE: tl.constexpr, A_SCALE: tl.constexpr,
):  # fmt: skip
    """Partial sums of a block of ``Q^T A`` over some rows."""
    # Multiples of VECTOR, as the compiler has to see to move so many elements at a time.
    m, q_column, a_column = m // VECTOR * VECTOR, q_column // VECTOR * VECTOR, a_column // VECTOR * VECTOR
    chunk = chunk // ROWS * ROWS
    first = tl.program_id(0).to(tl.int64) * chunk
    last = tl.minimum(first + chunk, m)
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, WIDTH)
    x_column, y_column = tl.program_id(1) * WIDTH + j, tl.program_id(2) * WIDTH + j
    x_place = q + x_column.to(tl.int64)[None, :] * q_column
    y_place = a + y_column.to(tl.int64)[None, :] * a_column
    total = tl.zeros((WIDTH, WIDTH), tl.float32)
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + i
        x = tl.load(x_place + row, mask=(row < last) & (x_column < k)[None, :], other=0.0)
        y = tl.load(y_place + row, mask=(row < last) & (y_column < n)[None, :], other=0.0)
        x_high, x_low = split(x * Q_SCALE, tl.float16)
        y_high, y_low = split(y * A_SCALE, tl.float16)
        # By an ordinary addition, rounded to nearest: the matrix unit truncates.
        total += product_of_parts(tl.trans(x_high), tl.trans(x_low), y_high, y_low)
    parts += tl.program_id(0).to(tl.int64) * k * n
    inside = (x_column < k)[:, None] & (y_column < n)[None, :]
    total *= 1.0 / (Q_SCALE * A_SCALE)
    tl.store(parts + x_column[:, None] + y_column[None, :] * k, total, mask=inside)


@jit(do_not_specialize=["m", "k", "n"])
def _subtract(
    q, r, a, m, k, n, q_column, r_row, r_column, a_column,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, RUN: tl.constexpr, STAGES: tl.constexpr, VECTOR: tl.constexpr,
    Q_SCALE: tl.constexpr, R_SCALE: tl.constexpr,
):  # fmt: skip
    """A block of ``A - Q R``."""
    m, q_column, a_column = m // VECTOR * VECTOR, q_column // VECTOR * VECTOR, a_column // VECTOR * VECTOR
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    j = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    l = tl.arange(0, RUN)  # noqa: E741
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in tl.range(0, k, RUN, num_stages=STAGES):
        column = start + l
        x_place = q + i + column.to(tl.int64)[None, :] * q_column
        x = tl.load(x_place, mask=(i < m) & (column < k)[None, :], other=0.0)
        w_place = r + column.to(tl.int64)[:, None] * r_row + j.to(tl.int64) * r_column
        w = tl.load(w_place, mask=(column < k)[:, None] & (j < n), other=0.0)
        x_high, x_low = split(x * Q_SCALE, tl.float16)
        w_high, w_low = split(w * R_SCALE, tl.float16)
        total += product_of_parts(x_high, x_low, w_high, w_low)
    place = a + i + j.to(tl.int64) * a_column
    inside = (i < m) & (j < n)
    y = tl.load(place, mask=inside, other=0.0)
    tl.store(place, y - total * (1.0 / (Q_SCALE * R_SCALE)), mask=inside)
