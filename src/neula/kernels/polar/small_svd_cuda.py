"""The kernel of :mod:`neula.kernels.polar.small_svd`, in CUDA C++, compiled by NVRTC at the first call."""

from __future__ import annotations

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.polar.small_svd import MAX_ORDER

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
    """:func:`neula.kernels.polar.small_svd.small_svd` by the kernel, queued on the current stream.

    Raises
    ------
    ImportError
        Without a torch that compiles CUDA.
    """
    n = len(r)
    x, s = torch.empty_like(r, memory_format=torch.contiguous_format), r.new_empty(n)
    with torch.cuda.device_of(r):
        kernel = compiled("small_svd", "small_svd", r.device, shared_bytes=shared_bytes(MAX_ORDER))
        kernel((1, 1, 1), (threads_for(n), 1, 1), [r, x, s, n, *r.stride()], shared_bytes(n))
    return (r @ x.mT).div_(s), s, x.mT
