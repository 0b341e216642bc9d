"""Steps of refinement: kernels on a CPU, or on a GPU, give what the references do, NaN included."""

from __future__ import annotations

import math

import pytest
import torch
from tests.devices import DEVICE, HAS_GPU

from neula.certificates.backward_error import Norms
from neula.kernels.doubled.doubled import two_sum
from neula.kernels.small_problems import refining

pytestmark = [pytest.mark.gpu] if HAS_GPU else []

SHAPES = [(1, 5, 1), (3, 300, 2), (7, 1, 4)]
"""Of vectors: problems, unknowns, right-hand sides."""


@pytest.fixture(autouse=True)
def _compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_GPU:
        monkeypatch.setattr(refining, "compiled", request.getfixturevalue("compiled_on_host"))


def by_kernel(name: str, *given: object) -> tuple[torch.Tensor, ...]:
    found = getattr(refining, f"{name}_cuda")(*_on_device(given))
    return tuple(x.cpu() for x in (found if isinstance(found, tuple) else (found,)))


def _on_device(given: tuple) -> tuple:
    moved = (_on_device(x) if isinstance(x, tuple) else x for x in given)
    return tuple(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in moved)


def by_reference(name: str, *given: object) -> tuple[torch.Tensor, ...]:
    found = getattr(refining, name).reference(*given)
    return found if isinstance(found, tuple) else (found,)


class Drawn:
    """Numbers of many sizes, a few of them zero, infinite or NaN."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, odd: bool = True) -> torch.Tensor:
        x = torch.randn(shape, dtype=torch.float64, generator=self.generator)
        x *= 10.0 ** torch.randint(-9, 3, shape, generator=self.generator)
        if odd and x.numel() > 3:
            x.view(-1)[:3] = torch.tensor([0.0, math.nan, math.inf])
        return x

    def bools(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator) < 0.6


def assert_alike(name: str, *given: object) -> None:
    for found, expected in zip(by_kernel(name, *given), by_reference(name, *given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_of_two_numbers_have_the_bits_of_the_reference(shape: tuple[int, ...]) -> None:
    drawn = Drawn()
    high, update = drawn(*shape, odd=False), drawn(*shape, odd=False)
    low, active = 2.0**-55 * high, drawn.bools(shape[0], shape[2])
    found = by_kernel("added", high, low, update, active)
    for one, expected in zip(found, by_reference("added", high, low, update, active), strict=True):
        assert torch.equal(one, expected)
    masked = torch.where(active[:, None], update, 0.0)
    for one, expected in zip(found, (*two_sum(high, low + masked), masked), strict=True):
        assert torch.equal(one, expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_of_a_step(shape: tuple[int, ...]) -> None:
    drawn, (count, _, k) = Drawn(), shape
    active, of = drawn.bools(count, k), [drawn(count, k).abs() for _ in range(4)]
    each = [drawn(count, 1).abs() for _ in range(3)]
    assert_alike("progress", active, *of[:4], 1e-3, 0.5, 2.0)
    assert_alike("uncertainty", tuple(of[:4]), *each, 2.0**-100)
    assert_alike("relative_error", *of[:3], each[0], 0.25, 1 + 2.0**-20)


def test_columns_of_any_strides() -> None:
    drawn = Drawn()
    high, low, update = (drawn(6, 9, 4, odd=False)[::2].mT for _ in range(3))
    assert_alike("added", high, low, update, drawn.bools(9, 3).T)


def test_a_step_that_gains_nothing_is_the_last() -> None:
    """Accurate enough, stagnating, at the floor, not finite, done before; the last one goes on."""
    left = torch.tensor([[0.1, 0.9, 1e-3, math.nan, 0.3, 0.3]]).double()
    floor = torch.tensor([[0.0, 0.0, 1e-3, 0.0, 0.0, 0.0]]).double()
    size = torch.tensor([[1.0, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9]]).double()
    active = torch.tensor([[True, True, True, True, False, True]])
    left, goes_on = refining.progress(active, left, torch.ones_like(left), floor, size, 0.2, 0.5, 2.0)
    assert goes_on.tolist() == [[False] * 5 + [True]]
    assert left[0, 4] == 1.0


def test_half_of_what_vanishes_is_no_perturbation() -> None:
    """A residual of zero is exact; one of NaN is NaN."""
    of = [torch.tensor([[x, x]]).double() for x in (0.0, 0.0, 0.0, 1.0, 1.0)]
    of[1][0, 1] = math.nan
    found = Norms(of[1], of[0], *of[2:]).measures(1.0)
    assert found.backward_error[0].tolist()[0] == found.optimality[0].tolist()[0] == 0.0
    assert found.backward_error[0, 1].isnan()
