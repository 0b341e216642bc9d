"""The singular value decomposition of a small matrix, where a GPU has it: without a wait for the host.

The host would be asked for a problem that takes it milliseconds, in between two products that take a part of
that, and a pool of threads on a host that others use as well makes dozens of it. A library's SVD on the
device takes longer still.
"""

from __future__ import annotations

import math

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.dispatch import kernel, trial
from neula.kernels.polar.svd import converged_svd

MAX_ORDER = 128
"""Shared memory of the kernel."""


@trial("The kernel for small singular value decompositions", "the host computes them")
def _tried(device: torch.device) -> None:
    small_svd.kernel(torch.eye(1, dtype=torch.float64, device=device))


@kernel(
    "small_svd_cuda",
    trial=_tried,
    when=lambda r: 0 < len(r) <= MAX_ORDER and r.dtype == torch.float64,
)
def small_svd(r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``R = W diag(s) X^H``, s descending, for R (n, n) in double precision; on a GPU by a kernel, elsewhere
    by LAPACK.

    All NaN where R has NaN or Inf. The kernel computes ``W = R X diag(s)^-1``, whose columns err by ``u s_1 /
    s_i``: where s vanishes they are none.

    Examples
    --------
    >>> small_svd(torch.tensor([[2.0, 0.0], [0.0, 3.0]], dtype=torch.float64))[1]
    tensor([3., 2.], dtype=torch.float64)
    """
    on_host = r.cpu()
    if not bool(on_host.isfinite().all()):
        nan = torch.full_like(r, math.nan)
        return nan, nan[0].real, nan
    w, s, xh = converged_svd(on_host)
    return w.to(r.device), s.to(r.device), xh.mH.to(r.device)


LANES = 16
"""Threads for each pair of columns."""

MOST_THREADS = 1024


def shared_bytes(n: int) -> int:
    """Memory of n columns that are filled up to a multiple of the lanes, and of their norms."""
    return 8 * n * (-(-n // LANES) * LANES + 1)


def threads_for(n: int) -> int:
    """Whole warps with a half for each pair of n columns, one more if n is odd."""
    return min(MOST_THREADS, -(-(n + 1) // 4) * 2 * LANES)


def small_svd_cuda(r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n = len(r)
    x, s = torch.empty_like(r, memory_format=torch.contiguous_format), r.new_empty(n)
    kernel = compiled("small_svd", "small_svd", r.device, shared_bytes=shared_bytes(MAX_ORDER))
    kernel((1, 1, 1), (threads_for(n), 1, 1), [r, x, s, n, *r.stride()], shared_bytes(n))
    return (r @ x.mT).div_(s), s, x.mT
