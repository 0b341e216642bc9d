"""QR of a block of a few columns on a CPU, which no kernel measures."""

from __future__ import annotations

import numpy as np
import torch

from neula.engines.formats import in_double
from neula.kernels.precision import exact_matmul

REFLECTED = 100_000
"""Elements of a block times its columns up to which LAPACK's reflections take less than the calls of
Cholesky QR."""

PASSES = 2
"""Of Cholesky QR: what these do not make orthonormal has columns that depend on each other."""


def block_on_host(x: torch.Tensor, loss: float) -> tuple[torch.Tensor, torch.Tensor]:
    """QR whose Q is as orthonormal as that of reflections whatever the rank, and its residual as small.

    By Cholesky QR with Gram matrices in double precision, twice where that is needed. By LAPACK's reflections
    where columns depend on each other, and where calls take longer than the arithmetic.

    Parameters
    ----------
    x : Tensor, shape (m, l), m >= l
        On the host.
    loss : float
        How large elements of ``Q^H Q - I`` may be.

    Returns
    -------
    q : Tensor, shape (m, l)
    r : Tensor, shape (l, l)
        Upper triangular, the phases of its diagonal as they come.

    Examples
    --------
    >>> import torch
    >>> q, r = block_on_host(torch.ones(4, 2), 1e-6)
    >>> bool((q.T @ q - torch.eye(2)).norm() < 1e-6)
    True
    """
    if x.numel() * x.shape[1] > REFLECTED:
        found = _by_cholesky(x, loss)
        if found is not None:
            return found
    q, r = torch.linalg.qr(x)
    return q, r


def _by_cholesky(x: torch.Tensor, loss: float) -> tuple[torch.Tensor, torch.Tensor] | None:
    q, r, one = x, None, np.eye(x.shape[1])
    for _ in range(PASSES):
        wide = in_double(q)
        factor, info = torch.linalg.cholesky_ex(wide.mH @ wide, upper=True)
        if info:
            return None
        # Not by the inverse, with which A = Q R would err by the condition number.
        q = torch.linalg.solve_triangular(factor.to(x), q, upper=True, left=False)
        r = factor if r is None else factor @ r
        if np.abs(exact_matmul(q.mH, q).numpy() - one).max() <= loss:
            return q, r
    return None
