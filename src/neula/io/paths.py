"""Names of files: what can be read and written, said before NumPy is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

READABLE = (".npy", ".npz", ".csv", ".mtx", ".mtx.gz")
WRITABLE = (".npy", ".npz", ".csv", ".mtx")


class FileError(ValueError):
    """A file cannot be read or written; the message names it and says what to change."""


def split_key(argument: str) -> tuple[Path, str | None]:
    """Split ``file.npz:key`` into the path and the key of the array inside; other names have no key."""
    head, colon, key = argument.rpartition(":")
    if colon and head.lower().endswith(".npz"):
        return Path(head), key
    return Path(argument), None


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
    kind = kind_of(path, WRITABLE, "written")
    if arrays > 1 and kind != ".npz":
        raise FileError(f"{path}: a {kind} file holds one array, not {arrays}; give the name of an .npz file")
    if path.is_dir():
        raise FileError(f"{path}: is a directory; add the name of a file")
    if not path.parent.is_dir():
        raise FileError(f"{path}: there is no directory {path.parent}; create it first")
    if not os.access(path.parent, os.W_OK | os.X_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise FileError(f"{path}: no permission to write there")


def kind_of(path: Path, known: tuple[str, ...], verb: str) -> str:
    """Return the extension of a file, if it is a known one."""
    for extension in known:
        if path.name.lower().endswith(extension):
            return extension
    raise FileError(f"{path}: unknown extension {path.suffix!r}; {', '.join(known)} can be {verb}")


def readable_kind(path: Path) -> str:
    """Return the extension of a file that is there, is not empty, and begins as its extension says."""
    if path.is_dir():
        raise FileError(f"{path}: is a directory, not a file")
    if not path.exists():
        raise FileError(f"{path}: no such file")
    kind = kind_of(path, READABLE, "read")
    with system_errors(path, "read"), path.open("rb") as stream:
        head = stream.read(512)
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


@contextmanager
def system_errors(path: Path, verb: str) -> Iterator[None]:
    """What the operating system refuses becomes a FileError."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{path}: cannot be {verb}: {error.strerror or error}") from error
