"""The kernel of :mod:`neula.kernels.cholesky`, in CUDA C++, compiled by NVRTC at the first call.

CUDA rather than Triton: square roots follow one another, each lane of a warp holds rows in registers, and
other warps work meanwhile. Triton has neither lanes nor warps that do different things; what it would do for
a column at a time takes longer than the library.
"""

from __future__ import annotations

import torch

from neula.kernels.cholesky import MAX_COLUMNS, CholeskyFactors, LowerFactors
from neula.kernels.cuda_source import compiled

THREADS = 4
"""For each column that there is room for."""

NARROWEST = 32
"""Columns for which there is room at least."""


def shared_bytes(width: int, *, measures: bool = False) -> int:
    """For R and its inverse, their diagonal blocks of 16 columns, in rows of 4 more numbers, and vectors.

    Two more numbers for each thread, in double precision, to measure.
    """
    return 4 * ((width + 2 * 16) * (width + 4) + 3 * width) + measures * 2 * 8 * THREADS * width


SHARED_BYTES = shared_bytes(MAX_COLUMNS)


def cholesky_inverse_cuda(gram: torch.Tensor, out: torch.Tensor | None = None) -> CholeskyFactors:
    """:func:`neula.kernels.cholesky.cholesky_inverse` by the kernel, queued on the current stream.

    Raises
    ------
    ImportError
        Without a torch that compiles CUDA.
    """
    n = len(gram)
    # One allocation for all of it: in a graph, and without one, they are what takes time here.
    room = torch.empty(2 * n + 1, n, dtype=torch.float32, device=gram.device)
    inverse, r, norms = room[:n], room[n:-1] if out is None else out, room[-1]
    with torch.cuda.device_of(gram):
        arguments = [gram.contiguous(), r, inverse, norms, n, *r.stride()]
        kernel = compiled("cholesky", "cholesky_inverse", gram.device, shared_bytes=SHARED_BYTES)
        kernel((1, 1, 1), (THREADS * MAX_COLUMNS, 1, 1), arguments, SHARED_BYTES)
    return CholeskyFactors(r, inverse, norms)


def cholesky_lower_cuda(a: torch.Tensor) -> LowerFactors:
    """:func:`neula.kernels.cholesky.cholesky_lower` by the kernel, queued on the current stream.

    Raises
    ------
    ImportError
        Without a torch that compiles CUDA.
    """
    count, n, _ = a.shape
    inverse = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    order = torch.empty(count, dtype=torch.int32, device=a.device)
    strides = [a.stride(1), a.stride(2), a.stride(0) if count > 1 else 0]
    with torch.cuda.device_of(a):
        kernel = compiled("cholesky", "cholesky_lower", a.device, shared_bytes=SHARED_BYTES)
        arguments = [a, a, inverse, order, n, *strides, *strides]
        kernel((count, 1, 1), (THREADS * MAX_COLUMNS, 1, 1), arguments, SHARED_BYTES)
    return LowerFactors(inverse, order)


def cholesky_measured_cuda(a: torch.Tensor, probes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`neula.kernels.cholesky.cholesky_measured` by the kernel, queued on the current stream.

    Raises
    ------
    ImportError
        Without a torch that compiles CUDA.
    """
    (count, n, _), width = a.shape, NARROWEST
    while width < n:
        width *= 2
    lower = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    measured = torch.empty(2, count, dtype=torch.float64, device=a.device)
    with torch.cuda.device_of(a):
        macros, nbytes = f"#define WIDTH {width}\n", shared_bytes(width, measures=True)
        kernel = compiled("cholesky", "cholesky_measured", a.device, macros, shared_bytes=nbytes)
        arguments = [
            *(a, probes.contiguous(), lower, measured, n),
            *(a.stride(1), a.stride(2), a.stride(0), count),
        ]
        kernel((count, 1, 1), (THREADS * width, 1, 1), arguments, nbytes)
    return lower, measured
