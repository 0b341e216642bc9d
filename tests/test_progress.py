"""Progress: stages with a name, and digits as a part of the way."""

from __future__ import annotations

import math

import pytest

from neula.pipeline.progress import digits_done, stage


def test_a_stage_begins_at_once_and_tells_its_name_each_time() -> None:
    told: list[tuple[str, float]] = []
    report = stage(lambda name, fraction: told.append((name, fraction)), "factorizing")
    report(0.5)
    assert told == [("factorizing", 0.0), ("factorizing", 0.5)]


def test_nobody_listens() -> None:
    stage(None, "factorizing")(0.5)


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (1.0, 0.0),
        (1e-4, 0.5),
        (1e-8, 1.0),
        (1e-12, 1.0),
        (10.0, 0.0),
        (0.0, 1.0),
        (math.inf, 1.0),
        (math.nan, 1.0),
    ],
)
def test_digits(error: float, part: float) -> None:
    assert digits_done(error, 1e-8) == pytest.approx(part)
