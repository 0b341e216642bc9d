"""Cholesky factors with diagonal pivoting, which show the rank of a Gram matrix.

A pivot is a maximum over the diagonal, and a row of R a combination of those of the panel, in the cache: one
thread block does a panel, since waiting for others would take longer than the row does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from neula.kernels import scipy_linalg
from neula.kernels.dispatch import kernel, trial
from neula.kernels.launch import next_power_of_2
from neula.kernels.triton_source import jit, tl

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
    """Cholesky factors of a positive semidefinite matrix in double precision, the largest diagonal element
    first, until none exceeds the tolerance; overwrites the matrix.

    The choice is that of QR with column pivoting (Higham, "Analysis of the Cholesky decomposition of a
    semi-definite matrix", 1990). The host waits once in a while.
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
    return a.is_cuda and not a.is_complex() and n <= MOST and eliminate_panel.runs(a.device)


def _by_lapack(gram: torch.Tensor, tolerance: float) -> PivotedFactors:
    """Factorize by LAPACK's ``pstrf``, on the host."""
    pstrf = scipy_linalg.lapack.zpstrf if gram.is_complex() else scipy_linalg.lapack.dpstrf
    factor, order, rank, _ = pstrf(gram.cpu().numpy(), tolerance)
    pivots = torch.from_numpy(order.astype(np.int64) - 1).to(gram.device)
    r = torch.empty(rank, len(gram), dtype=gram.dtype, device=gram.device)
    r[:, pivots] = torch.from_numpy(np.triu(factor)[:rank]).to(gram.device)
    left = (gram.diagonal().real - r.abs().square().sum(0))[pivots[rank:]]
    return PivotedFactors(r, pivots[:rank], float(left.amax().clamp_min(0.0)) if len(left) else 0.0)


def _begun(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Workspaces before the first pivot."""
    n = len(gram)
    pivots = torch.zeros(n, dtype=torch.int32, device=gram.device)
    return gram, gram.diagonal().real.clone(), torch.zeros_like(gram), pivots, pivots.new_zeros(1)


@kernel("eliminate_panel_triton", trial=_tried, when=lambda gram, *_: gram.shape[0] <= MOST)
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

    ``gram`` (n, n) is without what rows of R before ``start`` contribute, ``diagonal`` is that of what is
    left of it, -Inf where the column is a pivot, and ``r`` is zero from row ``start`` on. ``pivots`` and
    their ``count`` are int32.
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


LOADED = 16384
"""Numbers of rows of R that are under way at a time."""


def eliminate_panel_triton(gram, diagonal, r, pivots, count, start, tolerance):
    n = len(gram)
    block = max(32, next_power_of_2(n))
    _panel_kernel[(1,)](
        *(gram, gram.stride(0), diagonal, r, r.stride(0), pivots, count, start, n, tolerance),
        *(PANEL, min(8, max(1, LOADED // block)), block),
        num_warps=max(1, min(32, block // 64)),
    )


@jit(do_not_specialize=["start", "n", "tolerance"])
def _panel_kernel(
    gram, gram_row, diagonal, r, r_row, pivots, count, start, n, tolerance,
    PANEL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    d = tl.load(diagonal + i, mask=i < n, other=float("-inf"))
    known = tl.load(count)
    r += tl.cast(start, tl.int64) * r_row
    j = 0
    value, p = tl.max(d, axis=0, return_indices=True)
    while (j < PANEL) & (start + j < n) & (known == start + j) & (value > tolerance):
        row = tl.load(gram + tl.cast(p, tl.int64) * gram_row + i, mask=i < n, other=0.0)
        for first in range(0, j, ROWS):
            k = first + tl.arange(0, ROWS)
            place = r + tl.cast(k, tl.int64)[None, :] * r_row
            others = tl.load(place + i[:, None], mask=(k < j)[None, :] & (i < n)[:, None], other=0.0)
            row -= tl.sum(others * tl.load(place + p, mask=(k < j)[None, :], other=0.0), axis=1)
        row = tl.where(d == float("-inf"), 0.0, row / tl.sqrt(value))
        tl.store(r + tl.cast(j, tl.int64) * r_row + i, row, mask=i < n)
        tl.store(pivots + start + j, p)
        d = tl.where(i == p, float("-inf"), d - row * row)
        known += 1
        j += 1
        value, p = tl.max(d, axis=0, return_indices=True)
        # Others read what this thread has written.
        tl.debug_barrier()
    tl.store(diagonal + i, d, mask=i < n)
    tl.store(count, known)
