"""Multiplication by powers of two: the kernel on a CPU or on a GPU gives the reference's bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, GPU, HAS_GPU, KERNEL

from neula.kernels import shift as module
from neula.kernels.shift import shift


@pytest.fixture(name="way", params=[KERNEL, pytest.param("function", marks=GPU)])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    if request.param == "function":
        return shift
    if not HAS_GPU:
        monkeypatch.setattr(module, "compiled", request.getfixturevalue("compiled_on_host"))
    return module.shift_cuda


@pytest.mark.parametrize(
    ("shape", "of_exponents"),
    [
        ((3, 70, 40), (3, 1, 40)),
        ((3, 70, 40), (3, 70, 1)),
        ((2, 1, 5), (2, 30, 1)),
        ((50,), (50,)),
        ((20, 30), (1, 30)),
        ((1, 1), (1, 1)),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_the_bits_of_the_reference(  # type: ignore[no-untyped-def]
    way, shape: tuple[int, ...], of_exponents: tuple[int, ...], transposed: bool, integer: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    if transposed and x.ndim > 1:
        x = x.mT.contiguous().mT
    exponents = torch.randint(-2200, 2200, of_exponents, generator=generator, dtype=integer)
    exponents[torch.rand(of_exponents, generator=generator) < 0.5] //= 100
    found = way(x.to(DEVICE), exponents.to(DEVICE))
    assert torch.equal(found.cpu(), shift.reference(x, exponents))


def test_ends_of_the_range(way) -> None:  # type: ignore[no-untyped-def]
    x = torch.tensor([2.0**-1000, 2.0**-1074, 1.0, 0.0, torch.inf, torch.nan, 1.5], dtype=torch.float64)
    exponents = torch.tensor([2023, 1074, 1024, 5000, -5000, 3, -1074])
    found = way(x.to(DEVICE), exponents.to(DEVICE)).tolist()
    assert found[:3] == [2.0**1023, 1.0, float("inf")]
    assert found[3] == 0.0
    assert found[5] != found[5]
    assert found[6] == 2.0**-1073  # 1.5 units, rounded to even


def test_nothing_to_shift() -> None:
    x = torch.empty(0, 3, dtype=torch.float64, device=DEVICE)
    assert shift(x, torch.zeros(1, 3, dtype=torch.int32, device=DEVICE)).shape == (0, 3)


@pytest.mark.parametrize("forward", [pytest.param(x, marks=GPU) for x in (False, True)])
def test_what_is_differentiated_is_left_to_the_reference(forward: bool) -> None:
    x = torch.rand(2, 3, dtype=torch.float64, device=DEVICE)
    exponents = torch.tensor([-3, 0, 5], device=DEVICE)
    expected = torch.tensor([0.125, 1.0, 32.0], dtype=torch.float64).expand(2, 3)
    if forward:
        found = torch.func.jvp(lambda y: shift(y, exponents), (x,), (torch.ones_like(x),))[1]
    else:
        (found,) = torch.autograd.grad(shift(x.requires_grad_(), exponents).sum(), x)
    assert torch.equal(found.cpu(), expected)
