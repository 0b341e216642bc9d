"""Products with a matrix and its transpose on a CPU, in one pass over it, by the compiled core.

A large matrix is read from memory as often as it is multiplied: ``A^T (b - A x)`` takes a library two passes,
and one in single precision needs a copy in double, which takes more time than they do. Here rows are read
once, and widened in registers.
"""

from __future__ import annotations

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


class OnePass:
    """A matrix that the kernel takes (:func:`takes`) and that may not change, and products with it in double
    precision.

    Sums are those of rows, and of multiples of 256 rows each, which are added up. Methods raise MemoryError
    if there is no room for some vectors.

    Examples
    --------
    >>> import numpy as np
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

    def residual(self, b: np.ndarray | None, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``r = b - A x``, or ``A x`` without b, and ``A^T r``."""
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
        compiled, a = core(), self._a
        assert compiled is not None
        x, b = (None if y is None else np.ascontiguousarray(y.T, np.float64) for y in (x, b))
        threads = min(torch.get_num_threads(), a.size // EACH) or 1
        try:
            compiled.one_pass(a, x, b, image, back, threads)
        except MemoryError:
            k = next(1 if y.ndim == 1 else len(y) for y in (x, b) if y is not None)
            needed = f"for sums of {k} vectors of {a.shape[1]} numbers in {threads} threads"
            raise MemoryError(needed) from None
