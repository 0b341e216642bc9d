"""Helpers for the tests of all figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from neula.papers.data import ExperimentData, Measurements, Row
from neula.papers.figure import Figure, Paper
from neula.papers.measuring import seconds_of, timed


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


def figures_by_name(paper: Paper) -> dict[str, Figure]:
    """The figures of a paper by their names."""
    return {figure.name: figure for figure in paper.figures}
