"""Matrices as text: CSV and Matrix Market, with errors that name the line and say what to change."""

from __future__ import annotations

import csv
import gzip
import itertools
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from neula.io.paths import FileError

Message = Callable[[str], None]


# --- CSV --------------------------------------------------------------------------------------------------


def read_csv(path: Path, tell: Message) -> np.ndarray:
    """Read a table of numbers; a header is left out, and ``tell`` gets a line that says so."""
    try:
        delimiter = _delimiter(path)
        skip, names = _header(path, delimiter)
        lines = (text for number, text in _csv_lines(path) if number > skip)
        matrix = np.loadtxt(lines, delimiter=delimiter, ndmin=2, quotechar='"')
    except FileError:
        raise
    except (UnicodeDecodeError, csv.Error) as error:
        raise FileError(f"{path}: not a text in UTF-8 ({error}); convert it first") from error
    except ValueError as error:
        raise FileError(f"{path}: {_first_bad_line(path, delimiter, skip) or error}") from error
    if names:
        if len(names) != matrix.shape[1] and not (delimiter is None and matrix.shape[1] == 1):
            raise FileError(
                f"{path}: line {skip} names {len(names)} columns, the lines below have {matrix.shape[1]}"
            )
        tell(f"{path}: line {skip} is a header and was left out ({_shorten(', '.join(names))})")
    return matrix


def _delimiter(path: Path) -> str | None:
    """Return the delimiter of the second line, since the first may be a header; None is any white space."""
    first_two = [text for _, text in itertools.islice(_csv_lines(path), 2)]
    return next((delimiter for delimiter in ";,\t" if delimiter in "".join(first_two[-1:])), None)


def _header(path: Path, delimiter: str | None) -> tuple[int, list[str]]:
    """Return how many lines precede the numbers, and the names of the columns."""
    lines = _csv_lines(path)
    number, text = next(lines, (0, ""))
    fields = _fields(text, delimiter)
    if not fields:
        raise FileError(f"{path}: holds no numbers")
    if all(map(_is_number, fields)):
        return 0, []
    # A damaged line of numbers must not pass for a header: a header has a name in every column.
    allowed = _is_number if _is_number(fields[0]) else _is_name
    for column, field in enumerate(fields, 1):
        if not allowed(field):
            raise FileError(
                f"{path}: line {number} is neither numbers nor names of columns: "
                f"column {column} is {_shorten(field)!r}{_hint(field)}"
            )
    if next(lines, None) is None:
        raise FileError(f"{path}: holds no numbers below its header")
    return number, fields


def _first_bad_line(path: Path, delimiter: str | None, skip: int) -> str | None:
    """Say where ``numpy.loadtxt`` failed, by the line number that an editor shows."""
    width = 0
    for number, text in _csv_lines(path):
        if number <= skip:
            continue
        fields = _fields(text, delimiter)
        width = width or len(fields)
        for column, field in enumerate(fields, 1):
            if not _is_number(field):
                return f"line {number}, column {column}: {_shorten(field)!r} is not a number{_hint(field)}"
        if len(fields) != width:
            return f"line {number} has {_count(len(fields), 'number')}, the lines above have {width}"
    return None


def _hint(field: str) -> str:
    if re.fullmatch(r"[-+]?\d*,\d+([eE][-+]?\d+)?", field):
        return " (write a point, not a comma, before the decimals)"
    if not field:
        return " (empty fields are not supported: write the number)"
    return ""


