"""Names of files: what can be read and written, said before NumPy is imported."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

TEXT = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz")
MARKET = (".mtx", ".mtx.gz")
HDF5 = (".h5", ".hdf5")
READABLE = (".npy", ".npz", *TEXT, ".parquet", *HDF5, ".mat", *MARKET)
WRITABLE = (".npy", ".npz", *TEXT, ".parquet", *HDF5, ".mat", ".mtx")
SEVERAL = (".npz", *HDF5, ".mat")  # files that hold several arrays, each with a name

STANDARD = "-"  # the name of the standard input, and of the standard output

PATIENCE = 10  # seconds within which a pipe must be opened for writing

_PACKAGES = {".parquet": ("pyarrow", "pandas"), ".h5": ("h5py",), ".hdf5": ("h5py",)}
"""Packages that some kinds need besides NumPy and SciPy."""

_KEYED = re.compile(
    rf"(?P<path>-|.*?(?:{'|'.join(map(re.escape, (*SEVERAL, *TEXT, '.parquet')))})):(?P<key>.*)",
    re.IGNORECASE | re.DOTALL,
)

_BEGINNINGS = {
    b"\x93NUMPY": ".npy",
    b"PK\x03\x04": ".npz",
    b"PK\x05\x06": ".npz",
    b"PAR1": ".parquet",
    b"\x89HDF\r\n\x1a\n": ".h5",
    b"MATLAB ": ".mat",
}


class FileError(ValueError):
    """A file cannot be read or written; the message names it and says what to change."""


@dataclass(frozen=True)
class InputFile:
    path: Path  # where its bytes are
    kind: str  # its extension, one of those that can be read
    name: str  # its name in messages

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> Self:
        """A file that is there, is not empty, and begins as its extension says."""
        path = Path(path)
        return cls(path, readable_kind(path), str(path))

    @classmethod
    def unnamed(cls, path: Path, name: str) -> Self:
        """A file whose kind is what its content looks like."""
        with path.open("rb") as stream:
            head = stream.read(512)
        if not head:
            raise FileError(f"{name} is empty")
        kind = _sniff(head)
        if kind is None:
            raise FileError(f"{name} is of no known kind; {', '.join(READABLE)} can be read")
        _check_package(kind, name)
        return cls(path, kind, name)


def split_key(argument: str) -> tuple[Path, str | None]:
    """Split ``file.npz:key`` into the path and what is chosen inside; other names choose nothing.

    The chosen array of an ``.npz``, HDF5 or ``.mat`` file, or columns of a table.
    """
    match = _KEYED.fullmatch(argument)
    return (Path(match["path"]), match["key"]) if match else (Path(argument), None)


def check_output(path: str | os.PathLike[str], *, arrays: int = 1) -> None:
    """Raise before any computing when a result could not be written to ``path`` afterwards.

    A FileError says if the extension is unknown, if the format does not hold so many arrays (only ``.npz``,
    HDF5 and ``.mat`` hold more than one), if there is no such directory, or if it is not writable.
    """
    path = Path(path)
    if path.is_dir():
        raise FileError(f"{path}: is a directory; add the name of a file")
    if path.exists() and not path.is_file():  # root would replace a device by a file
        raise FileError(f"{path}: is a pipe or a device, not a file; choose another output file")
    kind = kind_of(path, WRITABLE, "written")
    if arrays > 1 and kind not in SEVERAL:
        raise FileError(f"{path}: a {kind} file holds one array, not {arrays}; give the name of an .npz file")
    _check_package(kind, str(path))
    if not path.parent.is_dir():
        raise FileError(f"{path}: there is no directory {path.parent}; create it first")
    if not os.access(path.parent, os.W_OK | os.X_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise FileError(f"{path}: no permission to write there")


def kind_of(path: Path, known: tuple[str, ...], verb: str) -> str:
    """Return the extension of a file, if it is a known one."""
    for extension in known:
        if path.name.lower().endswith(extension):
            return extension
    given = f"unknown extension {path.suffix!r}" if path.suffix else "the name has no extension"
    raise FileError(f"{path}: {given}; {', '.join(known)} can be {verb}")


def readable_kind(path: Path) -> str:
    """Return the extension of a file that is there, is not empty, and begins as its extension says."""
    if path.is_dir():
        raise FileError(f"{path}: is a directory, not a file")
    if not path.exists():
        raise FileError(f"{path}: no such file")
    if not path.is_file():
        raise FileError(f"{path}: is a pipe or a device, not a file; copy what comes from it into a file")
    kind = kind_of(path, READABLE, "read")
    with system_errors(path, "read"), path.open("rb") as stream:
        head = stream.read(512)
    if not head:
        raise FileError(f"{path}: the file is empty")
    found = _sniff(head)
    # Version 4 of .mat files begins with anything.
    if _family(found) != _family(kind) and not (kind == ".mat" and found in (None, ".csv")):
        content = f"looks like {found}; rename it" if found else "is of no known kind"
        raise FileError(f"{path}: not a {kind} file, although its name says so: the content {content}")
    _check_package(kind, str(path))
    return kind


def _check_package(kind: str, name: str) -> None:
    for package in _PACKAGES.get(kind, ()):
        if importlib.util.find_spec(package) is None:
            raise FileError(
                f"{name}: {kind} files need {package}, which is not installed: pip install 'neula[io]'"
            )


def _family(kind: str | None) -> str | None:
    """One of the kinds with similar content."""
    if kind in TEXT:
        return ".csv.gz" if kind.endswith(".gz") else ".csv"
    return ".h5" if kind in HDF5 else kind


def _sniff(head: bytes) -> str | None:
    if head.startswith(b"\x1f\x8b"):
        inside = _text_kind(_inflated(head))
        return None if inside is None else f"{inside}.gz"
    for beginning, kind in _BEGINNINGS.items():
        if head.startswith(beginning):
            return kind
    return _text_kind(head)


def _text_kind(head: bytes) -> str | None:
    if head.lower().startswith(b"%%matrixmarket"):
        return ".mtx"
    return None if b"\0" in head else ".csv"


def _inflated(head: bytes) -> bytes:
    """Decompress the beginning of a gzip file."""
    try:
        return zlib.decompressobj(wbits=31).decompress(head, 512)
    except zlib.error:
        return b""


def copy_pipe(path: Path, copy: IO[bytes]) -> None:
    """Copy what comes through a named pipe. Who has opened it for writing may be slow."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as pipe:
        end = time.monotonic() + PATIENCE
        with suppress(BlockingIOError):  # there is a writer, and nothing to read yet
            while not (beginning := os.read(pipe.fileno(), 1)):
                if time.monotonic() > end:
                    raise FileError(f"{path}: is a pipe, and no data came from it for {PATIENCE} seconds")
                time.sleep(0.05)
            copy.write(beginning)
        os.set_blocking(pipe.fileno(), True)
        shutil.copyfileobj(pipe, copy)


@contextmanager
def system_errors(path: Path | str, verb: str) -> Iterator[None]:
    """Turn errors of the operating system into a FileError."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{path}: cannot be {verb}: {error.strerror or error}") from error
