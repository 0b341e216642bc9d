"""QR of one small matrix in one launch, from the matrix to the certificate."""

from __future__ import annotations

from typing import NamedTuple

import torch

from neula.kernels.cuda_source import ready
from neula.kernels.dispatch import kernel, trial

MAX_COLUMNS = 64
"""Columns at most: elements of a Gram matrix of them are in the registers of one thread block."""

MOST = 3
"""Passes: two where the condition number is below 1e8, and the third is for those near that."""


class SmallQR(NamedTuple):
    """Factors with what is measured of them.

    Attributes
    ----------
    q : Tensor, shape (m, n)
    r : Tensor, shape (n, n)
        Upper triangular, its diagonal positive. NaN where A is too ill-conditioned, or not finite.
    measures : Tensor, shape (2,)
        ``||(A - Q R) D^-1||_F / sqrt(n)``, D being the norms of the columns of A, and
        ``||I - Q^T Q||_F / sqrt(n)``, of the factors as they are returned, in float64.
    """

    q: torch.Tensor
    r: torch.Tensor
    measures: torch.Tensor


@trial("The kernel of small QR factorizations", "LAPACK on the host takes its place")
def _tried(device: torch.device, itemsize: int) -> None:
    a = torch.eye(2, dtype=torch.float64 if itemsize == 8 else torch.float32, device=device)
    small_qr.kernel(a, 0.1)


def _pays(a: torch.Tensor, enough: float) -> bool:
    """Whether the kernel has room for a matrix, and is compiled, or to be waited for."""
    from neula.kernels.small_qr_cuda import fits, macros_of

    return fits(a) and ready("small_qr", a.device, macros_of(a.dtype))


@kernel(
    "neula.kernels.small_qr_cuda:small_qr_cuda",
    trial=_tried,
    when=_pays,
    variant=lambda a, enough: a.dtype.itemsize,
)
def small_qr(a: torch.Tensor, enough: float) -> SmallQR:
    """Cholesky QR in double precision, repeated until Q is orthonormal.

    Parameters
    ----------
    a : Tensor, shape (m, n), m >= n > 0
        float32 or float64; factors are rounded to its dtype.
    enough : float
        ``||I - Q^T Q||_F`` that is small enough.

    Examples
    --------
    >>> small_qr(torch.tensor([[3.0, 3.0], [0.0, 2.0], [4.0, 4.0]]), 1e-9).r
    tensor([[5., 5.],
            [0., 2.]])
    """
    q = given = a.double()
    n, passes = a.shape[1], 0
    r = identity = torch.eye(n, dtype=q.dtype, device=q.device)
    norm = torch.linalg.matrix_norm
    while passes == 0 or (passes < MOST and norm(identity - q.T @ q) > enough):
        lower, info = torch.linalg.cholesky_ex(q.T @ q)
        q = torch.linalg.solve_triangular(lower.T.masked_fill(info > 0, torch.nan), q, upper=True, left=False)
        r, passes = lower.T @ r, passes + 1
    q, r = q.to(a.dtype), r.to(a.dtype)
    missed = (given - q.double() @ r.double()) / torch.linalg.vector_norm(given, dim=0)
    loss = identity - q.double().T @ q.double()
    return SmallQR(q, r, torch.stack([norm(missed), norm(loss)]) / n**0.5)
