"""The evidence of linear systems: kernels in the interpreter, or on a GPU, give what the references do."""

from __future__ import annotations

import math

import pytest
import torch
from tests.devices import DEVICE, HAS_GPU

from neula.certificates.verdict import Evidence, Limits
from neula.kernels.small_problems import systems
from neula.kernels.small_problems.systems import EvidenceMargins, Trust

pytestmark = [pytest.mark.gpu] if HAS_GPU else []

SHAPES = [(1, 5, 1), (3, 300, 2), (2, 1500, 1), (4, 64, 3)]
"""Of vectors: systems, unknowns, right-hand sides."""


class Drawn:
    """Random numbers, and the same with some of them that are not finite."""

    def __init__(self, *, odd: bool) -> None:
        self.generator, self.odd = torch.Generator().manual_seed(3), odd

    def __call__(self, *shape: int, odd: float = 0.0) -> torch.Tensor:
        x = torch.randn(shape, dtype=torch.float64, generator=self.generator)
        if odd and self.odd:
            x[0, -1] = odd
        return x.to(DEVICE)

    def sizes(self, *shape: int) -> torch.Tensor:
        return self(*shape).abs() + 0.1

    def bools(self, *shape: int, part: float) -> torch.Tensor:
        return (torch.rand(shape, generator=self.generator) < part).to(DEVICE)


def assert_alike(name: str, *given: object) -> tuple[torch.Tensor, ...]:
    pytest.importorskip("triton")
    function = getattr(systems, name)
    pair = function.kernel(*given), function.reference(*given)
    found, expected = (x if isinstance(x, tuple) else (x,) for x in pair)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=0, equal_nan=True)
    return tuple(expected)


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_of_refinement(shape: tuple[int, int, int], odd: bool) -> None:
    drawn, (count, n, k) = Drawn(odd=odd), shape
    numbers = [drawn.sizes(count, 1) for _ in range(3)]
    trust = Trust(drawn.sizes(count, n, 1), *numbers, drawn.sizes(count, k), 1e-3)
    vectors = drawn(*shape), 1e-17 * drawn(*shape), 0.1 * drawn(*shape, odd=math.nan)
    active = drawn.bools(count, k, part=0.7)
    found = assert_alike("stepped", *vectors, active, 100 * drawn.sizes(count, k), trust, 1e-3, 0.5, 2.0)
    assert not (found[4] & ~active).any()


@pytest.mark.parametrize("odd", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_evidence(shape: tuple[int, int, int], odd: float) -> None:
    drawn, (count, n, k) = Drawn(odd=True), shape
    x, residual, b = drawn(*shape, odd=odd), 1e-3 * drawn(*shape, odd=odd), drawn(*shape)
    left, unfinished = 1e-9 * drawn.sizes(count, k), drawn.bools(count, k, part=0.1)
    of_systems = drawn.sizes(count, 1), drawn.sizes(count, k), 0.2 * drawn.sizes(count), drawn.sizes(count)
    found = assert_alike(
        *(
            "measured_systems",
            x,
            1e-17 * x,
            drawn.sizes(count, n, 1),
            residual,
            b,
            left,
            unfinished,
            *of_systems,
        ),
        EvidenceMargins(0.25, 1 + 2.0**-20, 3.0),
    )
    assert torch.equal(found[1][0] > 0, unfinished.any(1))
    accepted = Limits.for_shape((n, n), math.inf, 0.1).accept(Evidence.from_numbers(found[1]))
    assert not (accepted & unfinished.any(1)).any()
    if odd:
        assert not accepted[0]


def test_a_residual_longer_than_b_is_not_accepted() -> None:
    one = torch.ones(2, 3, 1, dtype=torch.float64, device=DEVICE)
    residual = one * torch.tensor([0.99, 1.01], dtype=torch.float64, device=DEVICE)[:, None, None]
    number, finished = one[:, 0], torch.zeros(2, 1, dtype=torch.bool, device=DEVICE)
    margins = EvidenceMargins(0.25, 1.0, 3.0)
    given = one, 0 * one, one, residual, one, 1e-9 * number, finished, number, number, 0 * number[:, 0]
    found = assert_alike("measured_systems", *given, number[:, 0], margins)
    accepted = Limits.for_shape((3, 3), math.inf, 0.1).accept(Evidence.from_numbers(found[1]))
    assert accepted.tolist() == [True, False]
