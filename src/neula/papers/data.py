"""Measurements as rows, and the files that they live in: CSV for spreadsheets, JSON with circumstances."""

from __future__ import annotations

import csv
import json
import math
import tomllib
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

WIDE = 140  # width that a table may take in any terminal, so that no digits are cut off

Row = dict[str, Any]


class ExperimentScale(StrEnum):
    """How large the matrices of an experiment are."""

    small = "small"
    paper = "paper"


TEXTS: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(
    Path(__file__).with_name("figures.toml").read_text(encoding="utf-8")
)
"""For each paper and figure its texts, functions and claims."""


class Measurements(list[Row]):
    """Measurements in the order in which they were taken; a field that a row lacks is None."""

    def where(self, **values: Any) -> Measurements:
        found = self
        for name, value in values.items():
            found = Measurements([row for row in found if row.get(name) == value])
        return Measurements(found)

    def column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self]

    def numbers(self, name: str) -> list[float]:
        """One field of all rows; NaN, which no comparison lets pass, where it was not finite."""
        return [math.nan if value is None else value for value in self.column(name)]

    def by(self, name: str) -> dict[Hashable, Measurements]:
        """Rows that share a value, for each value in order of appearance."""
        return {value: self.where(**{name: value}) for value in dict.fromkeys(self.column(name))}

    def ratios(self, field: str, ours: str, theirs: str, name: str = "method") -> list[float]:
        """Quotients of a field of two series, distinguished by ``name``; NaN where one was not finite."""
        pairs = zip(*(self.where(**{name: one}).numbers(field) for one in (ours, theirs)), strict=True)
        return [a / b for a, b in pairs]

    @property
    def fields(self) -> list[str]:
        return list(dict.fromkeys(name for row in self for name in row))


@dataclass(frozen=True)
class ExperimentData:
    """Rows with the circumstances under which they were measured."""

    about: dict[str, Any]
    rows: Measurements

    @classmethod
    def from_rows(cls, about: dict[str, Any], rows: Iterable[Row]) -> Self:
        """Data with numbers that JSON can hold: what is not finite becomes None."""
        return cls(about, Measurements({name: _plain(value) for name, value in row.items()} for row in rows))

    def write(self, path: Path) -> None:
        """Write ``path`` (JSON), and the rows alone to a file with the suffix ``.csv``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"about": self.about, "rows": self.rows}
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
        with path.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, self.rows.fields)
            writer.writeheader()
            writer.writerows(self.rows)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what :meth:`write` has written; a ValueError names a file that holds something else."""
        try:
            content = json.loads(path.read_text())
            return cls(content["about"], Measurements(content["rows"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: no data of an experiment ({error!r}): measure it again") from error


def span(values: Iterable[float], form: str = ".2f") -> str:
    """The smallest and the largest of some numbers."""
    values = list(values)
    return f"{min(values):{form}} to {max(values):{form}}"


def show(value: Any) -> str:
    """A value as a person reads it: three digits."""
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
