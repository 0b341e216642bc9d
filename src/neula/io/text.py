"""Tables as text: read by NumPy where they are numbers, by pandas where they are more; errors name the line.

Neither of the two tells a header from numbers, or finds the delimiter as safely as it takes to lose no line
of numbers: that is done here. What cannot be read is looked at a second time, to say where and why.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import numpy as np

from neula.errors import counted
from neula.io.paths import FileError, InputFile
from neula.io.table import Message, MissingValues, Table, chosen_columns, shorten

MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NULL", "null", "None")
"""Fields that stand for no value; ``nan`` is a number."""

_NAN = [sign + name for sign in ("", "+", "-") for name in ("nan", "NaN", "Nan", "NAN")]
"""Numbers that pandas would not know as such."""

_SWAPPED = str.maketrans(",.", ".,")

LARGE = 1 << 25
"""Bytes from which on pandas, which takes half a second to import, is faster: 230 MB/s beside 45 MB/s."""


@dataclass(frozen=True)
class Layout:
    """How the lines of a file are to be read.

    Attributes
    ----------
    delimiter : str or None
        None is any white space.
    decimal : str
        A point or a comma.
    header : int
        Number of the line with the names of the columns; 0 if there is none.
    names : tuple of str
        What it names; of a first column without a name the empty text.
    width : int
        Fields of a line.
    closed : bool
        Whether every line ends with a delimiter, behind which there is no column.
    """

    delimiter: str | None
    decimal: str
    header: int
    names: tuple[str, ...]
    width: int
    closed: bool = False

    @property
    def columns(self) -> int:
        """How many columns there are."""
        return self.width - self.closed

    @property
    def indexed(self) -> bool:
        """Whether the first column numbers or names the rows, as pandas and R write it."""
        return bool(self.names) and self.names[0] == ""

    def fields(self, text: str) -> list[str]:
        """The fields of a line."""
        if self.delimiter is None:
            return [field.strip('"') for field in re.findall(r'"[^"]*"|[^\s"]+', text)]
        (row,) = csv.reader([text], delimiter=self.delimiter, skipinitialspace=True)
        return [field.strip() for field in row]

    def is_number(self, field: str) -> bool:
        """Whether a field is a number."""
        try:
            float(self.with_points(field))
        except ValueError:
            return False
        return "_" not in field

    def with_points(self, text: str) -> str:
        """A text with decimal points; points, which separate thousands where commas do not, become commas."""
        return text if self.decimal == "." else text.translate(_SWAPPED)


def read_text(file: InputFile, key: str | None, decimal: str, missing: MissingValues, tell: Message) -> Table:
    """Read a table of numbers; ``tell`` gets a line on whatever is not taken for numbers."""
    try:
        layout = _layout(file, decimal)
        wanted = _wanted(file, layout, key, tell)
        values = _numbers(file, layout, wanted, missing)
    except (UnicodeDecodeError, csv.Error) as error:
        raise FileError(f"{file.name}: not a text in UTF-8 ({error}); convert it first") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FileError(f"{file.name}: truncated or damaged gzip file ({error})") from error
    names = tuple(layout.names[i] for i in wanted) if layout.names else None
    return Table(values, names)


# --- what the lines are -----------------------------------------------------------------------------------


def _lines(file: InputFile) -> Iterator[tuple[int, str]]:
    """Lines that hold something, without comments, with their numbers in the file.

    A line break inside quotes becomes a blank.
    """
    with _opened(file) as stream:
        first, before = 0, ""
        for number, line in enumerate(stream, 1):
            text = before + _without_comment(line.strip(" \r\n"))
            if text.count('"') % 2:
                first, before = first or number, text + " "
            elif text.strip():
                yield first or number, text
                first, before = 0, ""
        if before:
            raise FileError(f"{file.name}: line {first} opens a quotation that is never closed")


def _opened(file: InputFile) -> IO[str]:
    if file.kind.endswith(".gz"):
        return gzip.open(file.path, "rt", encoding="utf-8-sig")
    return file.path.open(encoding="utf-8-sig")


def _without_comment(text: str) -> str:
    """A line without what follows ``#``; behind names and quotes that is no comment."""
    if "#" not in text:
        return text
    if text.startswith("#"):
        return ""
    if '"' not in text and re.match(r"[-+.]*\d", text):
        return re.sub(r"\s+#.*", "", text)
    return text


