"""Of a symmetric matrix and its Cholesky factor: scales that the diagonal asks for, and the residual."""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.triangle import VECTORS, triangle_product

SMALL = 128
"""Order up to which one thread block measures a matrix in one launch."""


@trial("The kernels that measure Cholesky factors", "library calls take their place")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, 1, device=device)
    scales = diagonal_scales.kernel(one)
    residual_norms.kernel(one, one, one[0].double().expand(1, VECTORS), scales)


@kernel(
    "neula.kernels.symmetric_residual_triton:diagonal_scales_triton",
    trial=_tried,
    when=lambda a: a.dtype != torch.float64 and 0 not in a.shape,
)
def diagonal_scales(a: torch.Tensor) -> torch.Tensor:
    """Powers of two that bring the diagonals of some matrices into [1/2, 2) where rows and columns are scaled
    alike; 1 for what is not positive.

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
    diagonal = a.diagonal(dim1=1, dim2=2).double()
    half = torch.frexp(diagonal)[1].div(2, rounding_mode="floor")
    return torch.where(diagonal > 0, torch.ldexp(torch.ones_like(diagonal), -half), 1.0)


@kernel(
    "neula.kernels.symmetric_residual_triton:residual_norms_triton",
    trial=_tried,
    when=lambda a, lower, probes, scales: probes.shape[-1] == VECTORS and 0 not in a.shape,
)
def residual_norms(
    a: torch.Tensor, lower: torch.Tensor, probes: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Norms of ``D A D G - D L L^T D G`` and of ``D A D G``, without synchronizing; half of each matrix is
    read.

    Parameters
    ----------
    a : Tensor, shape (batch, n, n)
        Only the lower triangles count.
    lower : Tensor, shape (batch, n, n)
        L: what is above the diagonal does not count.
    probes : Tensor, shape (n, k)
        G: float64.
    scales : Tensor, shape (batch, n)
        The diagonals of D: float64.

    Returns
    -------
    Tensor, shape (2, batch)
        float64.

    Examples
    --------
    >>> import torch
    >>> a, probes = torch.tensor([[[4.0, 0.0], [2.0, 2.0]]]), torch.eye(2, dtype=torch.float64)
    >>> lower, scales = torch.tensor([[[2.0, 0.0], [1.0, 1.0]]]), probes.new_ones(1, 2)
    >>> residual_norms(a, lower, probes, scales)[0].item()
    0.0
    """
    d = scales[..., None]
    image, product = images(a, lower, probes * d)
    norm = torch.linalg.matrix_norm
    return torch.stack([norm((image - product) * d), norm(image * d)])


def images(a: torch.Tensor, lower: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``A X`` and ``L L^T X``."""
    below = triangle_product(lower, x, "transposed")
    return triangle_product(a, x, "symmetric"), triangle_product(lower, below, "lower")
