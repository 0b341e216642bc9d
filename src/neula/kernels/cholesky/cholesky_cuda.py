"""The kernel of :mod:`neula.kernels.cholesky.cholesky`, in CUDA C++, compiled by NVRTC at the first call.

CUDA rather than Triton: square roots follow one another, each lane of a warp holds rows in registers, and
other warps work meanwhile. Triton has neither lanes nor warps that do different things; what it would do for
a column at a time takes longer than the library.
"""

from __future__ import annotations

import torch

from neula.kernels.cholesky.cholesky import MAX_COLUMNS, CholeskyFactors, LowerFactors
from neula.kernels.cuda_source import compiled

THREADS = 4
"""For each column that there is room for."""

NARROWEST = 32
"""Columns for which there is room at least."""


def shared_bytes(width: int) -> int:
    """For R and its inverse, their diagonal blocks of 16 columns, in rows of 4 more numbers, and vectors."""
    return 4 * ((width + 2 * 16) * (width + 4) + 3 * width)


SHARED_BYTES = shared_bytes(MAX_COLUMNS)


def cholesky_inverse_cuda(gram: torch.Tensor, out: torch.Tensor | None = None) -> CholeskyFactors:
    """:func:`neula.kernels.cholesky.cholesky.cholesky_inverse` by the kernel, queued on the current stream.

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
    """:func:`neula.kernels.cholesky.cholesky.cholesky_lower` by the kernel, queued on the current stream.

    Raises
    ------
    ImportError
        Without a torch that compiles CUDA.
    """
    inverse = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    return LowerFactors(inverse, _factor(a, a, inverse, MAX_COLUMNS))


def cholesky_apart_cuda(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`neula.kernels.cholesky.cholesky.cholesky_apart` by the kernel, queued on the current stream.

    Raises
    ------
    ImportError
        Without a torch that compiles CUDA.
    """
    lower, width = torch.empty(a.shape, dtype=torch.float32, device=a.device), NARROWEST
    while width < a.shape[1]:
        width *= 2
    return lower, _factor(a, lower, None, width)


def _factor(a: torch.Tensor, lower: torch.Tensor, inverse: torch.Tensor | None, width: int) -> torch.Tensor:
    """Launch with room for so many columns; returns the orders of minors that are not positive."""
    (count, n, _), strides = a.shape, []
    order = torch.empty(count, dtype=torch.int32, device=a.device)
    for x in (a, lower):
        strides += [x.stride(1), x.stride(2), x.stride(0) if count > 1 else 0]
    with torch.cuda.device_of(a):
        macros, nbytes = f"#define WIDTH {width}\n", shared_bytes(width)
        kernel = compiled("cholesky", "cholesky_lower", a.device, macros, shared_bytes=nbytes)
        room = lower if inverse is None else inverse
        arguments = [a, lower, room, order, n, *strides, int(inverse is not None)]
        kernel((count, 1, 1), (THREADS * width, 1, 1), arguments, nbytes)
    return order
