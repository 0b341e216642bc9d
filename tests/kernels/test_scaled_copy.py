"""Scaled copies: one rounding of what torch computes, in any order of memory.

The kernel runs on the GPU where there is one (``pytest -m gpu``), in Triton's interpreter elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from neula.kernels.scaled_copy import scaled_copy

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", torch.cuda.current_device()) if HAS_GPU else torch.device("cpu")
GPU = [pytest.mark.gpu] if HAS_GPU else []

Copy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(params=["dispatch", pytest.param("kernel", marks=GPU)])
def copy(request: pytest.FixtureRequest) -> Copy:
    if request.param == "dispatch":
        return scaled_copy
    pytest.importorskip("triton")
    from triton.runtime.interpreter import InterpretedFunction

    from neula.kernels import scaled_copy_triton

    if not HAS_GPU and not isinstance(scaled_copy_triton._scaled_copy, InterpretedFunction):
        pytest.skip("Triton was imported before its interpreter could be chosen: run tests/kernels by itself")
    return scaled_copy_triton.scaled_copy_triton


@pytest.mark.parametrize(("m", "n"), [(1, 1), (64, 64), (130, 70), (3, 200), (200, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("into", [torch.float32, torch.float64])
@pytest.mark.parametrize("orders", ["rows to columns", "columns to columns", "columns to rows"])
def test_every_order(copy: Copy, m: int, n: int, dtype: torch.dtype, into: torch.dtype, orders: str) -> None:
    before, after = orders.split(" to ")
    generator = torch.Generator().manual_seed(m)
    a = torch.randn(m, n, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
    a = a if before == "rows" else a.mT.contiguous().mT
    out = torch.full((n, m), torch.nan, dtype=into, device=DEVICE).mT
    out = out.contiguous() if after == "rows" else out
    scales = torch.rand(n, generator=generator).to(DEVICE, torch.float64)
    assert copy(out, a, scales) is out
    assert torch.equal(out, (a.double() * scales).to(into))


def test_in_place(copy: Copy) -> None:
    a = torch.arange(200.0 * 90, device=DEVICE).reshape(90, 200).mT
    scales = 2.0 ** torch.arange(90, device=DEVICE)
    expected = a * scales
    assert torch.equal(copy(a, a, scales), expected)
