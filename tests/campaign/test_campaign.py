"""Some 2,000 examples drawn by Hypothesis, the same ones every time; ``make fuzz`` tries new ones.

Hypothesis makes a failure as simple as it can, and its message says what to type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .fuzz import ALL, FALSE_ALARMS, Recipe, draw, report, run_one
from .recipes import Scope, T

EXAMPLES = {"lstsq": 350, "solve": 200, "pos": 110, "spectra": 100}
"""For each engine; other problems have ``FEW``."""

FEW = 15

ON_GPU = {"lstsq": 300, "solve": 150, "pos": 100}

AGAIN = "python -m tests.campaign.fuzz --device {}"


class Drawn:
    """Decisions by Hypothesis."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw

    def choice(self, options: Sequence[T]) -> T:
        return self._draw(st.sampled_from(options))

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))


@st.composite
def recipes(draw_from: Any, scope: Scope) -> Recipe:
    """Random recipes, simpler choices first."""
    return draw(Drawn(draw_from), scope)


def campaign(scope: Scope, examples: int, device: str = "cpu") -> None:
    """Fail at the first unsound answer or broken promise, and at clearly too many false alarms.

    Raises
    ------
    AssertionError
        With what to type to see it again.
    """
    alarms: list[str] = []

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(recipes(scope))
    def judged(recipe: Recipe) -> None:
        verdict, shown = run_one(recipe, device)
        text = report(recipe, verdict, shown, AGAIN.format(device)) if verdict.findings else ""
        if verdict.has("false alarm"):
            alarms.append(text)
        assert not verdict.has("unsound"), text
        assert not verdict.has("violation"), text

    judged()
    # Of all examples 1%: nearly all of them are least squares, which are a third.
    share = 2 if "lstsq" in scope.problems else 1
    expected = share * FALSE_ALARMS * examples
    # Three standard deviations of a count (Poisson).
    assert len(alarms) <= expected + 3 * expected**0.5, "\n\n".join(alarms[:3])


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("problem", ALL)
def test_campaign(problem: str, engine: str) -> None:
    campaign(Scope(problems=(problem,), engines=(engine,)), EXAMPLES.get(problem, FEW))


@pytest.mark.gpu
@pytest.mark.parametrize("problem", ALL)
def test_campaign_on_a_gpu(problem: str) -> None:
    campaign(Scope(problems=(problem,), engines=("auto",)), ON_GPU.get(problem, 30), "cuda")
