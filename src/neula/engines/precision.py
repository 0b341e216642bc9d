"""The process-wide switches that neula has to touch: how CUDA sums, and multiplies float32 matrices.

cuBLAS takes the precision of a float32 product, and that of the sums behind a product in half precision, from
globals of torch, not from arguments. They are set for the launch only, under a lock, and restored; products
of half-precision operands with a float32 result never come here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.RLock()

_HALF_PRECISION_SUMS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


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
def full_precision_sums() -> Iterator[None]:
    """Sum products of half precision in float32 to the end inside the context, also where k is cut up.

    By default cuBLAS may add the parts in half precision where the result is in it, and the user may have
    asked for worse.
    """
    switch = torch.backends.cuda.matmul
    with _lock:
        before = {name: True for name in _HALF_PRECISION_SUMS if getattr(switch, name)}
        cut_up = {name: getattr(switch, f"{name}_split_k", None) for name in before}
        for name in before:
            setattr(switch, name, False)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(switch, name, value if cut_up[name] is None else (value, cut_up[name]))


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
