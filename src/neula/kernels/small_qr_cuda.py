"""QR of one small matrix by one thread block, in CUDA C++."""

from __future__ import annotations

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.launch import shared_memory
from neula.kernels.small_qr import MAX_COLUMNS, MOST, SmallQR

THREADS, SIDE = 256, 16


def shared_bytes(m: int, n: int) -> int:
    """Shared memory that a matrix takes, as ``Matrix`` in the kernel says."""
    pitch = MAX_COLUMNS + 1
    squares = (MAX_COLUMNS + max(3 * n, MAX_COLUMNS)) * pitch
    return 8 * (squares + 2 * MAX_COLUMNS + THREADS // 32 + (m + SIDE) * (n | 1) + SIDE)


def fits(a: torch.Tensor) -> bool:
    """Whether the kernel is made for a matrix, and has room for it."""
    m, n = a.shape
    usual = a.dtype in (torch.float32, torch.float64) and max(a.stride()) < 1 << 31
    return usual and 0 < n <= min(m, MAX_COLUMNS) and shared_bytes(m, n) <= shared_memory(a.device)


def macros_of(dtype: torch.dtype) -> str:
    """What comes before the source, for matrices of a dtype."""
    return f"#define REAL {'double' if dtype == torch.float64 else 'float'}\n"


def small_qr_cuda(a: torch.Tensor, enough: float) -> SmallQR:
    """:func:`neula.kernels.small_qr.small_qr` by the kernel, queued on the current stream.

    Raises
    ------
    ImportError
        Without a torch that compiles CUDA.
    """
    (m, n), device = a.shape, a.device
    q, r = torch.empty(m, n, dtype=a.dtype, device=device), torch.empty(n, n, dtype=a.dtype, device=device)
    measures = torch.empty(2, dtype=torch.float64, device=device)
    with torch.cuda.device_of(a):
        most = shared_memory(device)
        kernel = compiled("small_qr", "small_qr", device, macros_of(a.dtype), shared_bytes=most)
        arguments = [a, q, r, measures, enough, MOST, m, n, *a.stride()]
        kernel((1, 1, 1), (THREADS, 1, 1), arguments, shared_bytes(m, n))
    return SmallQR(q, r, measures)
