"""Sparse matrices of files, made dense where that fits into memory."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from neula.io.paths import FileError
from neula.io.table import Message


def as_dense(name: str, matrix: Any, tell: Message) -> np.ndarray:
    """A sparse matrix of SciPy as an array; ``tell`` gets a line on that."""
    rows, columns = matrix.shape
    check_memory(name, rows, columns)
    share = matrix.nnz / max(rows * columns, 1)
    tell(f"{name}: sparse, {rows} x {columns} with {matrix.nnz} entries ({share:.2%} dense), was made dense")
    dense: np.ndarray = matrix.toarray()
    return dense


def check_memory(name: str, rows: int, columns: int) -> None:
    """Refuse early what cannot fit: a sparse file of a few megabytes may stand for terabytes."""
    needed = 8 * rows * columns
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise FileError(
            f"{name}: {rows} x {columns} takes {needed / 2**30:.3g} GiB as a dense matrix, "
            f"this machine has {memory / 2**30:.3g} GiB; a sparse solver suits it better"
        )
