"""Products with a matrix and its transpose on a CPU, in one pass over it, by the compiled core.

A large matrix is read from memory as often as it is multiplied: ``A^T (b - A x)`` takes a library two passes,
and one in single precision needs a copy in double, which takes more time than they do. Here rows are read
once, and widened in registers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from neula.kernels.core import core

EACH = 1 << 15
"""Elements of a matrix from which on another thread is worth the microseconds of its start."""


PAYS = 1 << 17
"""Elements of a matrix in single precision from which passes over it take less time than a copy in double
precision and products of the library with that."""


def pays(a: torch.Tensor) -> bool:
    """Whether a matrix is in single precision on a CPU, and takes less time as it is."""
    large = a.is_cpu and a.dtype == torch.float32 and a.numel() >= PAYS
    return large and takes(a.numpy())


def takes(a: np.ndarray) -> bool:
    """Whether there is a kernel for a matrix: one of float32 or float64, whose rows have no gaps."""
    rows = a.ndim == 2 and a.strides[1] == a.itemsize and a.strides[0] >= a.shape[1] * a.itemsize
    return rows and a.dtype in (np.float32, np.float64) and a.size > 0 and core() is not None


def one_pass(
    a: torch.Tensor,
    x: torch.Tensor | None,
    b: torch.Tensor | None = None,
    *,
    image: bool = True,
    back: bool = True,
) -> tuple[Any, Any]:
    """``R = A X``, or ``B - A X``, or B without X, and ``A^T R``, those of them that are asked for, of one
    vector or of a few, in double precision.

    The kernel takes A (:func:`takes`). Sums are those of rows, and of multiples of 256 rows each, which are
    added up. MemoryError if memory does not suffice for some vectors.

    Examples
    --------
    >>> a = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> found = one_pass(a, torch.ones(2))[1] if takes(a.numpy()) else a.T @ (a @ torch.ones(2))
    >>> found.tolist()
    [79.0, 100.0]
    """
    compiled, threads = core(), min(torch.get_num_threads(), a.numel() // EACH) or 1
    assert compiled is not None
    x_rows, b_rows = (None if y is None else np.ascontiguousarray(y.numpy().T, np.float64) for y in (x, b))
    several = next(y for y in (x_rows, b_rows) if y is not None).shape[:-1]
    r, of_r = (
        np.empty((*several, size)) if wanted else None
        for size, wanted in zip(a.shape, (image, back), strict=True)
    )
    try:
        compiled.one_pass(a.numpy(), x_rows, b_rows, r, of_r, threads)
    except MemoryError:
        needed = f"for sums of {math.prod(several)} vectors of {a.shape[1]} numbers in {threads} threads"
        raise MemoryError(needed) from None
    return None if r is None else torch.from_numpy(r.T), None if of_r is None else torch.from_numpy(of_r.T)
