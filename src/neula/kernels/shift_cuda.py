"""``x 2^e`` on a GPU in one launch, in CUDA C++."""

from __future__ import annotations

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.shift import LIMIT

THREADS = 256


def shift_cuda(x: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """:func:`neula.kernels.shift.shift` by the kernel, queued on the current stream."""
    if exponents.dtype.itemsize < 4:
        exponents = exponents.int()
    x, exponents = torch.broadcast_tensors(x, exponents)
    found = out = torch.empty_like(x)
    while x.ndim < 3:
        x, exponents, out = x[None], exponents[None], out[None]
    # In the order in which the result lies in memory, the last index runs fastest.
    order = sorted(range(3), key=out.stride, reverse=True)
    strides = (tensor.stride(i) for tensor in (x, exponents, out) for i in order)
    _, *sizes = (x.shape[i] for i in order)
    with torch.cuda.device_of(x):
        kernel = compiled("shift", "shift", x.device)
        arguments = [x, exponents, out, x.numel(), *sizes, *strides, exponents.itemsize, LIMIT]
        kernel((-(-x.numel() // THREADS), 1, 1), (THREADS, 1, 1), arguments)
    return found
