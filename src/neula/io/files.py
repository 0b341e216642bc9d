"""Matrices in files: NumPy, CSV and Matrix Market, in and out, with errors that say what to change."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from neula.io.tables import FileError, Message, read_csv, read_mtx, write_text

__all__ = ["FileError", "check_output", "read_matrix", "split_key", "write_files", "write_matrix"]

READABLE = (".npy", ".npz", ".csv", ".mtx", ".mtx.gz")
WRITABLE = (".npy", ".npz", ".csv", ".mtx")


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
    tell = message or (lambda text: None)
    with _system_errors(path, "read"):
        if kind in (".npy", ".npz"):
            return _numbers(path, _read_npy(path) if kind == ".npy" else _read_npz(path, key))
        matrix = read_csv(path, tell) if kind == ".csv" else read_mtx(path, kind, tell)
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


@contextmanager
def _system_errors(path: Path, verb: str) -> Iterator[None]:
    """What the operating system refuses becomes a FileError."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{path}: cannot be {verb}: {error.strerror or error}") from error


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
    with _system_errors(path, "read"), path.open("rb") as stream:
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


# --- writing ----------------------------------------------------------------------------------------------


def _write(path: Path, temporary: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write to ``temporary`` in the format of ``path``."""
    kind = _kind(path, WRITABLE, "written")
    with _system_errors(path, "written"), temporary.open("xb") as stream:
        if kind == ".npz":
            np.savez(stream, **arrays)  # type: ignore[arg-type]
            return
        (array,) = arrays.values()
        if kind == ".npy":
            np.save(stream, array, allow_pickle=False)
        else:
            write_text(path, stream, array, kind)
