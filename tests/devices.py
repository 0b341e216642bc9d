"""Where kernels are tested: on the GPU where there is one (``pytest -m gpu``), otherwise on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import matrices

from neula.kernels.dispatch import Kernel

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else torch.device("cpu")
GPU = [pytest.mark.gpu] if HAS_GPU else []
KERNEL = pytest.param("kernel", marks=GPU)


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Standard normal numbers, always the same for a shape."""
    return matrices.normal(*shape, seed=None, dtype=dtype).to(DEVICE)


def variants(function: Kernel[Any, Any], *params: Any) -> Any:
    """A fixture: the definition of a kernel, the function that dispatches, ``on_host``, or the kernel."""

    @pytest.fixture(params=params or ["reference", KERNEL])
    def variant(request: pytest.FixtureRequest) -> Any:
        if request.param == "on_host":
            return request.getfixturevalue("on_host")
        if request.param != "kernel":
            return function.reference if request.param == "reference" else function
        if function.kernel.__name__.endswith("_triton"):
            pytest.importorskip("triton")
        return function.kernel

    return variant


class OnGPU(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda, device = True, torch.device("cuda", 0)
