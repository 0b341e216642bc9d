"""Householder QR of the library (LAPACK's or cuSOLVER's geqrf), as a panel and as the last resort."""

from __future__ import annotations

import torch

from neula.engines import Engine


def householder(a: torch.Tensor, engine: Engine | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduced QR with the diagonal of R made nonnegative, as the other panels have it.

    Parameters
    ----------
    a : Tensor, shape (*batch, m, n), m >= n
    engine : Engine, optional
        Unused: nothing is multiplied in a low format.
    """
    q, r = torch.linalg.qr(a)
    sign = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(a.dtype)
    return q.mul_(sign[..., None, :]), r.mul_(sign[..., None])
