"""The compiled core (``cpp/``): kernels for small problems on a CPU.

Arrays are NumPy's. Matrices that are only read may be float64 or float32, of any strides.
"""

from typing import Any, Literal

import numpy as np

source_hash: str
"""SHA-256 of the sources that the module was built from."""

def levels() -> list[str]:
    """Names of the instruction sets that this processor has a build for: ``baseline``, ``avx2``, ``avx512``."""

class BoundedLimits:
    """Limits of :meth:`Core.bounded`; :class:`neula.kernels.bounded_host.BoundedLimits` says what each is."""

    def __init__(
        self,
        *,
        in_safe_range: float,
        rough: float,
        settled: float,
        steps: float,
        patience: float,
        sets: float,
    ) -> None: ...

class Bounded:
    """A solution of :meth:`Core.bounded`: numbers by the names of :class:`neula.kernels.bounded_host.Numbers`."""

    numbers: Any
    x: np.ndarray
    at: np.ndarray
    sizes: np.ndarray
    unbounded: np.ndarray

class Core:
    """The kernels in the build for one instruction set.

    Raises
    ------
    ValueError
        If the processor has no such instructions.
    """

    level: str

    def __init__(self, level: str) -> None: ...
    def arithmetic_is_exact(self) -> bool:
        """Whether sums and products have the rounding errors of IEEE arithmetic."""

    def kit_solve(self, factorization: Literal["cholesky", "lu", "qr"], a: np.ndarray, b: np.ndarray) -> bool:
        """Solve ``A x = b``, or least squares by QR, float64 or complex128, in the place of b; whether it went well."""

    def bounded(
        self, a: np.ndarray, b: np.ndarray, bounds: np.ndarray, limits: BoundedLimits, *, of_all: bool
    ) -> Bounded | None:
        """Least squares with bounds: :func:`neula.kernels.bounded_host.minimum`."""
