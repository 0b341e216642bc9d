"""Matrices in files: NumPy, CSV and Matrix Market, in and out, with errors that say what to change."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from neula.io.paths import WRITABLE, FileError, check_output, kind_of, readable_kind, split_key, system_errors
from neula.io.tables import Message, read_csv, read_mtx, write_text

__all__ = ["FileError", "check_output", "read_matrix", "split_key", "write_files", "write_matrix"]


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
    kind = readable_kind(path)
    if key is not None and kind != ".npz":
        raise FileError(f"{path}: only an .npz file holds arrays by name, so ':{key}' cannot choose one")
    tell = message or (lambda text: None)
    with system_errors(path, "read"):
        if kind in (".npy", ".npz"):
            return _numbers(path, _read_npy(path) if kind == ".npy" else _read_npz(path, key))
        matrix = read_csv(path, tell) if kind == ".csv" else read_mtx(path, kind, tell)
    return matrix[:, 0] if column_as_vector and matrix.shape[1] == 1 else matrix


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


# --- what a file is ---------------------------------------------------------------------------------------


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
    kind = kind_of(path, WRITABLE, "written")
    with system_errors(path, "written"), temporary.open("xb") as stream:
        if kind == ".npz":
            np.savez(stream, **arrays)  # type: ignore[arg-type]
            return
        (array,) = arrays.values()
        if kind == ".npy":
            np.save(stream, array, allow_pickle=False)
        else:
            write_text(path, stream, array, kind)
