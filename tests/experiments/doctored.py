"""Helpers for the tests of all figures: data that a judge must not be taken in by, and pictures."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import pytest

from neula.papers.data import ExperimentData, Measurements, Row
from neula.papers.drawing import new_canvas
from neula.papers.figure import Figure
from neula.papers.measuring import seconds_of, timed

Doctor = Callable[[Row], Row]


@contextmanager
def timed_once(*modules: ModuleType) -> Iterator[None]:
    """No test depends on a time: what these modules measure is run once, and not until its time is sure."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name in {"median_seconds", "steady_seconds", "sustained_seconds"} & vars(module).keys():
                patch.setattr(module, name, lambda run, *_, **__: seconds_of(run))
            if "first_run" in vars(module):
                patch.setattr(module, "first_run", lambda run, **_: timed(run))
        yield


def stored(rows: Iterable[Row]) -> Measurements:
    """Rows as they come back from a file."""
    return ExperimentData.from_rows({}, rows).rows


def every(condition: Row, **change: Callable[[float], float | None]) -> Doctor:
    """Change fields of the rows that have the values of ``condition``."""

    def doctor(row: Row) -> Row:
        if any(row.get(name) != value for name, value in condition.items()):
            return row
        return row | {name: function(row[name]) for name, function in change.items() if name in row}

    return doctor


def by_lie(lies: Sequence[tuple[Figure, int, str, Doctor]]) -> pytest.MarkDecorator:
    """A test for each lie: the figure, the number of the claim, and what makes the data lie."""
    cases = [
        pytest.param(f, number, doctor, id=f"{f.name}-{number}-{lie}") for f, number, lie, doctor in lies
    ]
    return pytest.mark.parametrize(("figure", "number", "doctor"), cases)


def deny(figure: Figure, number: int, doctor: Doctor, rows: Measurements) -> None:
    """The judge of a claim says no to doctored data."""
    changed = Measurements(doctor(row) for row in rows)
    assert changed != rows
    assert not figure.claims[number].judge(changed).holds


def axes_drawn(figure: Figure, rows: Measurements) -> int:
    """Draw a figure and save the picture; how many axes it has."""
    pytest.importorskip("matplotlib")
    assert figure.draw is not None
    canvas = new_canvas(*figure.size)
    figure.draw(rows, canvas)
    picture = io.BytesIO()
    canvas.savefig(picture, dpi=30)
    assert len(picture.getvalue()) > 1000
    return len(canvas.axes)
