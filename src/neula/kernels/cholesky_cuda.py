"""The kernel of :mod:`neula.kernels.cholesky`, in CUDA C++, compiled by NVRTC at the first call.

CUDA rather than Triton: square roots follow one another, each lane of a warp holds rows in registers, and
other warps work meanwhile. Triton has neither lanes nor warps that do different things; what it would do for
a column at a time takes longer than the library.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from neula.kernels.cholesky import MAX_COLUMNS, CholeskyFactors

THREADS = 512
SHARED_BYTES = 4 * ((MAX_COLUMNS + 2 * 16) * (MAX_COLUMNS + 4) + 3 * MAX_COLUMNS)
"""R and its inverse, their diagonal blocks of 16 columns, in rows of 4 more than 128 numbers, and vectors."""


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
        _kernel(gram.device)((1, 1, 1), (THREADS, 1, 1), arguments, SHARED_BYTES)
    return CholeskyFactors(r, inverse, norms)


@lru_cache
def _kernel(device: torch.device) -> Any:
    """The compiled kernel for a device."""
    if not hasattr(torch.cuda, "_compile_kernel"):
        raise ImportError("compiling CUDA needs torch >= 2.9")
    source = Path(__file__).with_name("cholesky.cu").read_text()
    with torch.cuda.device(device):
        kernel = torch.cuda._compile_kernel(source, "cholesky_inverse")
        kernel.set_shared_memory_config(SHARED_BYTES)
    return kernel
