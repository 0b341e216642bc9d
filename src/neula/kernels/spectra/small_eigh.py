"""Eigenvalues and eigenvectors of batches of small symmetric matrices, each by a part of a warp of a GPU."""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial

MAX_ORDER = {torch.float32: 128, torch.float64: 64}
"""Of matrices that the registers of a few warps hold; up to half of it a thread has two whole columns."""


@trial("The kernel for small eigenvalue problems", "the library's takes its place")
def _tried(device: torch.device) -> None:
    small_eigh.kernel(torch.eye(2, dtype=torch.float32, device=device)[None])


@kernel(
    "neula.kernels.spectra.small_eigh_cuda:small_eigh_cuda",
    trial=_tried,
    when=lambda a: a.numel() > 0 and a.shape[-1] <= MAX_ORDER.get(a.dtype, 0),
)
def small_eigh(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``A = V diag(w) V^T`` of symmetric matrices; on a GPU by Jacobi rotations, elsewhere by LAPACK.

    Parameters
    ----------
    a : Tensor, shape (..., n, n)
        float32 or float64; symmetric, whichever triangle is read.

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
