"""How the lines of a text file are to be read: delimiter, and names of columns or none."""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import IO

from neula.io.paths import FileError, InputFile
from neula.io.table import shorten

MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NULL", "null", "None")
"""Fields that stand for no value; ``nan`` is a number."""

YEARS = range(1000, 3000)
"""Consecutive whole numbers in this range are taken for years, and so for names, if no row below has such."""

LOOKED_AT = 10_000  # lines that decide between names and numbers where the first one does not

_NUMBER = r"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf)"
_COMPLEX = re.compile(rf"(\()?(?:({_NUMBER})(?=[-+]))?({_NUMBER})(?:im?|j)(?(1)\))", re.IGNORECASE | re.ASCII)

_SWAPPED = str.maketrans(",.", ".,")


@dataclass(frozen=True)
class TextLayout:
    """How the lines of a file are to be read."""

    delimiter: str | None  # None is any white space
    decimal: str  # a point or a comma
    header: int = 0  # number of the line with the names of the columns; 0 if there is none
    names: tuple[str, ...] = ()  # what it names; of a first column without a name the empty text
    width: int = 0  # fields of a line
    closed: bool = False  # whether every line ends with a delimiter, behind which there is no column
    assumed: str = ""  # what to give if the first line is not what it was taken for; empty if that is certain

    @property
    def columns(self) -> int:
        return self.width - self.closed

    @property
    def indexed(self) -> bool:
        """Whether the first column numbers or names the rows, as pandas and R write it."""
        return bool(self.names) and self.names[0] in ("", "Unnamed: 0")

    def fields(self, text: str) -> list[str]:
        if self.delimiter is None:
            return [field.strip('"') for field in re.findall(r'"[^"]*"|[^\s"]+', text)]
        if '"' not in text:  # also where a field is longer than csv allows
            return [field.strip() for field in text.split(self.delimiter)]
        (row,) = csv.reader([text], delimiter=self.delimiter, skipinitialspace=True)
        return [field.strip() for field in row]

    def is_number(self, field: str) -> bool:
        try:
            float(self.with_points(field))
        except ValueError:
            return complex_parts(self.with_points(field)) is not None
        return "_" not in field and field.isascii()  # float reads the digits of every script

    def with_points(self, text: str) -> str:
        """A text with decimal points; points, which separate thousands where commas do not, become commas."""
        return text if self.decimal == "." else text.translate(_SWAPPED)


def complex_parts(field: str) -> tuple[float, float] | None:
    """The parts of ``1+2j``, ``1.0 - 2.0im``, ``(1+2i)`` or ``2i``; None of others, real numbers included."""
    match = _COMPLEX.fullmatch(re.sub(r" *([-+]) *", r"\1", field.strip()))
    return None if match is None else (float(match[2] or 0), float(match[3]))


def layout_of(file: InputFile, decimal: str, header: bool | None) -> TextLayout:
    """Look at the first lines, and at all of them where these do not say whether they name columns."""
    lines = lines_of(file)
    first, second = next(lines, None), next(lines, None)
    if first is None:
        raise FileError(f"{file.name}: holds no numbers")
    (number, text), (_, below) = first, second or first
    layout = TextLayout(_delimiter(file, below, decimal), decimal)
    fields, width = layout.fields(text), len(layout.fields(below))
    layout = replace(layout, header=number, width=width)
    named, assumed = (header, "") if header is not None else _decided(file, layout, fields, second is None)
    if not named:
        layout = replace(layout, header=0, width=len(fields), assumed=assumed)
    elif second is None:
        raise FileError(f"{file.name}: holds no numbers below its header")
    else:
        while fields[-1] == "":
            fields.pop()
        if layout.delimiter is None and width == 1:
            fields = [text.strip('"')]
        layout = replace(layout, names=tuple(fields), assumed=assumed)
    closed = len(layout.names) in (0, layout.width - 1) and layout.width > 1
    closed = closed and all(layout.fields(text)[-1] == "" for _, text in below_header(file, layout))
    return replace(layout, closed=closed)


def lines_of(file: InputFile) -> Iterator[tuple[int, str]]:
    """Lines that hold something, without comments, with their numbers in the file.

    A line break inside quotes becomes a blank.
    """
    with _opened(file) as stream:
        first, open_quotes, parts = 0, False, list[str]()
        for number, line in enumerate(stream, 1):
            text = _without_comment(line.strip(" \r\n"))
            open_quotes ^= text.count('"') % 2 == 1
            if open_quotes or parts:
                first = first or number
                parts.append(text)
                text = "" if open_quotes else " ".join(parts)
            if len(parts) > LOOKED_AT:
                break
            if text.strip() and not open_quotes:
                yield first or number, text
                first, parts = 0, []
        if parts:
            raise FileError(f"{file.name}: line {first} opens a quotation that is never closed")


