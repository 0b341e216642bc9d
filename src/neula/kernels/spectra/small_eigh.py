"""Eigenvalues and eigenvectors of batches of small symmetric matrices, each in registers of a GPU."""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial

MAX_ORDER = {torch.float32: 128, torch.float64: 64}
"""Largest order that registers hold; up to half of it a thread has two whole columns."""


@trial("The kernel for small eigenvalue problems", "the library's takes its place")
def _tried(device: torch.device, order: int) -> None:
    dtype = torch.float32 if order > 0 else torch.float64
    small_eigh.kernel(torch.eye(abs(order), dtype=dtype, device=device)[None])


def order_for(n: int) -> int:
    """Order that the kernel is compiled for, to decompose matrices of order n."""
    return max(4, 1 << (n - 1).bit_length())


@kernel(
    "neula.kernels.spectra.small_eigh_cuda:small_eigh_cuda",
    trial=_tried,
    when=lambda a: a.numel() > 0 and a.shape[-1] <= MAX_ORDER.get(a.dtype, 0),
    variant=lambda a: order_for(a.shape[-1]) * (1 if a.dtype == torch.float32 else -1),
)
def small_eigh(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``A = V diag(w) V^T`` of symmetric matrices; on a GPU by Jacobi rotations, elsewhere by LAPACK.

    Parameters
    ----------
    a : Tensor, shape (..., n, n)
        float32 or float64; symmetric: the kernel reads both triangles, LAPACK the lower one.

    Returns
    -------
    w : Tensor, shape (..., n)
        Ascending. NaN in the kernel's results where A has NaN or Inf; LAPACK refuses these.
    v : Tensor, shape (..., n, n)

    Examples
    --------
    >>> import torch
    >>> from neula.kernels.spectra.small_eigh import small_eigh
    >>> small_eigh(torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64))[0]
    tensor([1., 3.], dtype=torch.float64)
    """
    w, v = torch.linalg.eigh(a)
    return w, v
