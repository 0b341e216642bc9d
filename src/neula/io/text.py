"""Tables as text: read by NumPy where they are numbers, by pandas where they are more; errors name the line.

Neither of the two tells a header from numbers, or finds the delimiter as safely as it takes to lose no line
of numbers: that is done here. If reading fails, the text is read again to report where and why.
"""

from __future__ import annotations

import csv
import gzip
import importlib.util
import io
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import IO, Any, NamedTuple

import numpy as np

from neula.errors import counted
from neula.io.integers import WHOLE, inexact, is_exact
from neula.io.layout import MISSING, TextLayout, below_header, complex_parts, hint, layout_of
from neula.io.memory import check_memory
from neula.io.paths import FileError, InputFile
from neula.io.table import (
    Choice,
    Choose,
    Message,
    MissingValues,
    Table,
    advice,
    chosen_columns,
    joined,
    shorten,
)

_NAN = [sign + name for sign in ("", "+", "-") for name in ("nan", "NaN", "Nan", "NAN")]
"""Numbers that pandas would not know as such."""

LARGE = 1 << 25
"""Bytes from which on pandas, which takes half a second to import, is faster: 230 MB/s, not 45."""

LONG = re.compile(r"(?<![\d.eE])(?<![eE][-+])[-+]?\d{16,}(?![\d.eE])")  # integers that may be no float64

UNIT = re.compile(r"(?<=[\d.])im?\b")  # the imaginary unit of those who do not write j

LONGEST = 1 << 26  # bytes that a line may have: two million columns, written with all digits


class Extent(NamedTuple):
    """Size of a text after decompression, and whether it may have comments."""

    bytes: int
    lines: int
    comments: bool


def read_text(
    file: InputFile,
    key: str | Choose | None,
    decimal: str,
    missing: MissingValues,
    header: bool | None,
    report: Message,
) -> Table:
    """Read a table of numbers; ``report`` gets a line on whatever is not taken for numbers."""
    try:
        extent = _extent(file)
        layout = layout_of(file, decimal, header)
        chosen = _chosen(file, layout, key, report)
        wanted = [i for _, places in chosen for i in places]
        check_memory(file.name, (extent.lines, len(wanted)))
        values = _numbers(file, layout, extent, wanted, missing)
    except UnicodeDecodeError as error:
        raise FileError(f"{file.name}: not a text in UTF-8 ({error}); convert it first") from error
    except csv.Error as error:
        raise FileError(f"{file.name}: a line cannot be split into fields ({error})") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FileError(f"{file.name}: truncated or damaged gzip file ({error})") from error
    return joined(file.name, values, chosen, named=bool(layout.names))


def _chosen(file: InputFile, layout: TextLayout, key: str | Choose | None, report: Message) -> Choice:
    """The columns to read."""
    if len(layout.names) not in (0, layout.columns):
        raise FileError(f"{file.name}: {_fault(file, layout, [], 'nan') or 'names do not fit'}")
    doubt = f" (give {layout.assumed})" if layout.assumed else ""
    if layout.names and (not isinstance(key, str) or doubt):
        header = shorten(", ".join(filter(None, layout.names)))
        report(f"{file.name}: line {layout.header} is a header: {header}{doubt}")
    elif doubt:
        report(f"{file.name}: the first line is read as numbers{doubt}")
    names = layout.names or [str(i + 1) for i in range(layout.columns)]
    if isinstance(key, str) or (key is not None and layout.names):
        return chosen_columns(file.name, names, key, named=bool(layout.names))
    if layout.indexed:
        report(f"{file.name}: column 1 has no name and was left out: it numbers or names the rows")
    return [(names[i], (i,)) for i in range(layout.indexed, layout.columns)]