def _layout(file: InputFile, decimal: str) -> Layout:
    lines = _lines(file)
    first, second = next(lines, None), next(lines, None)
    if first is None:
        raise FileError(f"{file.name}: holds no numbers")
    (number, text), (_, below) = first, second or first
    layout = Layout(_delimiter(file, below, decimal), decimal, 0, (), 0)
    fields = layout.fields(text)
    width = len(layout.fields(below))
    if _is_header(file, number, fields, layout):
        if second is None:
            raise FileError(f"{file.name}: holds no numbers below its header")
        while fields[-1] == "":
            fields.pop()
        if layout.delimiter is None and width == 1:
            fields = [text.strip('"')]
        layout = Layout(layout.delimiter, decimal, number, tuple(fields), width)
    else:
        layout = Layout(layout.delimiter, decimal, 0, (), len(fields))
    closed = len(layout.names) in (0, layout.width - 1) and layout.width > 1
    if closed and all(layout.fields(text)[-1] == "" for _, text in _below(file, layout)):
        return Layout(layout.delimiter, decimal, layout.header, layout.names, layout.width, closed=True)
    return layout


def _below(file: InputFile, layout: Layout) -> Iterator[tuple[int, str]]:
    """The lines below the header."""
    return (line for line in _lines(file) if line[0] > layout.header)


def _delimiter(file: InputFile, text: str, decimal: str) -> str | None:
    """The delimiter of a line; None is any white space."""
    if file.kind.startswith(".tsv"):
        return "\t"
    for delimiter in ";,\t".replace(decimal, ""):
        if len(next(csv.reader([text], delimiter=delimiter))) > 1:
            return delimiter
    return None


def _is_header(file: InputFile, number: int, fields: Sequence[str], layout: Layout) -> bool:
    """Whether the first line names columns; it must be numbers otherwise."""
    if all(field in MISSING or layout.is_number(field) for field in fields):
        return False
    # A damaged line of numbers must not pass for a header: that has a name in every column, but for one of
    # row labels before them, and delimiters at the end.
    named = fields[0] == "" or _is_name(fields[0])
    last = max(i for i, field in enumerate(fields) if field)
    for i, field in enumerate(fields[: last + 1]):
        if not ((i == 0 and not field) or _is_name(field)) if named else not layout.is_number(field):
            hint = _hint(field) or " (names of columns do not begin with a digit)" * named
            raise FileError(
                f"{file.name}: line {number} is neither numbers nor names of columns: "
                f"column {i + 1} is {shorten(field)!r}{hint}"
            )
    return True


def _is_name(field: str) -> bool:
    return field != "" and re.match(r"[-+]?[.,]?\d", field) is None


def _wanted(file: InputFile, layout: Layout, key: str | None, tell: Message) -> list[int]:
    """Places of the columns to read."""
    if len(layout.names) not in (0, layout.columns):
        raise FileError(f"{file.name}: {_fault(file, layout, [], 'nan') or 'names do not fit'}")
    if key is not None:
        names = layout.names or [str(i + 1) for i in range(layout.columns)]
        return chosen_columns(file.name, names, key, named=bool(layout.names))
    if layout.names:
        header = shorten(", ".join(filter(None, layout.names)))
        tell(f"{file.name}: line {layout.header} is a header: {header}")
    if layout.indexed:
        tell(f"{file.name}: column 1 has no name and was left out: it numbers or names the rows")
    return list(range(layout.indexed, layout.columns))


# --- the numbers ------------------------------------------------------------------------------------------


def _numbers(file: InputFile, layout: Layout, wanted: Sequence[int], missing: MissingValues) -> np.ndarray:
    values = _parsed(file, layout, wanted)
    if values is None or (missing == "error" and np.isnan(values).any()):
        fault = _fault(file, layout, wanted, missing)
        if values is None and not fault:
            fault = "has empty fields, which are read by pandas: pip install 'neula[io]'"
        if fault:
            raise FileError(f"{file.name}: {fault}")
    assert values is not None
    return values


def _parsed(file: InputFile, layout: Layout, wanted: Sequence[int]) -> np.ndarray | None:
    """The numbers, NaN for empty fields; None if something else is there than numbers."""
    has_pandas = importlib.util.find_spec("pandas") is not None
    large = file.path.stat().st_size >= LARGE
    parsers = [_by_numpy] * (not (large and has_pandas)) + [_by_pandas] * has_pandas
    for parse in parsers:
        try:
            return parse(file, layout, wanted)
        except (FileError, UnicodeDecodeError):
            raise
        except ValueError:  # not a number, or a line of another width
            continue
    return None


def _by_numpy(file: InputFile, layout: Layout, wanted: Sequence[int]) -> np.ndarray:
    lines = _regular_lines(file, layout)
    return np.loadtxt(lines, delimiter=layout.delimiter, usecols=wanted, ndmin=2, quotechar='"')


