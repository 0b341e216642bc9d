"""The one process-wide switch that neula has to touch: how CUDA multiplies float32 matrices.

cuBLAS takes the precision of a float32 product from a global of torch, not from an argument. It is set for
the launch only, under a lock, and restored; products of half-precision operands never come here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.RLock()


@contextmanager
def cuda_matmul_precision(precision: str) -> Iterator[None]:
    """Multiply float32 CUDA matrices in ``"ieee"`` or ``"tf32"`` arithmetic inside the context."""
    switch = torch.backends.cuda.matmul
    with _lock:
        before = switch.fp32_precision
        if before == precision:
            yield
            return
        switch.fp32_precision = precision
        try:
            yield
        finally:
            switch.fp32_precision = before


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """No gradients, and no autocast that would round operands behind an engine's back."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def exact_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` in the full precision of its dtype, whatever the user's switches for CUDA say."""
    if a.dtype != torch.float32 or not a.is_cuda:
        return a @ b
    with cuda_matmul_precision("ieee"):
        return a @ b
