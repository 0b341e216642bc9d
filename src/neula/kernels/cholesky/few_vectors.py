"""Cholesky factors of Gram matrices of a few vectors, some of which may depend on others."""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.kernels.dispatch import kernel, trial

VECTORS = 16
"""Up to how many vectors the kernel takes."""

BLURRED = 1e-10
"""Square of the part of a vector that others leave, below which its Gram matrix shows hardly half of the
digits of that square."""


class Steps(NamedTuple):
    """How vectors become orthonormal."""

    # Shape (k, k): upper triangular: vectors times this are nearly orthonormal; those that may depend on
    # others are only made orthogonal to them.
    inverse: torch.Tensor
    # Shape (k, k): upper triangular: the orthonormal vectors times this are what there was at first.
    factor: torch.Tensor
    fails: torch.Tensor  # shape (k,): int32: 1 for vectors that were not normalized


@trial("The kernel of Gram matrices of a few vectors", "a dozen launches for each vector take its place")
def _tried(device: torch.device) -> None:
    one = torch.ones(1, 1, dtype=torch.float64, device=device)
    orthonormalizing.kernel(one, one, one[0])


@kernel(
    "neula.kernels.cholesky.few_vectors_triton:orthonormalizing_triton",
    trial=_tried,
    when=lambda gram, *_: gram.dtype == torch.float64 and 0 < len(gram) <= VECTORS,
)
def orthonormalizing(gram: torch.Tensor, factor: torch.Tensor, least: torch.Tensor) -> Steps:
    """One of some rounds of Cholesky QR, without synchronizing.

    The component of a vector orthogonal to those before is normalized if it is not small. Otherwise rounding
    errors of the Gram matrix are too large compared with it, and the next round has that of what is left.

    Parameters
    ----------
    gram : Tensor, shape (k, k)
    factor : Tensor, shape (k, k)
        Of the rounds before: an identity at first.
    least : Tensor, shape (k,)
        Norms up to which what is left of a vector is nothing.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([[3.0, 3.0], [0.0, 2.0]])
    >>> orthonormalizing(x.T @ x, torch.eye(2), torch.zeros(2)).factor
    tensor([[3., 3.],
            [0., 2.]])
    """
    k = len(gram)
    identity = torch.eye(k, dtype=gram.dtype, device=gram.device)
    small, rest = BLURRED * gram.diagonal(), gram
    r, inverse, failed = identity.clone(), identity.clone(), []
    for j in range(k):
        left = rest[j, j]
        # NaN does not fail: it is in everything then.
        fails = (left <= small[j]) | (left.sqrt() * factor[j, j] <= least[j])
        failed.append(fails)
        row = (rest[j] / left.sqrt()).masked_fill(fails, 0.0)
        rest = rest - row[:, None] * row
        r[j, j:] = torch.where(fails, identity[j, j:], row[j:])
        inverse[:, j] = (identity[:, j] - inverse[:, :j] @ r[:j, j]) / r[j, j]
    return Steps(inverse, r @ factor, torch.stack(failed).int())