def below_header(file: InputFile, layout: TextLayout) -> Iterator[tuple[int, str]]:
    return (line for line in lines_of(file) if line[0] > layout.header)


def hint(field: str) -> str:
    """Kinds of fields that are not numbers."""
    if re.fullmatch(r"[-+]?\d*,\d+([eE][-+]?\d+)?", field):
        return " (for decimal commas give --decimal ,)"
    if re.fullmatch(r"[-+]?\d+\.\d+([eE][-+]?\d+)?", field):
        return " (a decimal point, or a separator of thousands, which is not read)"
    return ""


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
    if '"' not in text and re.match(r"\(?[-+.]*\d", text):
        return re.sub(r"\s+#.*", "", text)
    return text


def _delimiter(file: InputFile, text: str, decimal: str) -> str | None:
    """The delimiter of a line; None is any white space."""
    if file.kind.startswith(".tsv"):
        return "\t"
    plain = re.sub(r'"[^"]*"', "", text)
    return next((delimiter for delimiter in ";,\t".replace(decimal, "") if delimiter in plain), None)


def _is_name(field: str) -> bool:
    return field != "" and re.match(r"\(?[-+]?[.,]?\d", field) is None


def _is_whole(field: str) -> bool:
    return re.fullmatch(r"[-+]?\d+", field) is not None


def _decided(file: InputFile, layout: TextLayout, fields: Sequence[str], alone: bool) -> tuple[bool, str]:
    """Whether the first line names columns, and by which option it would not, or would, if that is assumed.

    A whole number is a name where no number below it is a whole one, or where it is a year and no number
    below is. An empty first field names no column if that counts the rows.
    """
    corner = fields[0] == "" and any(fields)
    last = max((i for i, field in enumerate(fields) if field), default=0)
    names = dict(list(enumerate(fields[: last + 1]))[corner:])
    odd = {i: name for i, name in names.items() if not (name in MISSING or layout.is_number(name))}
    if odd and all(map(_is_name, names.values())):
        return True, ""
    whole = {i: int(name) for i, name in names.items() if re.fullmatch(r"[-+]?\d+", name)}
    if not odd and not corner and (alone or len(whole) < len(names)):
        return False, ""
    below = [layout.fields(text) for _, text in islice(below_header(file, layout), LOOKED_AT)]
    columns = [[row[i] for row in below if i < len(row)] for i in range(last + 1)]
    steps = {int(b) - int(a) for a, b in pairwise(whole.values())}
    others = [not any(map(_is_whole, columns[i])) and any(columns[i]) for i in whole]
    from_zero = steps <= {1} and next(iter(whole.values()), None) == 0
    differs = any(others) and (all(others) or (from_zero and len(below) > 2))
    series = len({step > 0 for step in steps}) == 1 and all(year in YEARS for year in whole.values())
    series = series and (steps in ({1}, {-1}) or (0 not in steps and all(others)))
    years_below = {_is_whole(x) and int(x) in YEARS for i in whole for x in columns[i]}
    years = series and True not in years_below
    if odd:
        clear = len(odd) == len(names) or any(map(_is_name, odd.values()))
        damaged = any(re.match(r"[-+]?\d*[.,]|.*\d[ij]\b", name) for name in odd.values())
        numeric = any(all(x in MISSING or layout.is_number(x) for x in columns[i]) for i in odd)
        if clear and not damaged and len(whole) + len(odd) == len(names) and (numeric or differs or years):
            return True, ""
        if _is_name(fields[corner]):
            odd = {i: name for i, name in names.items() if not (i in whole or _is_name(name))} or odd
        place = next(iter(odd))
        raise FileError(
            f"{file.name}: line {layout.header} is neither numbers nor names of columns: "
            f"column {place + 1} is {shorten(fields[place])!r}{hint(fields[place])}"
        )
    counts_rows = corner and columns[0] == [str(i) for i in range(len(below))]
    if counts_rows or years or (differs and (corner or from_zero or steps == {1})):
        return True, "--no-header if it is numbers"
    one_year = differs and not steps and whole[0] in YEARS
    if corner or from_zero or one_year or (series and False in years_below):
        raise FileError(
            f"{file.name}: line {layout.header} ({shorten(', '.join(fields))}) may name the columns, or be "
            "numbers: say which by --header or --no-header"
        )
    return False, "--header if it names the columns" * (differs or (steps <= {1} and whole[0] in YEARS))
