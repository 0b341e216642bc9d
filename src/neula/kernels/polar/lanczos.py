"""Steps of Lanczos between products: orthogonalize a vector, and find extreme Ritz values."""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.polar.svd import converged_eigvalsh
from neula.kernels.precision import exact_matmul

MOST = 16
"""Steps that the kernels have room for."""

NEW = 1e-3
"""Reduction of an image's length below which the remainder is rounding errors, not a new direction."""


@trial("The kernels of Lanczos steps", "library calls take their place, many times slower")
def _tried(device: torch.device) -> None:
    basis = torch.ones(1, 2, 1, dtype=torch.float32, device=device)
    advance.kernel(torch.ones(1, 1, dtype=torch.float32, device=device), basis, 0)
    extreme_values.kernel(basis[..., 0], basis[..., 0])


@kernel(
    "neula.kernels.polar.lanczos_triton:advance_triton",
    trial=_tried,
    when=lambda image, basis, step: basis.shape[1] <= MOST and basis.numel() > 0,
)
def advance(image: torch.Tensor, basis: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Orthogonalize the image of the last basis vector against all of them, and make it the next one.

    Parameters
    ----------
    image : Tensor, shape (batch, k)
        float32 or float64, or complex, contiguous; overwritten.
    basis : Tensor, shape (batch, steps, k)
        Contiguous, in the same dtype. Vectors up to the one of this step are read, the next one is written,
        where there is room for it: zero where an invariant subspace was found.
    step : int

    Returns
    -------
    diagonal, beside : Tensor, shape (batch,)
        New elements of the tridiagonal matrix.

    Examples
    --------
    >>> import torch
    >>> basis = torch.zeros(1, 2, 3)
    >>> basis[0, 0, 0] = 1.0
    >>> advance(torch.tensor([[2.0, 3.0, 4.0]]), basis, 0)
    (tensor([2.]), tensor([5.]))
    >>> basis[0, 1]
    tensor([0.0000, 0.6000, 0.8000])
    """
    known = basis[:, : step + 1]
    size = torch.linalg.vector_norm(image, dim=1)
    diagonal = (known[:, step].conj() * image).sum(1).real
    for _ in range(2):
        image = image - exact_matmul(exact_matmul(known.conj(), image[..., None]).mT, known)[:, 0]
    length = torch.linalg.vector_norm(image, dim=1)
    beside = torch.where(length <= NEW * size, 0.0, length)
    if step + 1 < basis.shape[1]:
        basis[:, step + 1] = image * torch.where(beside == 0, 0.0, 1 / beside)[:, None]
    return diagonal, beside


@kernel(
    "neula.kernels.polar.lanczos_triton:extreme_values_triton",
    trial=_tried,
    when=lambda diagonal, beside: diagonal.numel() > 0,
)
def extreme_values(diagonal: torch.Tensor, beside: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest eigenvalues of tridiagonal matrices; NaN where these are not finite.

    Parameters
    ----------
    diagonal, beside : Tensor, shape (batch, n)
        The last element beside the diagonal is not read.

    Returns
    -------
    smallest, largest : Tensor, shape (batch,)
        float64.

    Examples
    --------
    >>> import torch
    >>> extreme_values(torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 0.0]]))
    (tensor([0.], dtype=torch.float64), tensor([2.], dtype=torch.float64))
    """
    d, b = diagonal.double(), beside[:, :-1].double()
    usable = torch.cat([d, b], 1).isfinite().all(1)[:, None]
    d, b = torch.where(usable, d, 0.0), torch.diag_embed(torch.where(usable, b, 0.0), -1)
    values = torch.where(usable, converged_eigvalsh(torch.diag_embed(d) + b + b.mT), torch.nan)
    return values[:, 0], values[:, -1]
