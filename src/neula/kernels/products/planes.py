"""Complex matrices as planes of real numbers, whose three products make up those of complex matrices.

With ``A = A1 + i A2`` and ``B = B1 + i B2``, ``A B = (P - Q) + i (S - P - Q)``, ``P = A1 B1``, ``Q = A2 B2``,
``S = (A1 + A2) (B1 + B2)``, so that a third plane holds the sums of the parts. A tile of a complex matrix is
twice as wide in memory; it is split and joined in registers, so that all accesses are to consecutive
elements.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import ceil_div
from neula.kernels.polar.batched_product import ALIGNED, place_of_tile
from neula.kernels.products.gemm import combine
from neula.kernels.triton_source import jit, tl


@trial("The kernels between complex matrices and their planes", "plain torch takes their place")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, 1, 2, dtype=torch.float32, device=device)
    found = planes.kernel(one, torch.float32)
    interleave.kernel(planes_of_product.kernel(found, 1.0, 1.0, one.flatten()[:1]), one, 1.0, 1.0)


def is_dense(x: torch.Tensor) -> bool:
    """Whether elements of a row, or of a column, follow one another."""
    return 0 not in x.shape and x.stride(3) == 1 and 2 in (x.stride(1), x.stride(2))


@kernel("planes_triton", trial=_tried, when=lambda x, *_, **__: is_dense(x))
def planes(x: torch.Tensor, dtype: torch.dtype, *, conjugated: bool = False) -> torch.Tensor:
    """Real parts, imaginary parts, and their sums, (3, batch, m, n), by one pass over complex matrices.

    ``x`` (batch, m, n, 2) is as :func:`torch.view_as_real` has them, or means their conjugates. Sums are
    rounded once, to ``dtype``. Planes are column-major where the matrices are.
    """
    out = empty_planes(x, dtype)
    out[0], out[1] = x[..., 0], x[..., 1]
    if conjugated:
        out[1].neg_()
    torch.sub(x[..., 0], x[..., 1], out=out[2]) if conjugated else torch.add(x[..., 0], x[..., 1], out=out[2])
    return out


@kernel("interleave_triton", trial=_tried, when=lambda products, c, *_: is_dense(c))
def interleave(products: torch.Tensor, c: torch.Tensor, alpha: float, beta: float) -> None:
    """``C = alpha ((P - Q) + i (S - P - Q)) + beta C`` by one pass; P, Q and S, the products (3, batch, m,
    n), are overwritten.

    C (batch, m, n, 2) is the real view of complex matrices, and not read if ``beta`` is zero.
    """
    p, q, s = products
    s.sub_(p).sub_(q)
    for place, part in enumerate((p.sub_(q), s)):
        combine(part, alpha, beta, c[..., place])


@kernel(
    "planes_of_product_triton",
    trial=_tried,
    when=lambda products, *_: products.stride(3) == 1 and 0 not in products.shape,
)
def planes_of_product(
    products: torch.Tensor, factor: float, shift: float, scales: torch.Tensor | None
) -> torch.Tensor:
    """The planes of ``scale (factor A B + shift I)`` from P, Q and S, (3, batch, m, n), in their memory by
    one pass: real parts, imaginary parts and their sums.
    """
    p, q, s = products
    s.sub_(p).sub_(q).mul_(factor)
    p.sub_(q).mul_(factor).diagonal(dim1=1, dim2=2).add_(shift)
    if scales is not None:
        products[::2].mul_(scales[:, None, None])
    q.copy_(s)
    torch.add(p, q, out=s)
    return products


def empty_planes(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Uninitialized, shape (3, batch, m, n), in the order of x."""
    batch, m, n, _ = x.shape
    if x.stride(1) < x.stride(2):
        return torch.empty(3, batch, n, -(-m // ALIGNED) * ALIGNED, dtype=dtype, device=x.device)[..., :m].mT
    return torch.empty(3, batch, m, -(-n // ALIGNED) * ALIGNED, dtype=dtype, device=x.device)[..., :n]


TILE = (8, 256)
"""Complex elements that a thread block has: rows, and consecutive ones."""


def planes_triton(x, dtype, *, conjugated=False):
    out = empty_planes(x, dtype)
    _launch(_planes_kernel, x, out, -1.0 if conjugated else 1.0)
    return out


def interleave_triton(products, c, alpha, beta):
    _launch(_interleave_kernel, c, products, alpha, beta, adds=beta != 0.0)


def planes_of_product_triton(products, factor, shift, scales):
    _, batch, m, n = products.shape
    down, across = ceil_div(m, TILE[0]), ceil_div(n, TILE[1])
    _planes_of_product_kernel[(batch * down * across,)](
        *(products, products if scales is None else scales.contiguous(), factor, shift),
        *(m, n, down, across, *products.stride()[:3], scales is not None, *TILE),
    )
    return products


def _launch(kernel, x, planes, *factors: float, **constants: bool) -> None:
    """For each tile, in the order of the complex matrices."""
    if x.stride(2) != 2:
        x, planes = x.transpose(1, 2), planes.mT
    batch, m, n, _ = x.shape
    down, across = ceil_div(m, TILE[0]), ceil_div(n, TILE[1])
    kernel[(batch * down * across,)](
        *(x, planes, *factors, m, n, down, across),
        *(*x.stride()[:2], *planes.stride(), *constants.values(), *TILE),
    )


@jit(do_not_specialize=["m", "down", "across"])
def _planes_kernel(
    x, out, sign, m, n, down, across, x_batch, x_row, plane, batch_stride, row, column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    batch, i, j, inside = place_of_tile(m, n, down, across, ROWS, COLUMNS)
    wide, within = _place_of_pairs(m, n, down, across, ROWS, COLUMNS)
    pairs = tl.load(x + batch * x_batch + i * x_row + wide, mask=within, other=0.0)
    first, second = tl.split(pairs.reshape(ROWS, COLUMNS, 2))
    second = second * sign
    target = out + batch * batch_stride + i * row + j * column
    tl.store(target, first.to(out.dtype.element_ty), mask=inside)
    tl.store(target + plane, second.to(out.dtype.element_ty), mask=inside)
    tl.store(target + 2 * plane, (first + second).to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["m", "down", "across"])
def _interleave_kernel(
    c, products, alpha: tl.float64, beta: tl.float64, m, n, down, across, c_batch, c_row, plane, batch_stride,
    row, column, ADDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    batch, i, j, inside = place_of_tile(m, n, down, across, ROWS, COLUMNS)
    source = products + batch * batch_stride + i * row + j * column
    p = tl.load(source, mask=inside, other=0.0)
    q = tl.load(source + plane, mask=inside, other=0.0)
    s = tl.load(source + 2 * plane, mask=inside, other=0.0)
    wide, within = _place_of_pairs(m, n, down, across, ROWS, COLUMNS)
    pairs = tl.join(p - q, s - p - q).reshape(ROWS, 2 * COLUMNS) * alpha
    target = c + batch * c_batch + i * c_row + wide
    if ADDS:
        pairs += beta * tl.load(target, mask=within, other=0.0)
    tl.store(target, pairs, mask=within)


@jit(do_not_specialize=["m", "down", "across"])
def _planes_of_product_kernel(
    products, scales, factor: tl.float64, shift: tl.float64, m, n, down, across, plane, batch_stride, row,
    SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    batch, i, j, inside = place_of_tile(m, n, down, across, ROWS, COLUMNS)
    place = products + batch * batch_stride + i * row + j
    p = tl.load(place, mask=inside, other=0.0)
    q = tl.load(place + plane, mask=inside, other=0.0)
    s = tl.load(place + 2 * plane, mask=inside, other=0.0)
    real, imaginary = (p - q) * factor, (s - p - q) * factor
    real += tl.where(i == j, shift, 0.0).to(real.dtype)
    if SCALED:
        scale = tl.load(scales + batch)
        real, imaginary = real * scale, imaginary * scale
    tl.store(place, real, mask=inside)
    tl.store(place + plane, imaginary, mask=inside)
    tl.store(place + 2 * plane, real + imaginary, mask=inside)


@jit
def _place_of_pairs(m, n, down, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns of its tile in memory, where each element is a pair."""
    tile = tl.program_id(0) % (down * across)
    i = ((tile // across) * ROWS + tl.arange(0, ROWS))[:, None]
    j = ((tile % across) * 2 * COLUMNS + tl.arange(0, 2 * COLUMNS))[None, :]
    return j.to(tl.int64), (i < m) & (j < 2 * n)
