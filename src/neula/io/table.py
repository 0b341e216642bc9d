"""Numbers with the names of their columns and rows, and how columns are chosen by name."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal

import numpy as np

from neula.io.paths import FileError

Message = Callable[[str], None]
"""Is told in one line what was done to a file's content beyond reading it."""

MissingValues = Literal["error", "nan", "needed"]
"""Empty fields: an error that advises to omit such lines, or says that they are needed."""


@dataclass(frozen=True)
class Table:
    """An array, with names where there are some."""

    values: np.ndarray
    columns: tuple[str, ...] | None = None  # names of its columns; of a vector one name
    rows: tuple[str, ...] | None = None  # names of its rows


def chosen_columns(name: str, columns: Sequence[str], key: str, *, named: bool = True) -> list[int]:
    """Where the columns are that ``key`` lists, separated by commas; quotes hold commas together.

    Parameters
    ----------
    name : str
        Of the file.
    columns : sequence of str
        The names in it.
    named : bool, optional
        Whether the file gives the names, or columns are counted.

    Raises
    ------
    FileError
        If a name is not there, or there twice.
    """
    has = (
        f"it has {listed([column for column in columns if column])}"
        if named
        else f"it has no names, columns go by 1 to {len(columns)}"
    )
    places = []
    for wanted in next(csv.reader([key], skipinitialspace=True), []):
        found = [i for i, column in enumerate(columns) if column == wanted.strip()]
        if len(found) > 1:
            raise FileError(f"{name}: {len(found)} columns are named {wanted!r}; give them different names")
        if not found:
            near = get_close_matches(wanted, columns, 1)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            raise FileError(f"{name}: no column is named {wanted!r}{meant}; {has}")
        places += found
    if not places:
        raise FileError(f"{name}: names of columns are missing after ':'; {has}")
    return places


def advice(missing: MissingValues) -> str:
    """Advice for an empty field."""
    return (
        "leave out such lines with --missing drop" if missing == "error" else "fill it in: every line counts"
    )


def listed(names: Sequence[str], most: int = 12) -> str:
    """Names one after the other, the first ones of many."""
    more = [f"{len(names) - most} more"] if len(names) > most else []
    return ", ".join([*names[:most], *more]) or "none"


def shorten(text: str, width: int = 60) -> str:
    """A text in one line of bounded width."""
    return text if len(text) <= width else text[: width - 3] + "..."


def without_missing(tables: Mapping[str, Table]) -> tuple[dict[str, Table], str]:
    """Leave out the rows that have a NaN in any of several arrays; say how many, if any.

    Arrays of different lengths are left as they are: whoever uses them says what does not fit.

    Raises
    ------
    FileError
        If no row is left.
    """
    lengths = {len(table.values) if table.values.ndim in (1, 2) else -1 for table in tables.values()}
    (rows, *others) = lengths
    if others or rows < 1:
        return dict(tables), ""
    whole = np.ones(rows, dtype=bool)
    for table in tables.values():
        whole &= ~np.isnan(table.values.reshape(rows, -1)).any(1)
    if whole.all():
        return dict(tables), ""
    if not whole.any():
        raise FileError(f"every line of {', '.join(tables)} has an empty field or NaN: nothing is left")
    kept = {name: replace(table, values=table.values[whole]) for name, table in tables.items()}
    return kept, f"{rows - int(whole.sum())} of {rows} lines"
