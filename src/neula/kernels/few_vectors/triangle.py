"""Products of triangles with a few vectors in double precision, and residuals of Cholesky factors by them.

``2 n^2`` bytes of each matrix in float32, and 4 multiply-adds in float64 for an element, on matrix units. A
symmetric matrix is read twice, by rows and by columns of its lower triangle. A program makes a block of rows
of the result, from square tiles, so that it does not matter in which direction a matrix is contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import ceil_div
from neula.kernels.triton_source import jit, tl

VECTORS = 4
"""For how many vectors the kernel is made."""

BLOCK = {"cpu": 1 << 18, "cuda": 1 << 25}
"""Elements of rows that are read at a time: what a cache holds, and what fills a GPU."""

Kind = Literal["lower", "transposed", "symmetric"]


@trial("The kernel of products with triangles", "library calls take its place")
def _tried(device: torch.device) -> None:
    x = torch.ones(1, 1, VECTORS, dtype=torch.float64, device=device)
    triangle_product.kernel(x[..., :1].float(), x, "symmetric")


@kernel(
    "triangle_product_triton",
    trial=_tried,
    when=lambda t, x, kind: x.shape[2] == VECTORS and 0 not in t.shape,
)
def triangle_product(t: torch.Tensor, x: torch.Tensor, kind: Kind) -> torch.Tensor:
    """``L X``, ``L^H X`` or ``(L + strict(L)^H) X`` for the lower triangles L of matrices (batch, n, n) and X
    (batch, n, k) in double precision, complex if they are.

    L has zeros above the diagonal, where it is not Hermitian; the diagonal of a Hermitian matrix counts as
    real. On a GPU a Triton kernel reads the triangles alone; the library would take a copy of the matrices in
    double precision.
    """
    # Vectors are rows: libraries multiply a few of these several times as fast as a few columns.
    x = x.mT.contiguous()
    found = torch.zeros_like(x)
    for k, rows in _block_rows(t, x.dtype):
        # L of LAPACK is column-major, and takes long to copy.
        rows = rows.tril(k.start - 1) if kind == "symmetric" else rows
        if kind != "transposed":
            found[:, :, k] += x[:, :, : k.stop] @ rows.mT
        if kind != "lower":
            found[:, :, : k.stop] += (x[:, :, k].conj() @ rows).conj()  # which copies no matrix
    if kind == "symmetric":
        found += x * t.diagonal(dim1=1, dim2=2).real[:, None]
    return found.mT


def _block_rows(t: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """Some rows up to the end of their diagonal block, in a dtype."""
    count, n, _ = t.shape
    height = max(1, BLOCK[t.device.type] // max(1, count * n))
    for start in range(0, n, height):
        k = slice(start, min(start + height, n))
        yield k, t[:, k, : k.stop].to(dtype)


TILE, SMALL, STAGES = 64, 32, 3

ROOM = 8
"""Vectors that a matrix unit multiplies at a time."""

WIDTH = 2048
"""Elements of a row that a program adds up: with whole rows of one large matrix programs would be too few to
fill a GPU."""


def triangle_product_triton(t, x, kind):
    count, n, _ = t.shape
    # Triton 3.6 does not compile products in double precision of 16 bits that become 64.
    t = t.float() if t.dtype.itemsize < 4 else t
    x = x.expand(count, n, VECTORS)
    parts, tile = ceil_div(n, WIDTH), SMALL if n <= SMALL else TILE
    found = torch.empty(parts, count, VECTORS, n, dtype=torch.float64, device=t.device)
    _triangle_product[(ceil_div(n, tile) * count, parts)](
        *(t, x, found, n, *t.stride(), *x.stride(), found.stride(0)),
        *(kind != "transposed", kind != "lower", tile, WIDTH, ROOM, STAGES),
        num_warps=4,
    )
    return (found[0] if parts == 1 else found.sum(0)).mT


@jit(do_not_specialize=["n", "part"])
def _triangle_product(
    t, x, found, n, t_batch, t_row, t_column, x_batch, x_row, x_column, part,
    BELOW: tl.constexpr, ABOVE: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Product of one block of rows: below the diagonal, and transposed in the same columns."""
    begin = tl.program_id(1) * WIDTH
    end = tl.minimum(begin + WIDTH, n)
    found += tl.program_id(1) * tl.cast(part, tl.int64)
    blocks = tl.cdiv(n, TILE)
    member = (tl.program_id(0) // blocks).to(tl.int64)
    start = tl.program_id(0) % blocks * TILE
    i, v = start + tl.arange(0, TILE), tl.arange(0, ROOM)
    t += member * t_batch
    x += member * x_batch + v[None, :] * x_column
    few = (v < 4)[None, :]
    total = tl.zeros((TILE, ROOM), tl.float64)
    rows = t + i.to(tl.int64)[:, None] * t_row
    columns = t + i.to(tl.int64)[:, None] * t_column
    # Between the diagonal and a part's ends no mask varies along what is contiguous.
    if BELOW:
        for first in tl.range(begin, tl.minimum(start, end), TILE, num_stages=STAGES):
            j = (first + tl.arange(0, TILE)).to(tl.int64)
            block = tl.load(rows + j[None, :] * t_column, mask=(i < n)[:, None], other=0.0)
            total = _add(total, block, x + j[:, None] * x_row, few)
    if ABOVE:
        for first in tl.range(tl.maximum(start + TILE, begin), end, TILE, num_stages=STAGES):
            j = (first + tl.arange(0, TILE)).to(tl.int64)
            block = tl.load(columns + j[None, :] * t_row, mask=(j < n)[None, :], other=0.0)
            total = _add(total, block, x + j[:, None] * x_row, (j < n)[:, None] & few)
    if (begin <= start) & (start < end):
        j = i.to(tl.int64)
        inside = (i[:, None] < n) & (i[None, :] < n)
        if BELOW:
            below = inside & (i[None, :] <= i[:, None])
            block = tl.load(rows + j[None, :] * t_column, mask=below, other=0.0)
            total = _add(total, block, x + j[:, None] * x_row, (i < n)[:, None] & few)
        if ABOVE:
            # The diagonal counts once.
            above = inside & ((i[None, :] > i[:, None]) if BELOW else (i[None, :] >= i[:, None]))
            block = tl.load(columns + j[None, :] * t_row, mask=above, other=0.0)
            total = _add(total, block, x + j[:, None] * x_row, (i < n)[:, None] & few)
    place = found + member * 4 * n + v[None, :] * n + i[:, None]
    tl.store(place, total, mask=(i < n)[:, None] & few)


@jit
def _add(total, block, place, mask):
    """A tile times some vectors, which matrix units multiply in double precision."""
    return tl.dot(block.to(tl.float64), tl.load(place, mask=mask, other=0.0), total, out_dtype=tl.float64)


def diagonal_scales(a: torch.Tensor) -> torch.Tensor:
    """Powers of two (batch, n), float64, that bring the diagonals of some matrices into [1/2, 2) with rows
    and columns scaled symmetrically; 1 for what is not positive.
    """
    diagonal = a.diagonal(dim1=1, dim2=2).real.double()
    half = torch.frexp(diagonal)[1].div(2, rounding_mode="floor")
    return torch.where(diagonal > 0, torch.ldexp(torch.ones_like(diagonal), -half), 1.0)


def factor_residuals(
    a: torch.Tensor, lower: torch.Tensor, order: torch.Tensor, probes: torch.Tensor
) -> torch.Tensor:
    """``||D (A - L L^H) D G||_F / ||D A D G||_F`` with the D of :func:`diagonal_scales`, without
    synchronizing; half of each matrix is read.

    Only the lower triangles of A (batch, n, n) count, and L is zero above its diagonal; ``order`` is not zero
    where L means nothing. G (n, k) is in double precision, complex if A is. Returns these, 0 for zero and NaN
    where L means nothing, and the order: (2, batch), float64.
    """
    d = diagonal_scales(a)[..., None]
    image, product = images(a, lower, probes * d)
    norm = torch.linalg.matrix_norm
    difference, size = norm((image - product) * d), norm(image * d)
    residual = difference / torch.where(size == 0, 1.0, size)
    return torch.stack([residual.masked_fill(order != 0, torch.nan), order.double()])


def images(a: torch.Tensor, lower: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``A X`` and ``L L^H X``."""
    below = triangle_product(lower, x, "transposed")
    return triangle_product(a, x, "symmetric"), triangle_product(lower, below, "lower")
