"""QR of small matrices by one thread block each, in CUDA C++."""

from __future__ import annotations

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.launch import multiprocessors, shared_memory
from neula.kernels.small_problems.small_qr import MAX_COLUMNS, MOST, SmallQR

THREADS, SIDE = 256, 16


def shared_bytes(m: int, n: int) -> int:
    """Shared memory that a matrix takes, as ``Matrix`` in the kernel says."""
    pitch = MAX_COLUMNS + 1
    squares = (MAX_COLUMNS + max(3 * n, MAX_COLUMNS)) * pitch
    return 8 * (squares + 2 * MAX_COLUMNS + THREADS // 32 + (m + SIDE) * (n | 1) + SIDE)


def fits(a: torch.Tensor) -> bool:
    """Whether the kernel is made for matrices, and has room for all of them at a time."""
    (count, m, n), device = a.shape, a.device
    usual = a.dtype in (torch.float32, torch.float64) and max(a.stride()) < 1 << 31
    few = 0 < n <= min(m, MAX_COLUMNS) and shared_bytes(m, n) <= shared_memory(device)
    return usual and few and 0 < count <= multiprocessors(device)


def macros_of(dtype: torch.dtype) -> str:
    """Macros before the source, for matrices of a dtype."""
    return f"#define REAL {'double' if dtype == torch.float64 else 'float'}\n"


def small_qr_cuda(a: torch.Tensor, enough: float) -> SmallQR:
    """:func:`neula.kernels.small_problems.small_qr.small_qr` by the kernel, queued on the current stream.

    Raises
    ------
    ImportError
        Without a torch that compiles CUDA.
    """
    (count, m, n), device = a.shape, a.device
    q, r = (torch.empty(count, rows, n, dtype=a.dtype, device=device) for rows in (m, n))
    measures = torch.empty(count, 3, dtype=torch.float64, device=device)
    with torch.cuda.device_of(a):
        most = shared_memory(device)
        kernel = compiled("small_qr", "small_qr", device, macros_of(a.dtype), shared_bytes=most)
        apart, row, column = a.stride()
        arguments = [a, q, r, measures, enough, MOST, m, n, row, column, apart if count > 1 else 0]
        kernel((count, 1, 1), (THREADS, 1, 1), arguments, shared_bytes(m, n))
    return SmallQR(q, r, measures)
