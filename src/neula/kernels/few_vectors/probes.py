"""Errors of many small QR factorizations at once, measured with random vectors in two launches.

The kernel multiplies float32 matrices in float32, in sums that branch like trees: random roundings at each
level of a sum of n terms add ``sqrt(1 + log2 n) u / sqrt(3)`` to the relative error of a product. With three
products in a residual and two in an orthogonality, the measures err by less than ``4 u`` for n up to 1024, a
fifth of the least bound for matrices of 32 columns. Such errors are not correlated with those they measure:
they make a factorization look worse rather than better.

The first launch computes ``R D G``. In the second a block of rows of A and Q is read, ``A D G``, ``Q (R D
G)`` and ``Q H`` are formed in registers, and the block of Q, still in the cache, gives its part of ``Q^T (Q
H)``. Where a matrix has many rows, a thread block goes through a share of them and keeps its part of ``Q^T (Q
H)`` in registers: a thread then adds T numbers one after the other, with an error of about ``sqrt(T) u / 5``
of its sum, and N sums of different threads, whose errors are independent, are added: ``sqrt(T / N) u / 5``
remains, less than ``u / 5`` for 4194304 rows.
"""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.few_vectors.vectors_triton import (
    add_images,
    load_vectors,
    scaled_vectors,
    store_vectors,
    sum_of_squares,
)
from neula.kernels.launch import VECTOR, ceil_div, elements_at_a_time, multiprocessors, next_power_of_2, share
from neula.kernels.magnitudes import two_norms
from neula.kernels.precision import exact_matmul
from neula.kernels.triton_source import jit, tl

VECTORS = 4
"""Random vectors: the kernel has this number written out."""

BLOCK = {"cpu": 1 << 18, "cuda": 1 << 25}
"""Elements that plain torch converts to double precision and multiplies at a time: what a CPU has in its
cache, which takes a third of the time for 262144 x 64 on two cores, and what fills a GPU."""


@trial("The kernel of the certificates", "plain torch takes its place, many times slower")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, 1, device=device, dtype=torch.float64)
    vectors = one[0].expand(1, VECTORS)
    probe_errors.kernel(one, one, one, one[0], vectors, vectors)


