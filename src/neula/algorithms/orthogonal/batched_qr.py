"""QR of many small matrices at once: every step is one launch for the whole batch.

Zhang, Baharlouei, Wu, "High Accuracy Matrix Computations on Neural Engines" (HPDC 2020): Algorithm 1 (the
columns are halved recursively) down to panels of 32 columns. In single precision Algorithm 2 (modified
Gram-Schmidt of tiles that stay on the chip) factorizes these; panels taller than a tile go up the tree of
section 3.1.3. In double precision Cholesky QR does (``cholesky_panel``). Products are in the
full precision of the matrices, on all batch members together.

Gram-Schmidt loses orthogonality in proportion to the condition number; a second pass over Q brings it back
(*twice is enough*, section 3.3), and for matrices without full rank a third one.
"""

from __future__ import annotations

import torch

from neula.algorithms.orthogonal.caqr import tile_tree
from neula.algorithms.orthogonal.rgsqrf import split_columns
from neula.engines.formats import double_of, matching_dtype
from neula.engines.random_vectors import gaussian
from neula.kernels import mgs_into, tallest_tile
from neula.kernels.precision import exactly
from neula.kernels.qr.cholesky_panel import cholesky_panel
from neula.kernels.qr.first_column import with_first_column, without_first_column
from neula.kernels.qr.mgs import TILE_COLUMNS

PRODUCT_BLOCKS = 8
"""Blocks of columns in a product of two triangular matrices: the last one has an eighth of the columns."""

PRODUCT_COLUMNS = 128  # least width of such a block: narrower ones save less than their launches take


BLOCK_ROWS = 256
NARROW = 128
"""Products ``Q^H A`` with at most this many columns of Q are summed over blocks of rows, which takes a third
of the time where there are few matrices, and few thread blocks without."""

MANY = 256  # matrices from which on there are enough thread blocks without


