"""Where kernels are tested: on the GPU where there is one (``pytest -m gpu``), otherwise on the CPU."""

from __future__ import annotations

import pytest
import torch
from tests import matrices

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else torch.device("cpu")
GPU = [pytest.mark.gpu] if HAS_GPU else []
KERNEL = pytest.param("kernel", marks=GPU)


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Standard normal numbers, always the same for a shape."""
    return matrices.normal(*shape, seed=None, dtype=dtype).to(DEVICE)


class OnGPU(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda, device = True, torch.device("cuda", 0)
