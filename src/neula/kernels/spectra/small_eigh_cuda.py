"""The kernel of :mod:`neula.kernels.spectra.small_eigh`, in CUDA C++, compiled by NVRTC at the first call."""

from __future__ import annotations

from typing import Any

import torch

from neula.kernels.cuda_source import compiled
from neula.kernels.launch import ceil_div
from neula.kernels.spectra.small_eigh import MAX_ORDER, order_for


def macros_for(n: int, dtype: torch.dtype) -> dict[str, Any]:
    """The kernel's constants for matrices of order n."""
    order = order_for(n)
    split = 1 if 2 * order <= MAX_ORDER[dtype] else 4  # threads that share two columns
    return {
        "ORDER": order,
        "SPLIT": split,
        "REAL": "float" if dtype == torch.float32 else "double",
        # Of rounding errors of an inner product, as they usually are.
        "TOLERANCE": torch.finfo(dtype).eps * max(1.0, order**0.5 / 8),
        "LARGEST_EXPONENT": 120 if dtype == torch.float32 else 1000,
        "THREADS": max(128, order // 2 * split),  # of several matrices, or of one
    }


def small_eigh_cuda(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`neula.kernels.spectra.small_eigh.small_eigh` by the kernel, queued on the current stream.

    Raises
    ------
    ImportError
        Without a torch that compiles CUDA.
    """
    a, n = a.contiguous(), a.shape[-1]
    count, w, v = a.numel() // n**2, a.new_empty(a.shape[:-1]), torch.empty_like(a)
    macros = macros_for(n, a.dtype)
    source = "".join(f"#define {name} {text}\n" for name, text in macros.items())
    threads, lanes = macros["THREADS"], macros["ORDER"] // 2 * macros["SPLIT"]
    with torch.cuda.device_of(a):
        kernel = compiled("small_eigh", "small_eigh", a.device, source)
        kernel((ceil_div(count, threads // lanes), 1, 1), (threads, 1, 1), [a, w, v, count, n])
    return w, v
