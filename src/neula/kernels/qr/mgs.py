"""Modified Gram-Schmidt of many small tiles at once, on a GPU in the registers of one thread block each.

Zhang, Baharlouei, Wu, "High Accuracy Matrix Computations on Neural Engines" (HPDC 2020), section 3.1.3 and
Algorithm 2; in the kernel in the form without square roots of Björck, "Solving linear least squares problems
by Gram-Schmidt orthogonalization" (BIT 7, 1967). With v column k as the steps before have left it, ``W[k, j]
= v^T a_j`` for ``j >= k`` and ``a_j -= v W[k, j] / W[k, k]`` for ``j > k``, and only at the end ``q_k = v /
sqrt(W[k, k])`` and ``R[k, :] = W[k, :] / sqrt(W[k, k])``. One pass over the tile gives the norm and the row
of R, a second one subtracts, and column k needs no pass of its own.

Memory would be the bound if flops were all there is to do. But threads also exchange columns and sums, and
finished columns of a half are swept along: more than five instructions for each multiply-add bound many
tiles, and the latency of n dependent steps fewer tiles than fill the GPU.
"""

from __future__ import annotations

import math

import torch

from neula.kernels.dispatch import kernel
from neula.kernels.launch import next_power_of_2
from neula.kernels.precision import exact_matmul
from neula.kernels.triton_source import jit, tl

# item: Q tiles
TILE_ROWS = 256
TILE_COLUMNS = 32
"""The paper's tile, and the largest one that the registers of a thread block hold well."""

TALLEST_TILE = {torch.float32: 1024, torch.float64: 256}
"""Rows of a tile of 32 columns above which a tree of smaller ones is faster: measured on an H200."""