@kernel("probe_errors_triton", trial=_tried)
def probe_errors(
    a: torch.Tensor, q: torch.Tensor, r: torch.Tensor, scales: torch.Tensor, g: torch.Tensor, h: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Residual and orthogonality of factorizations A (batch, m, n) = Q (batch, m, k) R along random vectors.

    With ``D`` the diagonal matrix of the scales (batch, n) of a matrix, these are ``||A D G - Q (R D
    G)||_F``, ``||A D G||_F``, ``||Z||_F`` and ``||Z^H Z||_F^(1/2)`` for ``Z = Q^H (Q H) - H``, each of shape
    (batch,); the last one is at least ``||Z||_2``, and at most 1.42 times that. G (n, 4) and H (k, 4) are in
    double precision, complex if A is. On a GPU a Triton kernel computes them, in float32 unless a matrix is
    float64. Where a matrix or its factors are not finite, so are the measures; others are not affected.

    Examples
    --------
    >>> q, r = torch.linalg.qr(torch.tensor([[[3.0, 5.0], [4.0, 0.0]]], dtype=torch.float64))
    >>> g = torch.ones(2, 4, dtype=torch.float64)
    >>> residual, size, orthogonality, _ = probe_errors(q @ r, q, r, torch.ones(1, 2), g, g)
    >>> bool(residual < 1e-14 * size), bool(orthogonality < 1e-14)
    (True, True)
    """
    m, n = a.shape[1:]
    together = max(1, BLOCK[a.device.type] // (m * n))
    if len(a) > together:
        groups = zip(*(x.split(together) for x in (a, q, r, scales)), strict=True)
        measures = [torch.stack(probe_errors.reference(x, y, z, d, g, h)) for x, y, z, d in groups]
        residual, size, orthogonality, spectral = torch.cat(measures, 1)
        return residual, size, orthogonality, spectral
    # Vectors are rows: products of a few rows take a third of the time of those of a few columns in MKL.
    rows = max(1, BLOCK[a.device.type] // a.shape[2])
    g, h = scales.double()[:, None] * g.mT, h.mT.contiguous()
    rg = g @ r.mT.to(g.dtype)
    loss, residuals, images = -h, [], []
    for x, y in zip(a.split(rows, 1), q.split(rows, 1), strict=True):
        wide_q = y.to(g.dtype)
        image = g @ x.to(g.dtype).mT
        residuals.append(norms(image - rg @ wide_q.mT))
        images.append(norms(image))
        loss = ((h @ wide_q.mT).conj() @ wide_q).conj() + loss
    return _together(residuals), _together(images), norms(loss), spectral_norms(loss.mT)


def _together(norms: list[torch.Tensor]) -> torch.Tensor:
    """The norm of a matrix from those of its blocks."""
    return norms[0] if len(norms) == 1 else two_norms(torch.stack(norms), 0)


def norms(x: torch.Tensor) -> torch.Tensor:
    """Frobenius norm of each matrix of a batch."""
    return two_norms(x, -2, -1)


def spectral_norms(x: torch.Tensor) -> torch.Tensor:
    """``||X^H X||_F^(1/2)`` of each matrix of n columns: its 2-norm, or up to ``n^(1/4)`` times that."""
    return norms(exact_matmul(x.mH, x)).sqrt()


MAX_ROWS = 32
COLUMNS = 32
"""Blocks of one warp, which adds up without shared memory: on an H200 4096 of 256 x 32 take 0.14 ms,
with blocks of 64 rows 0.21, of 256 rows 0.27."""

TALL, TALL_COLUMNS = 1 << 17, 256
"""From how many rows, and up to how many columns, a thread block goes through many blocks of rows: on an H200
4194304 x 128 take 1.0 ms instead of 1.7, 131072 x 32 0.035 instead of 0.040, but 32768 x 128 0.048 instead of
0.041."""

TALL_BLOCK, TALL_WARPS = 4096, 8
"""Elements of such a block, 16 a thread, and warps of a thread block, of which a multiprocessor holds
one: 4194304 x 128 take 1.0 ms, with blocks of half the size 1.2."""


def probe_errors_triton(a, q, r, scales, g, h):
    count, m, n = a.shape
    k = q.shape[2]
    precision = torch.float64 if torch.float64 in (a.dtype, q.dtype, r.dtype) else torch.float32
    wide = torch.float64 if precision == torch.float64 else torch.float32
    rows, rows_of_r = _block_rows(m), _block_rows(k)
    tall = precision == torch.float32 and m >= TALL and _four_at_a_time(a) and _four_at_a_time(q)
    half = max(8, next_power_of_2(max(n, k)) // 2)
    rows_of_tall = TALL_BLOCK // (2 * half)
    chunk = share(m, ceil_div(multiprocessors(a.device), count), rows_of_tall) if tall else rows
    blocks = ceil_div(m, chunk)
    rg = torch.empty(count, 4, k, dtype=precision, device=a.device)
    parts = torch.empty(count, blocks, 4, k, dtype=precision, device=a.device)
    sums = torch.empty(count, blocks, 2, dtype=precision, device=a.device)
    strides = (*r.stride(), *scales.stride(), *g.stride())
    launch = _scaled_product[(count * ceil_div(k, rows_of_r),)]
    launch(r, scales, g, rg, k, n, *strides, rows_of_r, COLUMNS, wide, num_warps=_warps(rows_of_r))
    strides = (*a.stride(), *q.stride(), *scales.stride(), *g.stride(), *h.stride())
    arguments = (a, q, scales, g, h, rg, parts, sums, m, n, k, blocks, *strides)
    if tall:
        launch = _tall_errors[(count * blocks,)]
        launch(*arguments, chunk, rows_of_tall, half, _stages(half), num_warps=TALL_WARPS)
    else:
        launch = _errors[(count * blocks,)]
        launch(*arguments, rows, COLUMNS, wide, num_warps=_warps(rows))
    whole, products = (sums[:, 0], parts[:, 0]) if blocks == 1 else (sums.sum(1), parts.sum(1))
    residual, size = whole.sqrt_().unbind(-1)
    return residual, size, norms(products), spectral_norms(products.mT)


def _four_at_a_time(x: torch.Tensor) -> bool:
    """Whether a matrix is one for :func:`_tall_errors`, which is slow where rows cannot be read so."""
    return x.shape[2] <= TALL_COLUMNS and x.stride(2) == 1 and elements_at_a_time(x) == VECTOR


def _stages(half: int) -> int:
    """Loads in flight: 4194304 x 128 take 1.5 ms with two. Vectors of 256 elements leave no registers."""
    return 4 if half <= 64 else 1


def _block_rows(m: int) -> int:
    return min(MAX_ROWS, max(16, next_power_of_2(m)))


def _warps(rows: int) -> int:
    """32 elements for each thread."""
    return max(1, rows * COLUMNS // 1024)


@jit
def _scaled_product(
    r, scales, g, rg, k, n, r_batch, r_row, r_column, scales_batch, scales_column, g_row, g_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A block of rows of ``R D G``."""
    blocks = tl.cdiv(k, ROWS)
    matrix = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    rows = r + matrix * r_batch + i.to(tl.int64)[:, None] * r_row
    p = _times_scaled(
        *(rows, r_column, i < k, n, scales + matrix * scales_batch, scales_column, g, g_row, g_column),
        *(ROWS, COLUMNS, WIDE),
    )
    store_vectors(rg + matrix * 4 * k + i, k, i < k, p, 4)


@jit
def _errors(
    a, q, scales, g, h, rg, parts, sums, m, n, k, blocks, a_batch, a_row, a_column, q_batch, q_row, q_column,
    scales_batch, scales_column, g_row, g_column, h_row, h_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Contribution of a block of rows of A and Q to the squared norms and to ``Q^T (Q H) - H``."""
    matrix, part = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    i = part * ROWS + tl.arange(0, ROWS)
    a_rows = a + matrix * a_batch + i.to(tl.int64)[:, None] * a_row
    q_rows = q + matrix * q_batch + i.to(tl.int64)[:, None] * q_row
    x = _times_scaled(
        *(a_rows, a_column, i < m, n, scales + matrix * scales_batch, scales_column, g, g_row, g_column),
        *(ROWS, COLUMNS, WIDE),
    )
    size = tl.sum(sum_of_squares(x, 4), axis=0)

    y = (tl.zeros((ROWS,), WIDE),) * 4
    for start in range(0, k, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        inside = (i[:, None] < m) & (j[None, :] < k)
        block = tl.load(q_rows + j.to(tl.int64)[None, :] * q_column, mask=inside, other=0.0).to(WIDE)
        x = add_images(x, block, load_vectors(rg + matrix * 4 * k + j, k, j < k, 4, WIDE), -1, 4)
        y = add_images(y, block, load_vectors(h + j * h_row, h_column, j < k, 4, WIDE), 1, 4)
    place = sums + tl.program_id(0).to(tl.int64) * 2
    tl.store(place, tl.sum(sum_of_squares(x, 4), axis=0))
    tl.store(place + 1, size)

    for start in range(0, k, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        inside = (i[:, None] < m) & (j[None, :] < k)
        block = tl.load(q_rows + j.to(tl.int64)[None, :] * q_column, mask=inside, other=0.0).to(WIDE)
        # H is subtracted once, by the first block.
        once = load_vectors(h + j * h_row, h_column, j < tl.where(part == 0, k, 0), 4, WIDE)
        to = parts + tl.program_id(0).to(tl.int64) * 4 * k + j
        for v in tl.static_range(4):
            tl.store(to + v * k, tl.sum(block * y[v][:, None], axis=0) - once[v], mask=j < k)


@jit(do_not_specialize=["m", "n", "k", "blocks", "chunk"])
def _tall_errors(
    a, q, scales, g, h, rg, parts, sums, m, n, k, blocks, a_batch, a_row, a_column, q_batch, q_row, q_column,
    scales_batch, scales_column, g_row, g_column, h_row, h_column, chunk,
    ROWS: tl.constexpr, HALF: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """:func:`_errors` for a share of the rows, in float32, of matrices read four elements at a time."""
    # Multiples of four, as the compiler has to see to move four elements at a time.
    n, a_batch, a_row = n // 4 * 4, a_batch // 4 * 4, a_row // 4 * 4
    k, q_batch, q_row = k // 4 * 4, q_batch // 4 * 4, q_row // 4 * 4
    matrix, part = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    first = part.to(tl.int64) * chunk
    last = tl.minimum(first + chunk, m)
    i = tl.arange(0, ROWS)[:, None, None]
    j = tl.arange(0, 2)[None, :, None] * HALF + tl.arange(0, HALF)[None, None, :]
    a_place = a + matrix * a_batch + j.to(tl.int64) * a_column
    q_place = q + matrix * q_batch + j.to(tl.int64) * q_column
    d = tl.load(scales + matrix * scales_batch + j * scales_column, mask=j < n, other=0.0).to(tl.float32)
    g_vectors = scaled_vectors(d, load_vectors(g + j * g_row, g_column, j < n, 4, tl.float32), 4)
    r_vectors = load_vectors(rg + matrix * 4 * k + j, k, j < k, 4, tl.float32)
    h_vectors = load_vectors(h + j * h_row, h_column, j < k, 4, tl.float32)
    size = tl.zeros((ROWS,), tl.float32)
    gap = tl.zeros((ROWS,), tl.float32)
    p = (tl.zeros((ROWS, 2, HALF), tl.float32),) * 4
    for start in tl.range(first, last, ROWS, num_stages=STAGES):
        row = start + i
        x = tl.load(a_place + row * a_row, mask=(row < last) & (j < n), other=0.0).to(tl.float32)
        y = tl.load(q_place + row * q_row, mask=(row < last) & (j < k), other=0.0).to(tl.float32)
        images, losses, products = (), (), ()
        for v in tl.static_range(4):
            images = images + (_along(x, g_vectors[v]),)
        size += sum_of_squares(images, 4)
        for v in tl.static_range(4):
            losses = losses + (images[v] - _along(y, r_vectors[v]),)
        gap += sum_of_squares(losses, 4)
        for v in tl.static_range(4):
            products = products + (p[v] + y * _along(y, h_vectors[v])[:, None, None],)
        p = products
    place = sums + tl.program_id(0).to(tl.int64) * 2
    tl.store(place, tl.sum(gap, axis=0))
    tl.store(place + 1, tl.sum(size, axis=0))
    place = parts + tl.program_id(0).to(tl.int64) * 4 * k + j
    for v in tl.static_range(4):
        total = tl.sum(p[v], axis=0)[None, :, :]
        if part == 0:  # H is subtracted once
            total -= h_vectors[v]
        tl.store(place + v * k, total, mask=j < k)


@jit
def _along(x, vector):
    """Rows times a vector."""
    return tl.sum(tl.sum(x * vector, axis=1), axis=1)


@jit
def _times_scaled(
    rows, column, exists, n, scales, scales_column, g, g_row, g_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A block of rows, which start at ``rows`` where they exist, times ``D G``."""
    p = (tl.zeros((ROWS,), WIDE),) * 4
    for start in range(0, n, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        inside = exists[:, None] & (j[None, :] < n)
        block = tl.load(rows + j.to(tl.int64)[None, :] * column, mask=inside, other=0.0).to(WIDE)
        d = tl.load(scales + j * scales_column, mask=j < n, other=0.0).to(WIDE)
        vectors = scaled_vectors(d, load_vectors(g + j * g_row, g_column, j < n, 4, WIDE), 4)
        p = add_images(p, block, vectors, 1, 4)
    return p
