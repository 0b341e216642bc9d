"""Matrices in files: NumPy, CSV and Matrix Market, in and out, with errors that say what to change."""

from __future__ import annotations

import csv
import gzip
import itertools
import os
import re
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

READABLE = (".npy", ".npz", ".csv", ".mtx", ".mtx.gz")
WRITABLE = (".npy", ".npz", ".csv", ".mtx")

Message = Callable[[str], None]


class FileError(ValueError):
    """A file cannot be read or written; the message names it and says what to change."""


def split_key(argument: str) -> tuple[Path, str | None]:
    """Split ``file.npz:key`` into the path and the key of the array inside; other names have no key."""
    head, colon, key = argument.rpartition(":")
    if colon and head.lower().endswith(".npz"):
        return Path(head), key
    return Path(argument), None


def read_matrix(
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    column_as_vector: bool = False,
    message: Message | None = None,
) -> np.ndarray:
    """Read one array from a ``.npy``, ``.npz``, ``.csv``, ``.mtx`` or ``.mtx.gz`` file.

    Parameters
    ----------
    path : str or path
        The extension names the format.
    key : str, optional
        Which array of an ``.npz`` file; not needed when it holds only one.
    column_as_vector : bool, optional
        Return a matrix of one column as a vector of shape ``(m,)`` where the format cannot tell the two
        apart (``.csv`` and Matrix Market), as a right-hand side wants it.
    message : callable, optional
        Is told in one line what was done to the file's content beyond reading it: a header line left
        out, a sparse matrix made dense.

    Returns
    -------
    ndarray
        ``.npy`` and ``.npz`` keep their shape and dtype (in native byte order); ``.csv`` and Matrix Market
        give a float64 matrix.

    Raises
    ------
    FileError
        The file is missing, empty, truncated, not what its extension says, or holds no real numbers.
    """
    path = Path(path)
    kind = _readable_kind(path)
    if key is not None and kind != ".npz":
        raise FileError(f"{path}: only an .npz file holds arrays by name, so ':{key}' cannot choose one")
    tell = message or _tell_nobody
    try:
        if kind == ".npy":
            return _numbers(path, _read_npy(path))
        if kind == ".npz":
            return _numbers(path, _read_npz(path, key))
        matrix = _read_csv(path, tell) if kind == ".csv" else _read_mtx(path, kind, tell)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error
    return matrix[:, 0] if column_as_vector and matrix.shape[1] == 1 else matrix