def _numbers(
    file: InputFile, layout: TextLayout, extent: Extent, wanted: Sequence[int], missing: MissingValues
) -> np.ndarray:
    values = _parsed(file, layout, extent, wanted)
    if values is None or (missing != "nan" and np.isnan(values).any()):
        fault = _fault(file, layout, wanted, missing)
        if values is None and not fault:
            fault = "has empty fields, which are read by pandas: pip install 'neula[io]'"
        if fault:
            raise FileError(f"{file.name}: {fault}")
    assert values is not None
    if (np.abs(values) >= WHOLE).any():
        _refuse_rounding(file, layout, wanted)
    return values


def _refuse_rounding(file: InputFile, layout: TextLayout, wanted: Sequence[int]) -> None:
    for number, text in below_header(file, layout):
        if LONG.search(text):
            for i, field in ((i, layout.fields(text)[i]) for i in wanted):
                for whole in map(int, LONG.findall(layout.with_points(field))):
                    if not is_exact(whole):
                        raise inexact(f"{file.name}: line {number}, column {i + 1}", whole)


def _parsed(file: InputFile, layout: TextLayout, extent: Extent, wanted: Sequence[int]) -> np.ndarray | None:
    """The numbers, NaN for empty fields; None if something else is there than numbers."""
    has_pandas = importlib.util.find_spec("pandas") is not None
    large = extent.bytes >= LARGE
    by_pandas = partial(_by_pandas, comments=extent.comments)
    parsers = [_by_numpy] * (not (large and has_pandas)) + [by_pandas] * has_pandas
    first = layout.fields(next(below_header(file, layout))[1])
    looks_complex = any(complex_parts(layout.with_points(first[i])) for i in wanted if i < len(first))
    parsers = [partial(_by_numpy, dtype=np.complex128)] if looks_complex else parsers
    parsers.append(_by_field)
    for parse in parsers:
        try:
            return parse(file, layout, wanted)
        except (FileError, UnicodeDecodeError):
            raise
        except ValueError:  # not a number, or a line of another width
            continue
    return None


def _by_numpy(
    file: InputFile, layout: TextLayout, wanted: Sequence[int], dtype: type = np.float64
) -> np.ndarray:
    lines = _regular_lines(file, layout)
    if dtype is np.complex128:
        lines = (UNIT.sub("j", text) for text in lines)
    return np.loadtxt(lines, dtype, delimiter=layout.delimiter, usecols=wanted, ndmin=2, quotechar='"')


def _by_field(file: InputFile, layout: TextLayout, wanted: Sequence[int]) -> np.ndarray:
    """Numbers some of which are complex; ValueError if none is."""
    found = False

    def number(field: str) -> complex:
        nonlocal found
        if parts := complex_parts(field):
            found = True
            return complex(*parts)
        if "_" in field or not field.isascii():
            raise ValueError(field)
        return complex(math.nan if field.strip() in MISSING else float(field))

    lines = _regular_lines(file, layout)
    options: dict[str, Any] = {"dtype": np.complex128, "converters": number, "encoding": None}
    values = np.loadtxt(lines, delimiter=layout.delimiter, usecols=wanted, ndmin=2, quotechar='"', **options)
    if not found:
        raise ValueError("real")
    return values


def _by_pandas(file: InputFile, layout: TextLayout, wanted: Sequence[int], comments: bool) -> np.ndarray:
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
        dtype=dict.fromkeys(range(layout.width), str) | dict.fromkeys(wanted, np.float64),
        na_values=[*MISSING, *_NAN],
        keep_default_na=False,
        low_memory=False,
        **exact,
    )
    frame: Any = None
    if not comments:
        compression = "gzip" if file.kind.endswith(".gz") else None
        about = {"compression": compression, "encoding": "utf-8-sig", "decimal": layout.decimal}
        with suppress(pd.errors.ParserError):
            frame = read(file.path, skiprows=layout.header, **about)
    # Of lines that are too short, or blank, pandas makes empty fields, or an error.
    if frame is None or frame[layout.width - 1].isna().any():
        frame = read(io.StringIO("\n".join(_regular_lines(file, layout))))
    return np.asarray(frame[list(wanted)].to_numpy(np.float64))


