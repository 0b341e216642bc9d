"""Files in the user's cache folder, which several processes may read and write at the same time."""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import lru_cache
from pathlib import Path

import platformdirs

from neula.errors import warn


def cache_folder() -> Path:
    """The folder in ``NEULA_CACHE_DIR``, or where the operating system keeps the user's caches."""
    named = os.environ.get("NEULA_CACHE_DIR")
    return Path(named).expanduser() if named else platformdirs.user_cache_path("neula")


def keep(file: Path, content: bytes) -> None:
    """Write a checked file into the cache folder if that is possible, else warn, once for each folder."""
    try:
        write_checked(file, content)
    except OSError as error:
        _warn_once(file.parent, str(error))


@lru_cache(maxsize=8)
def _warn_once(folder: Path, error: str) -> None:
    warn(
        f"compiled kernels cannot be kept in {folder} ({error}), and each process compiles them again: set "
        "NEULA_CACHE_DIR to a folder that can be written",
        RuntimeWarning,
    )


def write_whole(file: Path, content: bytes) -> None:
    """Write a file, with its folder; other processes read the old one or all of the new one meanwhile."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".new")
    try:
        with os.fdopen(handle, "wb") as room:
            room.write(content)
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_checked(file: Path, content: bytes) -> None:
    """Write a file that ends with its own checksum, which loaders of machine code ignore."""
    write_whole(file, content + hashlib.sha256(content).digest())


def read_checked(file: Path) -> bytes:
    """The content of such a file. A machine that lost power may have kept a part of it, and executing that
    part would end the process: OSError if it is not there, or not as it was written.
    """
    content = file.read_bytes()
    size = max(0, len(content) - hashlib.sha256().digest_size)
    if hashlib.sha256(content[:size]).digest() != content[size:]:
        raise OSError(f"{file} is damaged")
    return content[:size]
