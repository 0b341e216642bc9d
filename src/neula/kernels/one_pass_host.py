"""Products with a matrix and its transpose on a CPU, in one pass over it, by a kernel in C.

A large matrix is read from memory as often as it is multiplied: ``A^T (b - A x)`` takes a library two passes,
and one in single precision needs a copy in double, which takes more time than they do. Here rows are read
once, and widened in registers. Where there is no compiler, there is no kernel.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
import torch

from neula.kernels.host_matrices import address_of
from neula.kernels.host_source import load

EACH = 1 << 15
"""Elements of a matrix from which on another thread is worth the microseconds of its start."""


class _Pass(ctypes.Structure):
    _fields_ = [
        ("a", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("single", "m", "n", "apart", "k")),
        *((name, ctypes.c_void_p) for name in ("x", "b", "image", "back")),
        ("threads", ctypes.c_long),
    ]


def takes(a: np.ndarray) -> bool:
    """Whether there is a kernel for a matrix: one of float32 or float64, whose rows have no gaps."""
    rows = a.ndim == 2 and a.strides[1] == a.itemsize and a.strides[0] >= a.shape[1] * a.itemsize
    return rows and a.dtype in (np.float32, np.float64) and a.size > 0 and _library() is not None


class OnePass:
    """A matrix, and products with it in double precision.

    Sums are those of rows, and of multiples of 256 rows each, which are added up.

    Parameters
    ----------
    a : array, shape (m, n)
        One that the kernel takes (:func:`takes`); it may not change.

    Raises
    ------
    MemoryError
        By the methods, where there is no room for some vectors.

    Examples
    --------
    >>> import numpy as np
    >>> from neula.kernels.one_pass_host import OnePass, takes
    >>> a = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32)
    >>> found = OnePass(a).gram_times(np.ones(2)) if takes(a) else a.T @ (a @ np.ones(2))
    >>> found.tolist()
    [79.0, 100.0]
    """

    def __init__(self, a: np.ndarray) -> None:
        self._a = a

    def times(self, x: np.ndarray) -> np.ndarray:
        """``A x``, of one vector or of a few."""
        image = np.empty((*x.shape[1:], len(self._a)))
        self._pass(x=x, image=image)
        return image.T

    def transposed_times(self, y: np.ndarray) -> np.ndarray:
        """``A^T y``, likewise."""
        back = np.empty((*y.shape[1:], self._a.shape[1]))
        self._pass(b=y, back=back)
        return back.T

    def gram_times(self, x: np.ndarray) -> np.ndarray:
        """``A^T A x``, likewise."""
        back = np.empty((*x.shape[1:], self._a.shape[1]))
        self._pass(x=x, back=back)
        return back.T

    def residual(self, b: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``r = b - A x``, and ``A^T r``."""
        (m, n), several = self._a.shape, x.shape[1:]
        image, back = np.empty((*several, m)), np.empty((*several, n))
        self._pass(x=x, b=b, image=image, back=back)
        return image.T, back.T

    def _pass(
        self,
        *,
        x: np.ndarray | None = None,
        b: np.ndarray | None = None,
        image: np.ndarray | None = None,
        back: np.ndarray | None = None,
    ) -> None:
        """``R = A X``, or ``B - A X``, or B, and ``A^T R``, to the arrays that there are, by rows."""
        library, a = _library(), self._a
        assert library is not None
        given = [None if y is None else np.ascontiguousarray(y.T, np.float64) for y in (x, b)]
        k = next(1 if y.ndim == 1 else len(y) for y in given if y is not None)
        threads = min(torch.get_num_threads(), a.size // EACH) or 1
        places = [None if y is None else address_of(y) for y in (*given, image, back)]
        apart, single = a.strides[0] // a.itemsize, a.dtype == np.float32
        task = _Pass(address_of(a), single, *a.shape, apart, k, *places, threads)
        if not library.one_pass(ctypes.byref(task)):
            raise MemoryError(f"for sums of {k} vectors of {a.shape[1]} numbers in {threads} threads")


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    return load("one_pass")
