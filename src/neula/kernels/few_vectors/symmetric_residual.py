"""Residual of a symmetric matrix and its Cholesky factor, with scales from the diagonal."""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.few_vectors.triangle import VECTORS, triangle_product


@trial("The kernels that measure Cholesky factors", "library calls take their place")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, 1, dtype=torch.float32, device=device)
    diagonal_scales.kernel(one)
    factor_residuals.kernel(
        one, one, torch.zeros_like(one[0, 0], dtype=torch.int32), one[0].double().expand(1, VECTORS)
    )


@kernel(
    "neula.kernels.few_vectors.symmetric_residual_triton:diagonal_scales_triton",
    trial=_tried,
    when=lambda a: a.dtype != torch.float64 and 0 not in a.shape,
)
def diagonal_scales(a: torch.Tensor) -> torch.Tensor:
    """Powers of two that bring the diagonals of some matrices into [1/2, 2) with rows and columns scaled
    symmetrically; 1 for what is not positive.

    Parameters
    ----------
    a : Tensor, shape (batch, n, n)
        Of any floating dtype and any strides.

    Returns
    -------
    Tensor, shape (batch, n)
        float64.

    Examples
    --------
    >>> import torch
    >>> diagonal_scales(torch.diag(torch.tensor([1.0, 8.0, 0.0]))[None]).tolist()
    [[1.0, 0.25, 1.0]]
    """
    diagonal = a.diagonal(dim1=1, dim2=2).real.double()
    half = torch.frexp(diagonal)[1].div(2, rounding_mode="floor")
    return torch.where(diagonal > 0, torch.ldexp(torch.ones_like(diagonal), -half), 1.0)


@kernel(
    "neula.kernels.few_vectors.symmetric_residual_triton:factor_residuals_triton",
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

    Parameters
    ----------
    a : Tensor, shape (batch, n, n)
        Only the lower triangles count.
    lower : Tensor, shape (batch, n, n)
        L: zero above the diagonal.
    order : Tensor, shape (batch,)
        int32: not zero where L means nothing.
    probes : Tensor, shape (n, k)
        G: in double precision, complex if A is.

    Returns
    -------
    Tensor, shape (2, batch)
        float64: these, 0 for zero and NaN where L means nothing; and ``order``.

    Examples
    --------
    >>> import torch
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
