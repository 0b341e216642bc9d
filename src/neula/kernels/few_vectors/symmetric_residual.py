"""Residual of a symmetric matrix and its Cholesky factor, with scales from the diagonal.

The products are those of ``triangle``. For all else, on a GPU, the library takes a dozen launches, each
longer than the bytes, and kernels two.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.few_vectors.triangle import VECTORS, triangle_product
from neula.kernels.launch import ceil_div, next_power_of_2
from neula.kernels.triton_source import jit, tl


@trial("The kernels that measure Cholesky factors", "library calls take their place")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, 1, dtype=torch.float32, device=device)
    diagonal_scales.kernel(one)
    factor_residuals.kernel(
        one, one, torch.zeros_like(one[0, 0], dtype=torch.int32), one[0].double().expand(1, VECTORS)
    )


@kernel(
    "diagonal_scales_triton",
    trial=_tried,
    when=lambda a: a.dtype != torch.float64 and 0 not in a.shape,
)
def diagonal_scales(a: torch.Tensor) -> torch.Tensor:
    """Powers of two (batch, n), float64, that bring the diagonals of some matrices into [1/2, 2) with rows
    and columns scaled symmetrically; 1 for what is not positive.

    Examples
    --------
    >>> diagonal_scales(torch.diag(torch.tensor([1.0, 8.0, 0.0]))[None]).tolist()
    [[1.0, 0.25, 1.0]]
    """
    diagonal = a.diagonal(dim1=1, dim2=2).real.double()
    half = torch.frexp(diagonal)[1].div(2, rounding_mode="floor")
    return torch.where(diagonal > 0, torch.ldexp(torch.ones_like(diagonal), -half), 1.0)


@kernel(
    "factor_residuals_triton",
    trial=_tried,
    when=lambda a, lower, order, probes: (
        probes.shape[-1] == VECTORS and 0 not in a.shape and a.dtype != torch.float64
    ),
)
def factor_residuals(
    a: torch.Tensor, lower: torch.Tensor, order: torch.Tensor, probes: torch.Tensor
) -> torch.Tensor:
    """``||D (A - L L^H) D G||_F / ||D A D G||_F`` with the D of :func:`diagonal_scales`, without
    synchronizing; half of each matrix is read.

    Only the lower triangles of A (batch, n, n) count, and L is zero above its diagonal; ``order`` is not zero
    where L means nothing. G (n, k) is in double precision, complex if A is. Returns these, 0 for zero and NaN
    where L means nothing, and the order: (2, batch), float64.

    Examples
    --------
    >>> a, probes = torch.tensor([[[4.0, 0.0], [2.0, 2.0]]]), torch.eye(2, dtype=torch.float64)
    >>> lower, order = torch.tensor([[[2.0, 0.0], [1.0, 1.0]]]), torch.zeros(1, dtype=torch.int32)
    >>> factor_residuals(a, lower, order, probes).tolist()
    [[0.0], [0.0]]
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


SPAN = 1024
"""Diagonal elements, and rows of products, that a thread block has at a time."""


def diagonal_scales_triton(a: torch.Tensor) -> torch.Tensor:
    count, n, _ = a.shape
    scales = torch.empty(count, n, dtype=torch.float64, device=a.device)
    span = min(SPAN, next_power_of_2(n))
    _scales_kernel[(count * ceil_div(n, span),)](a, a.stride(0), a.stride(1) + a.stride(2), scales, n, span)
    return scales


def factor_residuals_triton(
    a: torch.Tensor, lower: torch.Tensor, order: torch.Tensor, probes: torch.Tensor
) -> torch.Tensor:
    count, n, _ = a.shape
    found = torch.empty(2, count, dtype=torch.float64, device=a.device)
    scales = diagonal_scales_triton(a)
    image, product = images(a, lower, probes * scales[..., None])
    span = min(SPAN, next_power_of_2(n))
    _norms_kernel[(count,)](
        *(image, *image.stride(), product, *product.stride(), scales, order, found, n, count),
        *(VECTORS, span),
        num_warps=max(1, span // 128),
    )
    return found


@jit(do_not_specialize=["n", "a_batch", "apart"])
def _scales_kernel(a, a_batch, apart, scales, n, SPAN: tl.constexpr):
    parts = tl.cdiv(n, SPAN)
    member = (tl.program_id(0) // parts).to(tl.int64)
    i = tl.program_id(0) % parts * SPAN + tl.arange(0, SPAN)
    x = tl.load(a + member * a_batch + i.to(tl.int64) * apart, mask=i < n, other=1.0).to(tl.float64)
    # Of what is not double precision no number is subnormal in it: 2^e times one in [1/2, 1).
    exponent = ((x.to(tl.int64, bitcast=True) >> 52) & 0x7FF) - 1022
    scale = ((1023 - (exponent >> 1)) << 52).to(tl.float64, bitcast=True)
    tl.store(scales + member * n + i, tl.where(x > 0, scale, 1.0), mask=i < n)


@jit(do_not_specialize=["n", "count"])
def _norms_kernel(
    image, i_batch, i_row, i_column, product, p_batch, p_row, p_column, scales, order, found, n, count,
    VECTORS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Norm of the difference of the products of one matrix, with scaled rows."""
    member = tl.program_id(0).to(tl.int64)
    image += member * i_batch
    product += member * p_batch
    lost = tl.zeros((SPAN,), tl.float64)
    whole = tl.zeros((SPAN,), tl.float64)
    for first in range(0, n, SPAN):
        i = first + tl.arange(0, SPAN)
        d = tl.load(scales + member * n + i, mask=i < n, other=0.0)
        for vector in tl.static_range(VECTORS):
            x = d * tl.load(image + i * i_row + vector * i_column, mask=i < n, other=0.0)
            y = d * tl.load(product + i * p_row + vector * p_column, mask=i < n, other=0.0)
            lost += (x - y) * (x - y)
            whole += x * x
    size = tl.sqrt(tl.sum(whole))
    residual = tl.sqrt(tl.sum(lost)) / tl.where(size == 0, 1.0, size)
    which = tl.load(order + member)
    tl.store(found + member, tl.where(which == 0, residual, float("nan")))
    tl.store(found + count + member, which.to(tl.float64))
