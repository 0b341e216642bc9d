"""Files of matrices that memory does not hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from neula.io.memory import available
from neula.io.paths import HDF5, FileError, split_key, system_errors
from neula.io.sources import Source, row_blocks

COPIES = 3  # copies of A in double precision that solving needs: A, the matrix to factorize, and its factors

IN_BLOCKS = (".npy", ".parquet", *HDF5)

_SIZE = re.compile(r"(\d+(?:\.\d*)?) ?([KMGT]?)(?:i?B)?", re.IGNORECASE)


def size_of(text: str) -> float:
    """Bytes of ``"8G"``, ``"900 MB"`` or ``"1.5GiB"``, in powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"--memory {text}: give a number and a unit, as in 8G or 900M")
    return float(match[1]) * 1024.0 ** " KMGT".index(match[2].upper() or " ")


def rows_of(argument: str, stream: bool = False, memory: str | None = None) -> Source | None:
    """Rows of a matrix in a file, if it does not fit; None for every other, also a damaged, file.

    The file may have a dataset or columns behind a colon. With ``stream`` it is read in blocks whatever its
    size, and an error if that cannot be. The memory that there is, is by default what is free.
    """
    limit = available() if memory is None else size_of(memory)
    path, key = split_key(argument)
    if path.suffix.lower() not in IN_BLOCKS or path.is_fifo():
        if stream:
            raise FileError(f"{argument}: cannot be read in blocks; {', '.join(IN_BLOCKS)} files can be")
        return None
    try:
        with system_errors(path, "read"):
            source = _source(path, key)
            itemsize = max(8, np.dtype(source.dtype).itemsize)
            fits = COPIES * itemsize * source.shape[0] * source.shape[1] <= limit
    except (ImportError, LookupError, TypeError, ValueError):
        if stream:
            raise
        return None  # reading it as a whole says what is wrong
    return None if fits and not stream else source


def _source(path: Path, key: str | None) -> Source:
    if path.suffix.lower() == ".npy":
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    elif path.suffix.lower() == ".parquet":
        return row_blocks(path, None if key is None else key.split(","))
    else:
        from neula.io.arrays import open_dataset

        array = open_dataset(path, key)
    if array.ndim != 2 or array.dtype.kind not in "iubfc":
        raise FileError(f"{path}: {array.dtype} of shape {array.shape} is no matrix of numbers")
    return row_blocks(array)