def _csv_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that hold something, without comments, with their numbers in the file."""
    with path.open(encoding="utf-8-sig") as stream:
        for number, line in enumerate(stream, 1):
            text = line.split("#", 1)[0].strip(" \r\n")
            if text:
                yield number, text


def _fields(text: str, delimiter: str | None) -> list[str]:
    if delimiter is None:
        return text.split()
    return [field.strip() for row in csv.reader([text], delimiter=delimiter) for field in row]


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def _is_name(field: str) -> bool:
    return field != "" and re.match(r"[-+]?[.,]?\d", field) is None


def _shorten(text: str, width: int = 60) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


# --- Matrix Market ----------------------------------------------------------------------------------------


_NUMBER = rb"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|(?i:nan|inf|infinity))"


def read_mtx(path: Path, kind: str, tell: Message) -> np.ndarray:
    """Read a Matrix Market file, compressed or not; ``tell`` gets a line on a sparse matrix made dense."""
    # scipy (1.17) ends the whole process when the last line has no newline but a blank, and when it meets
    # an error in the middle of a Python stream: it is given plain files that end with a newline.
    if kind == ".mtx" and _ends_with_newline(path):
        return _read_plain_mtx(path, path, tell)
    with tempfile.TemporaryDirectory(prefix="neula-") as folder:
        plain = Path(folder) / "matrix.mtx"
        try:
            with (
                gzip.open(path) if kind == ".mtx.gz" else path.open("rb") as source,
                plain.open("wb") as copy,
            ):
                shutil.copyfileobj(source, copy)
                copy.write(b"\n")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise FileError(f"{path}: truncated or damaged gzip file ({error})") from error
        return _read_plain_mtx(path, plain, tell)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read() == b"\n"


def _read_plain_mtx(path: Path, plain: Path, tell: Message) -> np.ndarray:
    """Read ``plain``; messages and errors name ``path``, where it came from."""
    import scipy.io

    try:
        rows, columns, _, layout, field, _ = scipy.io.mminfo(plain)
    except (ValueError, OverflowError) as error:
        raise FileError(f"{path}: not a Matrix Market file that can be read ({error})") from error
    if field == "complex":
        raise FileError(f"{path}: holds complex numbers; complex matrices are not supported yet")
    _check_memory(path, rows, columns)
    _check_lines(path, plain, 1 if layout == "array" else 2 if field == "pattern" else 3)
    try:
        matrix = scipy.io.mmread(plain)
    except (ValueError, OverflowError) as error:
        raise FileError(f"{path}: truncated or damaged Matrix Market file ({error})") from error
    if isinstance(matrix, np.ndarray):
        return matrix.astype(np.float64, copy=False)
    share = matrix.nnz / max(rows * columns, 1)
    tell(f"{path}: sparse, {rows} x {columns} with {matrix.nnz} entries ({share:.2%} dense), was made dense")
    return matrix.toarray().astype(np.float64, copy=False)


def _check_lines(path: Path, plain: Path, width: int) -> None:
    """Refuse lines that hold something else than ``width`` numbers: scipy reads ``1.5D+03`` as 1.5."""
    blank_or_comment = re.compile(rb"\s*|%.*\s*")
    numbers = re.compile(rb"\s*" + rb"\s+".join([_NUMBER] * width) + rb"\s*")
    with plain.open("rb") as stream:
        lines = ((i, line) for i, line in enumerate(stream, 1) if not blank_or_comment.fullmatch(line))
        next(lines, None)  # the size
        for i, line in lines:
            if not numbers.fullmatch(line):
                text = _shorten(line.decode(errors="replace").strip())
                raise FileError(f"{path}: line {i} should hold {_count(width, 'number')}, it is {text!r}")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" + "s" * (number != 1)


def _check_memory(path: Path, rows: int, columns: int) -> None:
    """Refuse early what cannot fit: a sparse file of a few megabytes may stand for terabytes."""
    needed = 8 * rows * columns
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise FileError(
            f"{path}: {rows} x {columns} takes {needed / 2**30:.3g} GiB as a dense matrix, "
            f"this machine has {memory / 2**30:.3g} GiB; a sparse solver suits it better"
        )


# --- writing ----------------------------------------------------------------------------------------------


def write_text(path: Path, stream: IO[bytes], array: np.ndarray, kind: str) -> None:
    """Write a vector or matrix to ``stream``, with the digits that bring back the same float64."""
    matrix = np.asarray(array, dtype=np.float64)
    if matrix.ndim == 1:
        matrix = matrix[:, np.newaxis]
    if matrix.ndim != 2:
        raise FileError(f"{path}: a {kind} file holds a matrix, not an array of shape {matrix.shape}")
    lines, separator = matrix, ","
    if kind == ".mtx":
        rows, columns = matrix.shape
        stream.write(f"%%MatrixMarket matrix array real general\n{rows} {columns}\n".encode())
        lines, separator = matrix.T, "\n"
    for line in lines:
        stream.write((separator.join(map(repr, line.tolist())) + "\n").encode())