def check_output(path: str | os.PathLike[str], *, arrays: int = 1) -> None:
    """Raise before any computing when a result could not be written to ``path`` afterwards.

    Parameters
    ----------
    path : str or path
        Where :func:`write_matrix` or :func:`write_files` will write.
    arrays : int, optional
        How many arrays will go into the file; only ``.npz`` holds more than one.

    Raises
    ------
    FileError
        Unknown extension, too many arrays for the format, no such directory, or not writable.
    """
    path = Path(path)
    kind = _kind(path, WRITABLE, "written")
    if arrays > 1 and kind != ".npz":
        raise FileError(f"{path}: a {kind} file holds one array, not {arrays}; give the name of an .npz file")
    if path.is_dir():
        raise FileError(f"{path}: is a directory; add the name of a file")
    if not path.parent.is_dir():
        raise FileError(f"{path}: there is no directory {path.parent}; create it first")
    if not os.access(path.parent, os.W_OK | os.X_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise FileError(f"{path}: no permission to write there")


def write_matrix(path: str | os.PathLike[str], array: np.ndarray, *, name: str = "array") -> None:
    """Write one array to a ``.npy``, ``.npz``, ``.csv`` or ``.mtx`` file, completely or not at all.

    Parameters
    ----------
    path : str or path
        The extension names the format. An existing file is replaced once the new one is complete.
    array : ndarray
        ``.npy`` and ``.npz`` keep shape and dtype. The text formats take vectors (one column) and matrices,
        and write as many digits as bring back exactly the same float64.
    name : str, optional
        The name of the array inside an ``.npz`` file.

    Raises
    ------
    FileError
        The file cannot be written, or the format cannot hold the array.
    """
    write_files({Path(path): {name: array}})


def write_files(contents: Mapping[Path, Mapping[str, np.ndarray]]) -> None:
    """Write several files, all of them or none: ``{path: {name of array: array}}``.

    Every file is first written under a temporary name beside its destination; only when all of them are
    complete they get their names.

    Raises
    ------
    FileError
        As for :func:`write_matrix`; no file has been changed then.
    """
    staged: list[tuple[Path, Path]] = []
    try:
        for path, arrays in contents.items():
            check_output(path, arrays=len(arrays))
            destination = Path(os.path.realpath(path))
            temporary = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.part")
            staged.append((temporary, destination))
            _write(path, temporary, arrays)
        for temporary, destination in staged:
            os.replace(temporary, destination)
    finally:
        for temporary, _ in staged:
            temporary.unlink(missing_ok=True)


def _tell_nobody(text: str) -> None:
    pass


# --- what a file is ---------------------------------------------------------------------------------------


def _kind(path: Path, known: tuple[str, ...], verb: str) -> str:
    for extension in known:
        if path.name.lower().endswith(extension):
            return extension
    raise FileError(f"{path}: unknown extension {path.suffix!r}; {', '.join(known)} can be {verb}")


def _readable_kind(path: Path) -> str:
    """Return the extension of a file that is there, is not empty, and begins as its extension says."""
    if path.is_dir():
        raise FileError(f"{path}: is a directory, not a file")
    if not path.exists():
        raise FileError(f"{path}: no such file")
    kind = _kind(path, READABLE, "read")
    try:
        with path.open("rb") as stream:
            head = stream.read(512)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not head:
        raise FileError(f"{path}: the file is empty")
    found = _sniff(head)
    if found != kind:
        content = f"looks like {found}; rename it" if found else "is of no known kind"
        raise FileError(f"{path}: not a {kind} file, as its extension says: the content {content}")
    return kind


def _sniff(head: bytes) -> str | None:
    if head.startswith(b"\x93NUMPY"):
        return ".npy"
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return ".npz"
    if head.startswith(b"\x1f\x8b"):
        return ".mtx.gz"
    if head.lower().startswith(b"%%matrixmarket"):
        return ".mtx"
    return None if b"\0" in head else ".csv"


def _numbers(path: Path, array: np.ndarray) -> np.ndarray:
    """Refuse what is no array of real numbers; torch takes the native byte order only."""
    if array.dtype.kind == "c":
        raise FileError(f"{path}: holds {array.dtype} numbers; complex matrices are not supported yet")
    if array.dtype.kind not in "biuf":
        raise FileError(f"{path}: holds {array.dtype} values, not numbers; save it as a float array")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


# --- NumPy ------------------------------------------------------------------------------------------------


def _read_npy(path: Path) -> np.ndarray:
    with _damage_reported(path, ".npy"):
        # Mapping the file first compares the size in the header with the size of the file, so a truncated
        # file of a terabyte is noticed before its memory is asked for.
        return np.array(np.load(path, mmap_mode="r", allow_pickle=False))


def _read_npz(path: Path, key: str | None) -> np.ndarray:
    with (
        _damage_reported(path, ".npz"),
        path.open("rb") as stream,
        np.load(stream, allow_pickle=False) as archive,
    ):
        return archive[_choose(path, list(archive.files), key)]


@contextmanager
def _damage_reported(path: Path, kind: str) -> Iterator[None]:
    """Whatever NumPy raises on a damaged file becomes a FileError."""
    try:
        yield
    except (FileError, OSError, MemoryError):
        raise
    except Exception as error:
        if "Object arrays" in str(error) or "Python objects" in str(error):
            raise FileError(f"{path}: holds Python objects, not numbers; save it as a float array") from error
        raise FileError(
            f"{path}: truncated or damaged {kind} file ({str(error) or 'it ends early'})"
        ) from error


def _choose(path: Path, keys: list[str], key: str | None) -> str:
    names = ", ".join(keys)
    if key is not None:
        if key not in keys:
            raise FileError(f"{path}: no array is named {key!r}; it holds {names or 'none'}")
        return key
    if not keys:
        raise FileError(f"{path}: holds no arrays")
    if len(keys) > 1:
        raise FileError(f"{path}: holds {len(keys)} arrays ({names}); choose one, as in {path}:{keys[0]}")
    return keys[0]


# --- CSV --------------------------------------------------------------------------------------------------


def _read_csv(path: Path, tell: Message) -> np.ndarray:
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
    wrong = _no_number if _is_number(fields[0]) else _no_name
    for column, field in enumerate(fields, 1):
        if wrong(field):
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
            if _no_number(field):
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


def _no_number(field: str) -> bool:
    return not _is_number(field)


def _no_name(field: str) -> bool:
    return not field or re.match(r"[-+]?[.,]?\d", field) is not None


def _shorten(text: str, width: int = 60) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


# --- Matrix Market ----------------------------------------------------------------------------------------


_NUMBER = rb"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|(?i:nan|inf|infinity))"


def _read_mtx(path: Path, kind: str, tell: Message) -> np.ndarray:
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


def _write(path: Path, temporary: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write to ``temporary`` in the format of ``path``."""
    kind = _kind(path, WRITABLE, "written")
    try:
        with temporary.open("xb") as stream:
            if kind == ".npz":
                np.savez(stream, **arrays)  # type: ignore[arg-type]
                return
            (array,) = arrays.values()
            if kind == ".npy":
                np.save(stream, array, allow_pickle=False)
            else:
                _write_text(path, stream, array, kind)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from error


def _write_text(path: Path, stream: IO[bytes], array: np.ndarray, kind: str) -> None:
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
