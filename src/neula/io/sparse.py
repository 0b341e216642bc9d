"""Sparse matrices of files, made dense where that fits into memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from neula.io.memory import check_memory
from neula.io.table import Message

SPARSE = "a sparse solver suits it better"
"""Advice for a matrix that does not fit as a dense one."""


def as_dense(name: str, matrix: Any, tell: Message) -> np.ndarray:
    """A sparse matrix of SciPy as an array; ``tell`` gets a line on that."""
    rows, columns = matrix.shape
    check_memory(name, (rows, columns), SPARSE, itemsize=matrix.dtype.itemsize)
    if hasattr(matrix, "indptr"):
        matrix.check_format(full_check=True)  # with indices out of range, toarray ends the process
    share = matrix.nnz / max(rows * columns, 1)
    tell(f"{name}: sparse, {rows} x {columns} with {matrix.nnz} entries ({share:.2%} dense), was made dense")
    dense: np.ndarray = matrix.toarray()
    return dense
