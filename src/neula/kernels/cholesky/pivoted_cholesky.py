"""Cholesky factors with diagonal pivoting, which show the rank of a Gram matrix."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from neula.kernels import scipy_linalg
from neula.kernels.dispatch import kernel, trial

PANEL = 32
"""Pivots between two updates of the whole matrix."""

MOST = 4096
"""Order up to which one thread block keeps the diagonal."""

LOOKED = 8
"""Panels after which the host looks whether any pivots are left."""


class PivotedFactors(NamedTuple):
    """``G = R^H R``, about."""

    r: torch.Tensor  # shape (rank, n): Upper trapezoidal with its columns in the order of the pivots
    pivots: torch.Tensor  # shape (rank,): int64: the columns that were chosen, in order
    left: float  # the largest diagonal element of G - R^T R


@trial("The kernel of pivoted Cholesky factors", "sketches pick the pivots")
def _tried(device: torch.device) -> None:
    eliminate_panel.kernel(*_begun(torch.eye(2, dtype=torch.float64, device=device)), 0, 0.5)


def pivoted_cholesky(gram: torch.Tensor, tolerance: float) -> PivotedFactors:
    """Cholesky factors of a positive semidefinite matrix, the largest diagonal element first.

    The choice is that of QR with column pivoting (Higham, "Analysis of the Cholesky decomposition of a
    semi-definite matrix", 1990). The host waits once in a while.

    Parameters
    ----------
    gram : Tensor, shape (n, n)
        In double precision, Hermitian. Overwritten.
    tolerance : float
        Where diagonal elements are at most that, nothing is left.

    Returns
    -------
    PivotedFactors

    Examples
    --------
    >>> import torch
    >>> found = pivoted_cholesky(torch.tensor([[1.0, 2.0], [2.0, 4.0]], dtype=torch.float64), 1e-9)
    >>> found.r.tolist(), found.pivots.tolist(), found.left
    ([[1.0, 2.0]], [1], 0.0)
    """
    n = len(gram)
    begun = gram, diagonal, r, pivots, count = _begun(gram)
    if not eliminate_panel.takes(*begun, 0, tolerance):
        return _by_lapack(gram, tolerance)
    for number, start in enumerate(range(0, n, PANEL)):
        eliminate_panel(*begun, start, tolerance)
        if number % LOOKED == LOOKED - 1 and int(count) < start + PANEL:
            break
        if start + PANEL < n:
            rows = r[start : start + PANEL]
            gram.addmm_(rows.mH, rows, alpha=-1.0)
    rank, left = torch.stack([count[0].double(), diagonal.amax().clamp_min(0.0)]).tolist()
    return PivotedFactors(r[: int(rank)], pivots[: int(rank)].long(), left)


def pivots_on_device(a: torch.Tensor) -> bool:
    """Whether the kernel finds the pivots of ``A^T A``."""
    n = a.shape[1]
    return a.is_cuda and not a.is_complex() and n <= MOST and _tried.passed(a.device)


def _by_lapack(gram: torch.Tensor, tolerance: float) -> PivotedFactors:
    """Factorize by LAPACK's ``pstrf``, on the host."""
    pstrf = scipy_linalg.lapack.zpstrf if gram.is_complex() else scipy_linalg.lapack.dpstrf
    factor, order, rank, _ = pstrf(gram.cpu().numpy(), tolerance)
    pivots = torch.from_numpy(order.astype(np.int64) - 1).to(gram.device)
    r = torch.empty(rank, len(gram), dtype=gram.dtype, device=gram.device)
    r[:, pivots] = torch.from_numpy(np.triu(factor)[:rank]).to(gram.device)
    left = (gram.diagonal().real - r.abs().square().sum(0))[pivots[rank:]]
    return PivotedFactors(r, pivots[:rank], float(left.amax().clamp_min(0.0)) if len(left) else 0.0)


def _begun(
    gram: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Workspaces before the first pivot."""
    n = len(gram)
    pivots = torch.zeros(n, dtype=torch.int32, device=gram.device)
    return gram, gram.diagonal().real.clone(), torch.zeros_like(gram), pivots, pivots.new_zeros(1)


@kernel(
    "neula.kernels.cholesky.pivoted_cholesky_triton:eliminate_panel_triton",
    trial=_tried,
    when=lambda gram, *_: gram.shape[0] <= MOST,
)
def eliminate_panel(
    gram: torch.Tensor,
    diagonal: torch.Tensor,
    r: torch.Tensor,
    pivots: torch.Tensor,
    count: torch.Tensor,
    start: int,
    tolerance: float,
) -> None:
    """The next :data:`PANEL` pivots and their rows of R, fewer where nothing is left.

    Parameters
    ----------
    gram : Tensor, shape (n, n)
        Row-major, without what rows of R before ``start`` contribute.
    diagonal : Tensor, shape (n,)
        Of what is left of it, -Inf where the column is a pivot.
    r : Tensor, shape (n, n)
        Row-major, zero from row ``start`` on.
    pivots : Tensor, shape (n,)
        int32.
    count : Tensor, shape (1,)
        int32: how many there are.
    start : int
    tolerance : float
    """
    for j in range(start, min(start + PANEL, len(gram))):
        value, p = diagonal.max(0)
        if int(count) < j or not bool(value > tolerance):
            return
        row = (gram[p] - r[start:j, p] @ r[start:j]) / value.sqrt()
        r[j] = torch.where(diagonal == -torch.inf, 0.0, row)
        diagonal -= r[j].square()
        diagonal[p] = -torch.inf
        pivots[j] = p
        count += 1
