"""The first column of each matrix projected out of the others, and put back into R once they are factorized.

Where all columns have a large part in common, recursive Gram-Schmidt loses orthogonality with the square of
the condition number: each level projects out of what is large a Q that is orthonormal only up to the one
condition number. Most often the first column has that part, too. Both ends of a factorization are passes over
memory that convert numbers anyhow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.kernels.dispatch import kernel, trial
from neula.kernels.magnitudes import squares


class ProjectedMatrices(NamedTuple):
    """A batch of matrices in double precision."""

    # Shape (batch, m, n). Contiguous. The first column as it was, the others without multiples of it; noise
    # for those that vanish.
    a: torch.Tensor
    # Shape (batch, n): float64: of the first column, zero for itself and for columns that vanish.
    multiples: torch.Tensor
    vanished: torch.Tensor  # bool, shape (batch, n): columns that hold nothing but zeros


@trial("The kernels at both ends of a batched QR", "library calls take their place, half a dozen passes")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, 1, dtype=torch.float32, device=device)
    work, multiples, vanished = without_first_column.kernel(one, one[0])
    with_first_column.kernel(work, multiples, vanished, torch.float32)


def _any(a: torch.Tensor, *_: object) -> bool:
    return a.numel() > 0


@kernel("neula.kernels.qr.first_column_triton:without_first_column_triton", trial=_tried, when=_any)
def without_first_column(a: torch.Tensor, noise: torch.Tensor) -> ProjectedMatrices:
    """Matrices in double precision, their first column projected out of the others.

    Parameters
    ----------
    a : Tensor, shape (batch, m, n)
        Of any floating dtype and any strides.
    noise : Tensor, shape (m, n)
        float32: what columns that vanish become, so that Q has orthonormal ones in their places.

    Returns
    -------
    ProjectedMatrices

    Examples
    --------
    >>> import torch
    >>> a = torch.tensor([[[1.0, 2.0, 0.0], [1.0, 4.0, 0.0], [0.0, 1.0, 0.0]]])
    >>> work, multiples, vanished = without_first_column(a, torch.ones(3, 3))
    >>> work
    tensor([[[ 1., -1.,  1.],
             [ 1.,  1.,  1.],
             [ 0.,  1.,  1.]]], dtype=torch.float64)
    >>> multiples, vanished
    (tensor([[0., 3., 0.]], dtype=torch.float64), tensor([[False, False,  True]]))
    """
    vanished = ~a.any(1)
    dtype = torch.promote_types(a.dtype, torch.float64)
    work = torch.where(vanished[:, None], noise.to(dtype), a.to(dtype)).contiguous()
    first = work[:, :, :1]
    multiples = (first.conj() * work).sum(1) / squares(first).sum(1)
    multiples[:, 0] = 0
    multiples.masked_fill_(vanished | vanished[:, :1], 0.0)
    return ProjectedMatrices(work.sub_(first * multiples[:, None]), multiples, vanished)


@kernel("neula.kernels.qr.first_column_triton:with_first_column_triton", trial=_tried, when=_any)
def with_first_column(
    r: torch.Tensor, multiples: torch.Tensor, vanished: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """R of the matrices as they were, given R of :class:`ProjectedMatrices`: zero where columns vanish.

    Parameters
    ----------
    r : Tensor, shape (batch, n, n)
        float64, contiguous. Elements below the diagonal are not read.
    multiples, vanished : Tensor
    dtype : torch.dtype
        Of the result.
    """
    r = r.triu()
    r[:, 0] += multiples * r[:, 0, :1]
    return r.masked_fill_(vanished[:, None], 0.0).to(dtype)