# item: Q Algorithm 2; V Algorithm 4
def mgs(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """QR of each tile (*batch, m, n) by modified Gram-Schmidt, in the full precision of its dtype, float32 or
    float64.

    Algorithm 2 as it is written, for a batch, by :func:`mgs_into`. Squares of the elements should neither
    overflow nor underflow (float32: columns between 1e-19 and 1e19, or zero).

    A column that vanishes becomes a zero column of Q. R has a nonnegative diagonal: zero where a column
    vanishes, NaN or Inf where the tile holds NaN or Inf, or squares overflow. Other tiles are not affected.

    Examples
    --------
    >>> q, r = mgs(torch.tensor([[0.0, 3.0], [2.0, 5.0]]))
    >>> r
    tensor([[2., 5.],
            [0., 3.]])
    """
    *batch, m, n = tiles.shape
    flat = tiles.reshape(math.prod(batch), m, n)
    q, r = torch.empty_like(flat, memory_format=torch.contiguous_format), flat.new_empty(len(flat), n, n)
    mgs_into(flat, q, r)
    return q.view(tiles.shape), r.view(*batch, n, n)


def _fits_in_place(tiles: torch.Tensor, q: torch.Tensor, r: torch.Tensor, *, twice: bool = False) -> bool:
    if twice and tiles.dtype == torch.float64:  # two launches
        return False
    m, n = tiles.shape[-2:]
    return 0 < m <= TALLEST_TILE.get(tiles.dtype, 0) and n <= TILE_COLUMNS and tiles.numel() > 0


@kernel("mgs_into_triton", when=_fits_in_place)
def mgs_into(tiles: torch.Tensor, q: torch.Tensor, r: torch.Tensor, *, twice: bool = False) -> None:
    """:func:`mgs` of tiles (batch, m, n) with the place for Q, which may be the tiles themselves, and R; on a
    GPU by a kernel, one thread block a tile (up to 1024 x 32 in float32, 256 x 32 in float64).

    ``twice``: factorize Q once more, so that it becomes orthonormal to the working precision where the tile
    has full rank (*twice is enough*), and return the product of both R.
    """
    if twice:
        first = r.new_empty(r.shape)
        mgs_into(tiles, q, first)
        mgs_into(q, q, r)
        r.copy_(exact_matmul(r, first))
        return
    work = tiles.clone(memory_format=torch.contiguous_format)
    r.zero_()
    for k in range(tiles.shape[-1]):
        norm = torch.linalg.vector_norm(work[..., k], dim=-1, keepdim=True)
        work[..., k] /= torch.where(norm == 0, 1.0, norm)
        column, rest = work[..., k : k + 1], work[..., k + 1 :]
        # Not a matrix product, whose precision is the user's to choose; nor is that one faster here.
        row = (column.conj() * rest).sum(-2, keepdim=True)
        rest -= column * row
        r[..., k, k] = norm[..., 0]
        r[..., k : k + 1, k + 1 :] = row
    q.copy_(work)


def tallest_tile(dtype: torch.dtype) -> int:
    """Rows of the tallest tile that is factorized in one piece."""
    return TALLEST_TILE[dtype.to_real()]


BYTES_PER_WARP = 16384
"""Of a tile: 128 registers in each thread, half of what there are. Fewer warps exchange less: measured on an
H200, 16384 tiles of 256 x 32 take 0.87 ms with 2 warps in float32 and 1.1 with 4, in float64 2.6 with 4 and
5.1 with 8."""


def mgs_into_triton(tiles, q, r, *, twice=False):
    count, m, n = tiles.shape
    # Powers of two, not too small: each size is compiled once. Products in a kernel need 16 columns.
    rows = max(32, next_power_of_2(m))
    half = max(16 if twice else 4, next_power_of_2(n) // 2)
    warps = max(1, rows * 2 * half * tiles.element_size() // BYTES_PER_WARP)
    strides = (*tiles.stride(), *q.stride(), *r.stride())
    launch = _mgs[(count,)]
    launch(tiles, q, r, m, n, *strides, rows, half, twice, num_warps=warps, enable_fp_fusion=True)


@jit
def _mgs(
    tiles, q, r, m, n, stride_tile, stride_row, stride_column, q_tile, q_row, q_column, r_tile, r_row,
    r_column,
    ROWS: tl.constexpr, HALF: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    """Factorize the tile of this program, padded with zeros to ROWS x 2 HALF, and Q once more if so asked.

    Its left and right half are apart, so that the steps of the right one need not touch the left one.
    """
    tile = tl.program_id(0).to(tl.int64)  # offsets may exceed 2^31
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, HALF)[None, :]
    left, right = (i < m) & (j < n), (i < m) & (HALF + j < n)
    rows = tiles + tile * stride_tile + i.to(tl.int64) * stride_row
    a1 = tl.load(rows + j.to(tl.int64) * stride_column, mask=left, other=0.0)
    a2 = tl.load(rows + (HALF + j).to(tl.int64) * stride_column, mask=right, other=0.0)

    k = tl.arange(0, HALF)[:, None]
    q1, q2, r11, r12, r22 = _orthogonalize(a1, a2, k, j, HALF)
    if TWICE:
        q1, q2, s11, s12, s22 = _orthogonalize(q1, q2, k, j, HALF)
        r12 = tl.dot(s11, r12, input_precision="ieee") + tl.dot(s12, r22, input_precision="ieee")
        r11 = tl.dot(s11, r11, input_precision="ieee")
        r22 = tl.dot(s22, r22, input_precision="ieee")

    # The whole tile was loaded before anything is stored: Q may take its place.
    q += tile * q_tile + i.to(tl.int64) * q_row
    tl.store(q + j.to(tl.int64) * q_column, q1, mask=left)
    tl.store(q + (HALF + j).to(tl.int64) * q_column, q2, mask=right)
    r += tile * r_tile
    upper, lower = r + k.to(tl.int64) * r_row, r + (HALF + k).to(tl.int64) * r_row
    first, second = j.to(tl.int64) * r_column, (HALF + j).to(tl.int64) * r_column
    top, bottom, left, right = k < n, HALF + k < n, j < n, HALF + j < n
    tl.store(upper + first, r11, mask=top & left)
    tl.store(upper + second, r12, mask=top & right)
    tl.store(lower + first, tl.zeros((HALF, HALF), a1.dtype), mask=bottom & left)
    tl.store(lower + second, r22, mask=bottom & right)


@jit
def _orthogonalize(a1, a2, k, j, HALF: tl.constexpr):
    """Q of the left and the right half, and the blocks of R; the one below the diagonal is zero."""
    w11 = tl.zeros((HALF, HALF), a1.dtype)
    w12 = tl.zeros((HALF, HALF), a1.dtype)
    w22 = tl.zeros((HALF, HALF), a1.dtype)
    for step in range(HALF):
        v = _column(a1, j, step)
        row1 = tl.sum(v * a1, axis=0, keep_dims=True)
        row2 = tl.sum(v * a2, axis=0, keep_dims=True)
        square = _nonzero(_column(row1, j, step))
        w11 = tl.where((k == step) & (j >= step), row1, w11)
        w12 = tl.where(k == step, row2, w12)
        a1 -= v * tl.where(j > step, row1 / square, 0.0)
        a2 -= v * (row2 / square)
    for step in range(HALF):
        v = _column(a2, j, step)
        row2 = tl.sum(v * a2, axis=0, keep_dims=True)
        square = _nonzero(_column(row2, j, step))
        w22 = tl.where((k == step) & (j >= step), row2, w22)
        a2 -= v * tl.where(j > step, row2 / square, 0.0)
    q1, q2 = a1 * _inverse_norms(w11, k == j, 0), a2 * _inverse_norms(w22, k == j, 0)
    upper, lower = _inverse_norms(w11, k == j, 1), _inverse_norms(w22, k == j, 1)
    return q1, q2, w11 * upper, w12 * upper, w22 * lower


@jit
def _column(a, j, k):
    """Column k, for all threads: registers have no index, but they can be summed under a mask."""
    return tl.sum(tl.where(j == k, a, 0.0), axis=1, keep_dims=True)


@jit
def _nonzero(x):
    """The divisor for x: a column that vanishes stays zero, and nothing of it is subtracted."""
    return tl.where(x == 0.0, 1.0, x)


@jit
def _inverse_norms(w, diagonal, axis: tl.constexpr):
    """``1 / sqrt(W[k, k])``, as a row for the columns of Q (axis 0) or as a column for the rows of R."""
    square = tl.sum(tl.where(diagonal, w, 0.0), axis=axis, keep_dims=True)
    return 1.0 / _nonzero(square_root(square))


@jit
def square_root(x):
    """Rounded to nearest: tl.sqrt is an approximation in float32, and tl.sqrt_rn does not know float64."""
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)
