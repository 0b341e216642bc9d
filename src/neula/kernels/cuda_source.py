"""Kernels in CUDA C++, compiled by NVRTC at the first call for a device."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch


@lru_cache
def compiled(name: str, function: str, device: torch.device, macros: str = "", shared_bytes: int = 0) -> Any:
    """A function of ``name.cu``, to be launched on a device.

    Parameters
    ----------
    name, function : str
    device : torch.device
    macros : str
        What comes before the source.
    shared_bytes : int
        Dynamic shared memory of a thread block, where it is more than a kernel may have unasked.

    Raises
    ------
    ImportError
        Without a torch that compiles CUDA.
    """
    if not hasattr(torch.cuda, "_compile_kernel"):
        raise ImportError("compiling CUDA needs torch >= 2.9")
    source = macros + Path(__file__).with_name(f"{name}.cu").read_text()
    with torch.cuda.device(device):
        kernel = torch.cuda._compile_kernel(source, function)
        if shared_bytes:
            kernel.set_shared_memory_config(shared_bytes)
    return kernel
