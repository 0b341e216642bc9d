"""A symmetric matrix of which one triangle is given, scaled, as a whole: the copy that a factorization
overwrites.
"""

from __future__ import annotations

import torch

from neula.kernels.dispatch import kernel, trial


@trial("The kernel that copies symmetric matrices", "several passes of the library's take its place")
def _tried(device: torch.device) -> None:
    symmetric_copy.kernel(torch.ones(1, 2, 2, device=device), torch.ones(1, 2, device=device))


@kernel(
    "neula.kernels.symmetric_triton:symmetric_copy_triton",
    trial=_tried,
    when=lambda a, *_, **__: 0 not in a.shape,
)
def symmetric_copy(a: torch.Tensor, scales: torch.Tensor, *, rows: int = 0) -> torch.Tensor:
    """``D A D`` of a batch of symmetric matrices whose lower triangles are read, and what is above them is
    not.

    Parameters
    ----------
    a : Tensor, shape (batch, n, n)
        Of any floating dtype and any strides.
    scales : Tensor, shape (batch, n)
        The diagonals of D: powers of two, in the dtype of the result.
    rows : int, optional
        What lies between two columns of the result in memory, at least n.

    Returns
    -------
    Tensor, shape (batch, n, n)
        Column-major, at least float32.

    Examples
    --------
    >>> a = torch.tensor([[[1.0, torch.nan], [2.0, 3.0]]])
    >>> symmetric_copy(a, torch.tensor([[1.0, 2.0]]))
    tensor([[[ 1.,  4.],
             [ 4., 12.]]])
    """
    out = room_for(a, rows)
    # A row times its scale stays in the range: of a definite matrix it is at most the root of a diagonal
    # element.
    lower = a.tril().to(out.dtype) * scales[:, :, None] * scales[:, None]
    return torch.add(lower, lower.tril(-1).mT, out=out)


def room_for(a: torch.Tensor, rows: int) -> torch.Tensor:
    """Uninitialized, for the result."""
    count, n, _ = a.shape
    dtype = torch.promote_types(a.dtype, torch.float32)
    return torch.empty(count, n, max(n, rows), dtype=dtype, device=a.device).mT[:, :n]
