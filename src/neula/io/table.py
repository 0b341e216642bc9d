"""Numbers with the names of their columns and rows, and how columns are chosen by name."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal

import numpy as np

from neula.io.paths import FileError

Message = Callable[[str], None]  # gets a line on each change of a file's content by reading it

Choose = Callable[[Sequence[str]], Sequence[str]]  # from the columns of a table to those that are read

MissingValues = Literal["error", "nan", "needed"]
"""Empty fields: an error that advises to omit such lines, or says that they are needed."""


@dataclass(frozen=True)
class Table:
    """An array, with names where there are some."""

    values: np.ndarray
    columns: tuple[str, ...] | None = None  # names of its columns; of a vector one name
    rows: tuple[str, ...] | None = None  # names of its rows


Choice = list[tuple[str, tuple[int, ...]]]
"""Columns by their names, with their places: of a complex one those of its real and its imaginary part."""

PARTS = ("_re", "_im"), (".re", ".im"), ("_real", "_imag"), (".real", ".imag")
"""Endings of the names of columns that hold the parts of complex numbers."""


def chosen_columns(name: str, columns: Sequence[str], key: str | Choose, *, named: bool = True) -> Choice:
    """Indices of the columns listed in ``key``, separated by commas; quoted names may hold commas.

    Of a complex column z the parts are named ``z_re`` and ``z_im`` (or as in :data:`PARTS`), or by the key as
    in ``u+vj``. Columns of a file that is not ``named`` are counted.
    """
    has = (
        f"it has {listed([column for column in columns if column])}"
        if named
        else f"it has no names, columns go by 1 to {len(columns)}"
    )
    places: dict[str, list[int]] = {}
    for i, column in enumerate(columns):
        places.setdefault(column, []).append(i)
    chosen: Choice = []
    try:
        split = key(columns) if callable(key) else next(csv.reader([key], skipinitialspace=True), [])
    except ValueError as wrong:  # which is no damage of the file
        raise FileError(str(wrong)) from wrong
    for wanted in split if callable(key) else map(str.strip, split):
        found = parts_of(wanted, places)
        for one in found:
            if len(places[one]) > 1:
                raise FileError(
                    f"{name}: {len(places[one])} columns are named {one!r}; give them different names"
                )
        if not found:
            near = get_close_matches(wanted, columns, 1)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            raise FileError(f"{name}: no column is named {wanted!r}{meant}; {has}")
        chosen.append((wanted, tuple(places[one][0] for one in found)))
    if not chosen:
        raise FileError(f"{name}: names of columns are missing after ':'; {has}")
    return chosen


def parts_of(wanted: str, columns: Container[str]) -> tuple[str, ...]:
    """The column of that name, or the two with its real and imaginary part; nothing if they are not there."""
    total = re.fullmatch(r"(.+?)\s*\+\s*(.+)[ij]", wanted)
    pairs = [(wanted + real, wanted + imaginary) for real, imaginary in PARTS]
    pairs += [(total[1], total[2])] if total else []
    return next((names for names in [(wanted,), *pairs] if all(one in columns for one in names)), ())


def pairs_in(columns: Sequence[str]) -> list[str]:
    """The complex columns whose two parts are there by their names."""
    pairs = [(name, end, other) for name in columns for end, other in PARTS if name.endswith(end)]
    found = [(name.removesuffix(end), other) for name, end, other in pairs]
    return [name for name, other in found if name + other in columns]


def joined(
    name: str, values: np.ndarray, chosen: Sequence[tuple[str, tuple[Any, ...]]], *, named: bool = True
) -> Table:
    """Columns that were read one after the other as a table; two parts become a complex column."""
    names = tuple(column for column, _ in chosen) if named else None
    if all(len(places) == 1 for _, places in chosen):
        return Table(values, names)
    if np.iscomplexobj(values):
        raise FileError(
            f"{name}: columns of complex numbers have no parts in other columns: choose them alone"
        )
    rest = iter(values.T)
    columns = [complex_of(next(rest), next(rest)) if places[1:] else next(rest) for _, places in chosen]
    return Table(np.column_stack(columns), names)


def complex_of(real: np.ndarray, imaginary: np.ndarray) -> np.ndarray:
    """Complex numbers of their parts, each of which keeps its NaN and infinities."""
    made = np.empty(real.shape, np.result_type(real, imaginary, np.complex64))
    made.real, made.imag = real, imaginary
    return made


def advice(missing: MissingValues) -> str:
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

    Arrays of different lengths are left as they are: the function that uses them reports what does not fit.
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