def _extent(file: InputFile) -> Extent:
    """Count bytes and lines; refuse early what is no text or does not fit into memory (gzip bombs)."""
    size = lines = line = 0
    comments = False
    opened = gzip.open if file.kind.endswith(".gz") else open
    with opened(file.path, "rb") as stream:
        for block in iter(partial(stream.read, 1 << 20), b""):
            if b"\0" in block:
                number = lines + 1 + block.partition(b"\0")[0].count(b"\n")
                raise FileError(f"{file.name}: line {number} holds a zero byte: it is damaged, or no text")
            size += len(block)
            lines += max(block.count(b"\n"), block.count(b"\r"))
            end = max(block.rfind(b"\n"), block.rfind(b"\r"))
            line = len(block) - 1 - end if end >= 0 else line + len(block)
            if line > LONGEST:
                raise FileError(f"{file.name}: line {lines + 1} is longer than {LONGEST >> 20} MiB")
            check_memory(file.name, (lines, 1))
            comments = comments or b"#" in block
    return Extent(size, lines + (line > 0), comments)


def _regular_lines(file: InputFile, layout: TextLayout) -> Iterator[str]:
    """The lines of numbers with decimal points; ValueError at one that has another number of fields."""
    for _, text in below_header(file, layout):
        if layout.delimiter is None or '"' in text:
            width = len(layout.fields(text))
        else:
            width = text.count(layout.delimiter) + 1
        if width != layout.width:
            raise ValueError("ragged")
        yield layout.with_points(text)


def _fault(file: InputFile, layout: TextLayout, wanted: Sequence[int], missing: MissingValues) -> str | None:
    """Say what cannot be read, and in which line, as an editor counts; None if nothing is wrong."""
    widths = Counter(len(layout.fields(text)) for _, text in below_header(file, layout))
    named = len(layout.names)
    usual = widths.most_common(1)[0][0]
    if named and usual != named + layout.closed and named not in widths:
        return f"line {layout.header} names {counted(named, 'column')}, the lines below have {usual}"
    width, others = (named, f"line {layout.header} names") if named else (usual, "most lines have")
    for number, text in below_header(file, layout):
        fields = layout.fields(text)
        if len(fields) != width + (layout.closed if named else 0):
            return f"line {number} has {counted(len(fields), 'field')}, {others} {width}"
        for i in wanted:
            field = fields[i]
            column = f"column {i + 1}" + (f" ({layout.names[i]})" if named else "")
            if field in MISSING and missing != "nan":
                what = f"is {field!r}, which is no number" if field else "is empty"
                return f"line {number}, {column} {what} ({advice(missing)})"
            if field not in MISSING and not layout.is_number(field):
                why = hint(field) or " (choose columns of numbers, as in file.csv:x1,x2)" * bool(named)
                return f"line {number}, {column}: {shorten(field)!r} is not a number{why}"
    return None


def write_text(stream: IO[bytes], table: Table, kind: str) -> None:
    """Write a matrix with all digits, so that reading restores each number exactly; column names come first.

    Names of rows make a first column without a name, as pandas writes it.
    """
    compressed = gzip.GzipFile(fileobj=stream, mode="wb", mtime=0) if kind.endswith(".gz") else None
    text = io.TextIOWrapper(compressed or stream, encoding="utf-8", newline="", write_through=True)
    delimiter = "," if kind.startswith(".csv") else "\t"
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    is_complex = np.iscomplexobj(table.values)
    matrix = np.asarray(table.values, dtype=np.complex128 if is_complex else np.float64)
    if table.columns is not None:
        writer.writerow([""] * (table.rows is not None) + list(table.columns))
    for i, row in enumerate(matrix.tolist()):
        row = [str(number).strip("()") for number in row] if is_complex else row
        writer.writerow([table.rows[i], *row] if table.rows is not None else row)
    text.detach()
    if compressed is not None:
        compressed.close()
