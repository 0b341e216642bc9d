"""Files of matrices that memory does not hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from neula.io.sources import Source, row_blocks
from neula.pipeline.memory import available

COPIES = 3
"""Of A in float64 that solving takes in memory: A, what is factorized, and what becomes of it."""


def rows_of(path: Path) -> Source | None:
    """Rows of a matrix in a ``.npy`` file, if it does not fit; None for every other, also a damaged, file."""
    if path.suffix.lower() != ".npy":
        return None
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None
    if array.ndim != 2 or array.dtype.kind not in "iubf" or COPIES * 8 * array.size <= available():
        return None
    return row_blocks(array)
