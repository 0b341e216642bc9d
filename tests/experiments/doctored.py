"""Data that a judge must not be taken in by."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from neula.experiments.data import Data, Row, Rows

Doctor = Callable[[Row], Row]


def stored(rows: Iterable[Row]) -> Rows:
    """Rows as they come back from a file."""
    return Data.of({}, rows).rows


def every(condition: Row, **change: Callable[[float], float | None]) -> Doctor:
    """Change fields of the rows that have the values of ``condition``."""

    def doctor(row: Row) -> Row:
        if any(row.get(name) != value for name, value in condition.items()):
            return row
        return row | {name: function(row[name]) for name, function in change.items() if name in row}

    return doctor
