"""The loop of refinement in twice the working precision: when it stops, and what it leaves alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch

from neula.algorithms.krylov.doubled_refinement import (
    DoubledEvaluation,
    Pace,
    Refinement,
)
from neula.certificates.backward_error import Measures
from neula.certificates.forward_error import COMPUTED, MAX_RATE

U64 = 2.0**-53


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@dataclass
class Diagonal:
    """``x = b`` where each correction leaves ``rates`` of the error, and stops at ``floors``.

    Attributes
    ----------
    rates, floors : Tensor, shape (batch, k)
    rate : Tensor, shape (batch,)
        As it is claimed.
    first : float
        What the first solution is of b.
    seen : list
        The unknowns at each evaluation.
    """

    rates: torch.Tensor
    floors: torch.Tensor
    rate: torch.Tensor
    first: float = 0.0
    seen: list[torch.Tensor] = field(default_factory=list)

    def start(self, b: torch.Tensor) -> torch.Tensor:
        return self.first * b

    def solution(self, unknowns: torch.Tensor) -> torch.Tensor:
        return unknowns

    def size(self, unknowns: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(unknowns, dim=1)

    def evaluate(self, b: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> DoubledEvaluation:
        self.seen.append(high.clone())
        residual = (b - high) - low
        correction = (1 - self.rates[:, None]) * residual
        return DoubledEvaluation(correction, self.size(residual - correction) + self.floors, residual)

    def updated(self, at: Refinement) -> tuple[torch.Tensor, Measures]:
        residual = at.residual - at.change
        error = self.size(residual)
        return residual, Measures(error, error)


def system(
    rates: list[float], floors: list[float] | None = None, claimed: float = 0.1, first: float = 0.0
) -> Diagonal:
    """One problem with a right-hand side for each rate."""
    floor = tensor(*(floors or [0.0] * len(rates)))[None]
    return Diagonal(tensor(*rates)[None], floor, tensor(claimed), first)


def allowed(tolerance: float) -> float:
    """The largest forward error of an x that was rounded once the tolerance was met."""
    error = tolerance + U64  # relative to the computed x
    return COMPUTED**2 * error / (1 - error)


def right_hand_sides(k: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(3)
    return torch.randn(1, 4, k, generator=generator, dtype=torch.float64)


def test_the_forward_error_of_the_format() -> None:
    """Each step leaves a tenth: 16 or 17 digits, and then x is the nearest floating-point number."""
    b = right_hand_sides(2)
    found = Refinement(system([0.1, 0.1]), b, U64 / 2).solved()
    assert found.steps == math.ceil(math.log10(2 / U64))
    assert torch.equal(found.x, b)
    assert (found.forward_error <= allowed(U64 / 2)).all()
    # The other part is known to the tolerance.
    assert (found.rounding <= U64).all()


@pytest.mark.parametrize("tolerance", [1e-2, 1e-7, 1e-12])
def test_stops_at_the_tolerance(tolerance: float) -> None:
    found = Refinement(system([0.1]), right_hand_sides(1), tolerance).solved()
    # The rounding error of 10^-steps against the tolerance may cost one.
    assert abs(found.steps + math.log10(tolerance)) <= 1
    assert found.forward_error <= allowed(tolerance)


def test_stops_where_nothing_gets_better() -> None:
    """A floor of 1e-9: the error no longer halves there, whatever the tolerance."""
    found = Refinement(system([0.01], [1e-9]), right_hand_sides(1), U64 / 2).solved()
    assert 5 <= found.steps <= 7
    assert 1e-10 < float(found.forward_error) < 1e-8


def test_stops_where_it_diverges() -> None:
    found = Refinement(system([1.5]), right_hand_sides(1), U64 / 2).solved()
    assert found.steps <= 3
    assert found.forward_error == math.inf


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_what_is_said_is_said_of_the_last_correction(steps: int) -> None:
    """x, its residual and the bound belong together; the bound is relative to the exact solution."""
    b = right_hand_sides(2)
    found = Refinement(system([0.1, 0.2]), b, 0.0).solved(steps)
    true = torch.linalg.vector_norm(found.x - b, dim=1) / torch.linalg.vector_norm(b, dim=1)
    expected = tensor(0.1, 0.2)[None] ** steps
    slack = 16 * U64
    torch.testing.assert_close(true, expected, rtol=0, atol=slack)
    torch.testing.assert_close(found.residual, b - found.x, rtol=0, atol=slack * float(b.norm()))
    assert (true <= found.forward_error).all()
    # Relative to x it is e / (1 - e) at most, and by the bound that is made e / (1 - 2 e).
    assert (found.forward_error <= COMPUTED**2 * (expected + slack) / (1 - 2 * expected - 3 * slack)).all()


@pytest.mark.parametrize("rate", [0.5, 0.9])
def test_nothing_is_known_of_an_x_that_is_all_error(rate: float) -> None:
    """After one correction ``1 - rate`` of the solution is there, and the error is no smaller than that."""
    found = Refinement(system([rate]), right_hand_sides(1), U64 / 2).solved(1)
    assert found.forward_error == math.inf


@pytest.mark.parametrize("first", [-1e9, 1e6])
def test_a_first_solution_that_is_far_too_long(first: float) -> None:
    """The error relative to x stays at one for some steps, in which the absolute error falls."""
    b = right_hand_sides(1)
    found = Refinement(system([0.01], first=first), b, U64 / 2).solved()
    assert torch.equal(found.x, b)
    assert found.forward_error <= allowed(U64 / 2)


def test_right_hand_sides_that_are_done_stay() -> None:
    """One that is done early, one that stagnates, and a slow one."""
    b = right_hand_sides(3)
    each = system([0.0, 0.01, 0.2], [0.0, 1e-3, 0.0])
    found = Refinement(each, b, U64 / 2).solved()
    assert found.steps > 20
    seen = torch.stack(each.seen)[..., 0, :, :]
    assert torch.equal(seen[1:, :, 0], seen[1:2, :, 0].expand(found.steps - 1, -1))
    stagnated = seen[4:, :, 1]
    assert torch.equal(stagnated, stagnated[:1].expand_as(stagnated))
    alone = Refinement(system([0.2]), b[..., 2:], U64 / 2).solved()
    # Each is the exact solution, rounded, but for the tolerance.
    size = torch.linalg.vector_norm(b[..., 2])
    assert torch.linalg.vector_norm(found.x[..., 2:] - alone.x) <= 2 * allowed(U64 / 2) * size


@pytest.mark.parametrize("steps", [1, 4, 9])
def test_nobody_looks(steps: int) -> None:
    """As many steps as are allowed, though nothing is left to do."""
    b = right_hand_sides(2)
    easy = system([0.0, 0.0])
    found = Refinement(easy, b, U64 / 2).solved(pace=Pace.prelaunched(steps))
    assert found.steps == steps
    assert len(easy.seen) == steps
    looked = Refinement(system([0.0, 0.0]), b, U64 / 2).solved(steps)
    assert looked.steps == 1
    assert torch.equal(found.x, looked.x)
    assert torch.equal(found.forward_error, looked.forward_error)


@pytest.mark.parametrize("rate", [MAX_RATE, 1.01 * MAX_RATE, math.nan])
def test_a_slow_rate_is_not_trusted(rate: float) -> None:
    found = Refinement(system([0.0], claimed=rate), right_hand_sides(1), U64 / 2).solved()
    assert bool(found.forward_error.isfinite()) == (rate <= MAX_RATE)
