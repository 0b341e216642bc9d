"""Arrays as SciPy takes them, of those that neula can."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.linalg.blas import find_best_blas_type

from neula.compat.drop_in import need


def solved_in(dtype: np.dtype) -> type:
    """The dtype in which SciPy's ``solve`` computes."""
    need(_is_lapacks(dtype))
    if dtype.kind == "c":
        return np.complex64 if dtype.itemsize <= 8 else np.complex128
    return np.float32 if dtype.kind == "f" and dtype.itemsize <= 4 else np.float64


def _is_lapacks(dtype: np.dtype) -> bool:
    return dtype.kind in "iub" or dtype.char in "efdFD"


def lapack_arrays(*given: Any) -> list[np.ndarray]:
    """Arrays in what LAPACK would compute in."""
    arrays = [np.asarray(x) for x in given]
    need(all(_is_lapacks(x.dtype) for x in arrays))
    dtype = find_best_blas_type(arrays)[1]
    return [x.astype(dtype, copy=False) for x in arrays]
