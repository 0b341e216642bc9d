"""Matrix Market files, with errors that name the line and say what to change."""

from __future__ import annotations

import gzip
import math
import os
import re
import tempfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from neula.errors import counted
from neula.io.integers import in_float64
from neula.io.memory import SPARSE, as_dense, check_memory
from neula.io.paths import FileError, InputFile
from neula.io.table import Message, shorten

HEADER = 1 << 20  # bytes in which the comments end and the sizes stand

LONGEST = 200  # bytes of an entry with its row and column, comments and blanks between entries included

_SIZES = re.compile(rb"\s*\d{1,18}(\s+\d{1,18}){1,2}\s*")

_NUMBER = rb"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|(?i:nan|inf|infinity))"


def read_market(file: InputFile, report: Message) -> np.ndarray:
    """Read a Matrix Market file, compressed or not; ``report`` gets a line on a sparse matrix made dense."""
    # scipy (1.17) ends the whole process when the last line has no newline but a blank, and when it meets
    # an error in the middle of a Python stream: it is given plain files that end with a newline.
    if file.kind == ".mtx" and _ends_with_newline(file.path):
        return _read_plain(file.name, file.path, report)
    with tempfile.TemporaryDirectory(prefix="neula-") as folder:
        plain = Path(folder) / "matrix.mtx"
        opened = gzip.open if file.kind == ".mtx.gz" else open
        try:
            with opened(file.path, "rb") as given, plain.open("wb") as copy:
                _copy(file.name, given, copy)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise FileError(f"{file.name}: truncated or damaged gzip file ({error})") from error
        return _read_plain(file.name, plain, report)


def _copy(name: str, given: IO[bytes] | gzip.GzipFile, copy: IO[bytes]) -> None:
    """Copy a file as far as its header allows: a few compressed megabytes may hold gigabytes of anything."""
    head = given.read(HEADER)
    copy.write(head)
    copy.flush()
    sizes = [line for line in head.splitlines() if line.strip() and not line.startswith(b"%")][:1]
    numbers = [int(number) for number in sizes[0].split()] if sizes and _SIZES.fullmatch(sizes[0]) else []
    entries = numbers[2] if len(numbers) == 3 else math.prod(numbers)
    left = entries * LONGEST
    while part := given.read(1 << 20):
        copy.write(part)
        left -= len(part)
        if left < 0:
            raise FileError(f"{name}: is longer than its header says: {entries} entries")
    copy.write(b"\n")


def write_market(stream: IO[bytes], array: np.ndarray) -> None:
    """Write a matrix with all digits, so that reading restores each number exactly."""
    field = "complex" if np.iscomplexobj(array) else "real"
    matrix = np.asarray(array, dtype=np.complex128 if field == "complex" else np.float64)
    rows, columns = matrix.shape
    stream.write(f"%%MatrixMarket matrix array {field} general\n{rows} {columns}\n".encode())
    for column in np.ascontiguousarray(matrix.T).view(np.float64).reshape(columns, rows, -1).tolist():
        stream.write("".join(f"{' '.join(map(repr, parts))}\n" for parts in column).encode())


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read() == b"\n"


def _read_plain(name: str, plain: Path, report: Message) -> np.ndarray:
    """Read ``plain``; messages and errors name the file that it comes from."""
    import scipy.io

    try:
        rows, columns, _, layout, field, _ = scipy.io.mminfo(plain)
    except (ValueError, OverflowError) as error:
        raise FileError(f"{name}: not a Matrix Market file that can be read ({error})") from error
    check_memory(name, (rows, columns), SPARSE, itemsize=16 if field == "complex" else 8)
    numbers = {"pattern": 0, "complex": 2}.get(field, 1)
    lines = _check_lines(name, plain, numbers + 2 * (layout != "array"))
    if layout == "array" and not rows:  # scipy (1.17) divides by their number, which ends the process
        if lines:
            raise FileError(f"{name}: is longer than its header says: 0 entries")
        return np.zeros((0, columns), np.complex128 if field == "complex" else np.float64)
    try:
        matrix = scipy.io.mmread(plain)
    except (ValueError, OverflowError) as error:
        raise FileError(f"{name}: truncated or damaged Matrix Market file ({error})") from error
    dense = matrix if isinstance(matrix, np.ndarray) else as_dense(name, matrix, report)
    return in_float64(dense, f"{name}: A", or_complex=True)


def _check_lines(name: str, plain: Path, width: int) -> int:
    """Refuse lines that hold something else than ``width`` numbers: scipy reads ``1.5D+03`` as 1.5."""
    count = 0
    blank_or_comment = re.compile(rb"\s*|%.*\s*")
    numbers = re.compile(rb"\s*" + rb"\s+".join([_NUMBER] * width) + rb"\s*")
    with plain.open("rb") as stream:
        lines = ((i, line) for i, line in enumerate(stream, 1) if not blank_or_comment.fullmatch(line))
        next(lines, None)  # the size
        for i, line in lines:
            if not numbers.fullmatch(line):
                text = shorten(line.decode(errors="replace").strip())
                raise FileError(f"{name}: line {i} should hold {counted(width, 'number')}, it is {text!r}")
            count += 1
    return count