def batched_qr(
    a: torch.Tensor, *, passes: int = 1, tile_rows: int | None = None, overwrite_a: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """QR of each matrix by recursive block Gram-Schmidt.

    ``a``, shape (batch, m, n), m >= n: float32 or float64. Squares of its elements should neither overflow
    nor underflow. ``passes``: one, or more for the orthogonality of ill-conditioned matrices. ``tile_rows``:
    rows of a tile, at least 64; by default as many as are fastest on a GPU. ``overwrite_a``: return Q in the
    place of a contiguous A. Returns Q, shape (batch, m, n); R, shape (batch, n, n): upper triangular with a
    nonnegative diagonal. Where a column vanishes, the diagonal and the column of Q are zero. NaN and Inf stay
    in their matrix.

    >>> a = torch.eye(40, 36).expand(5, 40, 36)
    >>> q, r = batched_qr(a)
    >>> torch.equal(q, a), torch.equal(r, torch.eye(36).expand(5, 36, 36))
    (True, True)
    """
    rows = tallest_tile(a.dtype) if tile_rows is None else tile_rows
    if rows < 2 * TILE_COLUMNS:
        raise ValueError(
            f"tiles of {rows} rows are too short for a reduction tree: take tile_rows >= {2 * TILE_COLUMNS}"
        )
    count, m, n = a.shape
    if n <= TILE_COLUMNS and m <= rows:
        q, r = torch.empty_like(a, memory_format=torch.contiguous_format), a.new_empty(count, n, n)
        mgs_into(a, q, r, twice=passes >= 2)
        passes -= 1
    else:
        q = a if overwrite_a and a.is_contiguous() else a.clone(memory_format=torch.contiguous_format)
        r = _orthogonalize(q, rows)
    for _ in range(passes - 1):
        r = _triangular_product(_orthogonalize(q, rows), r)
    return q, r


def batched_qr_in_double(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One pass in double precision, whose Q is orthonormal in single precision for most matrices there are.

    Columns that vanish are random ones in Q, with a zero column of R, so that Q is orthonormal; and what all
    columns have in common with the first one goes first. A, shape (batch, m, n) with m >= n, is of any
    floating dtype, and not modified. Q is float32, and R float64 if A is, else float32.
    """
    m, n = a.shape[1:]
    q, multiples, vanished = without_first_column(a, _noise(m, n, a.device))
    r = q.new_empty(len(a), n, n)
    narrow = torch.empty(a.shape, dtype=matching_dtype(torch.float32, a.dtype), device=a.device)
    _factorize(q, r, tallest_tile(q.dtype), narrow)
    return narrow, with_first_column(r, multiples, vanished, torch.promote_types(a.dtype, torch.float32))


def batched_reorthogonalize(q: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Another pass over Q, shape (batch, m, n): an orthonormal Q and the R that belongs to it (``R_2 R``).

    Columns of Q that vanished are random ones in the second pass. Their rows of R are zero, so that ``Q R``
    stays what it was, and Q becomes orthonormal, as Householder reflections would have it.
    """
    # Of Q, not of R: a random column of an earlier pass has a zero on the diagonal, but others rely on it.
    vanished = ~q.any(1)
    m, n = q.shape[1:]
    q = torch.where(vanished[:, None, :], _noise(m, n, q.device).to(q.dtype) / m**0.5, q)
    step = _orthogonalize(q, tallest_tile(q.dtype))
    return q, _triangular_product(step, r)


def _noise(m: int, n: int, device: torch.device) -> torch.Tensor:
    """Random columns that replace columns of zeros."""
    return gaussian(m, n, torch.float32, device, seed=0)


def _orthogonalize(q: torch.Tensor, tile_rows: int) -> torch.Tensor:
    """One pass in place: returns R."""
    n = q.shape[2]
    r = q.new_empty(q.shape[0], n, n) if n <= TILE_COLUMNS else q.new_zeros(q.shape[0], n, n)
    _factorize(q, r, tile_rows)
    return r


def _factorize(a: torch.Tensor, r: torch.Tensor, tile_rows: int, narrow: torch.Tensor | None = None) -> None:
    """Algorithm 1 in place: the columns of A become those of Q, and of a rounded Q if ``narrow`` is given."""
    n = a.shape[2]
    if n <= TILE_COLUMNS:
        _factorize_panel(a, r, tile_rows, narrow)
        return
    k = split_columns(n, TILE_COLUMNS)
    q1, rest, r12 = a[..., :k], a[..., k:], r[:, :k, k:]
    narrow1, narrow2 = (None, None) if narrow is None else (narrow[..., :k], narrow[..., k:])
    _factorize(q1, r[:, :k, :k], tile_rows, narrow1)
    _inner_products(q1, rest, r12)
    exactly(torch.baddbmm, rest, q1, r12, alpha=-1.0, out=rest)
    _factorize(rest, r[:, k:, k:], tile_rows, narrow2)


def _factorize_panel(a: torch.Tensor, r: torch.Tensor, tile_rows: int, narrow: torch.Tensor | None) -> None:
    """Factorize by Cholesky QR in double precision, unless a GPU lacks a kernel: a thousand launches."""
    if a.dtype == double_of(a.dtype) and (not a.is_cuda or cholesky_panel.takes(a, r)):
        cholesky_panel(a, r, narrow)
        return
    tile_tree(a, r, tile_rows)
    if narrow is not None:
        narrow.copy_(a)


def _inner_products(q: torch.Tensor, a: torch.Tensor, out: torch.Tensor) -> None:
    """``Q^H A``: narrow matrices are cut into blocks of rows, so that there is a thread block for each."""
    count, m, k = q.shape
    blocks = m // BLOCK_ROWS
    if k > NARROW or count >= MANY or blocks < 2 or m % blocks:
        exactly(torch.bmm, q.mH, a, out=out)
        return
    left, right = (x.unflatten(1, (blocks, -1)).flatten(0, 1) for x in (q, a))
    parts = exactly(torch.bmm, left.mH, right)
    torch.sum(parts.view(count, blocks, k, -1), 1, out=out)


def _triangular_product(step: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """``R_2 R_1`` in blocks of columns, which leave out what is zero below them."""
    n = r.shape[2]
    width = max(PRODUCT_COLUMNS, -(-n // PRODUCT_BLOCKS))
    if n <= width:
        return exactly(torch.bmm, step, r)
    product = torch.zeros_like(r)
    for start in range(0, n, width):
        stop = min(start + width, n)
        block = product[:, :stop, start:stop]
        exactly(torch.bmm, step[:, :stop, :stop], r[:, :stop, start:stop], out=block)
    return product