def _by_pandas(file: InputFile, layout: Layout, wanted: Sequence[int]) -> np.ndarray:
    import pandas as pd

    # Since version 3.1 the default rounds correctly, and asking for it is deprecated.
    old = tuple(map(int, pd.__version__.split(".")[:2])) < (3, 1)
    exact: dict[str, Any] = {"float_precision": "round_trip"} if old else {}
    read = partial(
        pd.read_csv,
        sep=layout.delimiter or r"\s+",
        header=None,
        index_col=False,
        skipinitialspace=True,
        dtype={i: np.float64 if i in wanted else str for i in range(layout.width)},
        na_values=[*MISSING, *_NAN],
        keep_default_na=False,
        low_memory=False,
        **exact,
    )
    frame: Any = None
    if not _has_comments(file):
        compression = "gzip" if file.kind.endswith(".gz") else None
        about = {"compression": compression, "encoding": "utf-8-sig", "decimal": layout.decimal}
        with suppress(pd.errors.ParserError):
            frame = read(file.path, skiprows=layout.header, **about)
    # Of lines that are too short, or blank, pandas makes empty fields, or an error.
    if frame is None or frame[layout.width - 1].isna().any():
        frame = read(io.StringIO("\n".join(_regular_lines(file, layout))))
    return np.asarray(frame[list(wanted)].to_numpy(np.float64))


def _has_comments(file: InputFile) -> bool:
    opened = gzip.open if file.kind.endswith(".gz") else open
    with opened(file.path, "rb") as stream:
        return any(b"#" in block for block in iter(partial(stream.read, 1 << 20), b""))


def _regular_lines(file: InputFile, layout: Layout) -> Iterator[str]:
    """The lines of numbers with decimal points; ValueError at one that has another number of fields."""
    for _, text in _below(file, layout):
        if layout.delimiter is None or '"' in text:
            width = len(layout.fields(text))
        else:
            width = text.count(layout.delimiter) + 1
        if width != layout.width:
            raise ValueError("ragged")
        yield layout.with_points(text)


# --- what is wrong with them ------------------------------------------------------------------------------


def _fault(file: InputFile, layout: Layout, wanted: Sequence[int], missing: MissingValues) -> str | None:
    """Say what cannot be read, and in which line, as an editor counts; None if nothing is wrong."""
    widths = Counter(len(layout.fields(text)) for _, text in _below(file, layout))
    named = len(layout.names)
    usual = widths.most_common(1)[0][0]
    if named and usual != named + layout.closed and named not in widths:
        return f"line {layout.header} names {counted(named, 'column')}, the lines below have {usual}"
    width, others = (named, f"line {layout.header} names") if named else (usual, "most lines have")
    for number, text in _below(file, layout):
        fields = layout.fields(text)
        if len(fields) != width + (layout.closed if named else 0):
            return f"line {number} has {counted(len(fields), 'field')}, {others} {width}"
        for i in wanted:
            field = fields[i]
            column = f"column {i + 1}" + (f" ({layout.names[i]})" if named else "")
            if field in MISSING and missing == "error":
                what = f"is {field!r}, which is no number" if field else "is empty"
                return f"line {number}, {column} {what} (leave out such lines with --missing drop)"
            if field not in MISSING and not layout.is_number(field):
                hint = _hint(field) or " (choose columns by their names, behind a colon)" * bool(named)
                return f"line {number}, {column}: {shorten(field)!r} is not a number{hint}"
    return None


def _hint(field: str) -> str:
    if re.fullmatch(r"[-+]?\d*,\d+([eE][-+]?\d+)?", field):
        return " (for decimal commas give --decimal ,)"
    if re.fullmatch(r"[-+]?\d+\.\d+([eE][-+]?\d+)?", field):
        return " (a decimal point, or a separator of thousands, which is not read)"
    return ""


# --- writing ----------------------------------------------------------------------------------------------


def write_text(stream: IO[bytes], table: Table, kind: str) -> None:
    """Write a matrix with the digits that bring back the same float64, names first.

    Names of rows make a first column without a name, as pandas writes it.
    """
    compressed = gzip.GzipFile(fileobj=stream, mode="wb", mtime=0) if kind.endswith(".gz") else None
    text = io.TextIOWrapper(compressed or stream, encoding="utf-8", newline="", write_through=True)
    delimiter = "," if kind.startswith(".csv") else "\t"
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    matrix = np.asarray(table.values, dtype=np.float64)
    if table.columns is not None:
        writer.writerow([""] * (table.rows is not None) + list(table.columns))
    for i, row in enumerate(matrix.tolist()):
        writer.writerow([table.rows[i], *row] if table.rows is not None else row)
    text.detach()
    if compressed is not None:
        compressed.close()
