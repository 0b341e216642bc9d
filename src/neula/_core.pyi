"""The compiled core (``cpp/``): kernels for small problems on a CPU.

Arrays are NumPy's. Matrices that are only read may be float64 or float32, of any strides.
"""

from typing import Literal

import numpy as np

source_hash: str
"""SHA-256 of the sources that the module was built from."""

def levels() -> list[str]:
    """Names of the instruction sets of this processor: ``baseline``, ``avx2``, ``avx512``."""

def share_threads(pool: int) -> None:
    """Run parts of kernels in the threads of the OpenMP whose function GOMP_parallel has this address.

    0 stands for threads that are started for each call.
    """

class BoundedNumbers:
    """Evidence of a solution, its fields named as in ``neula.kernels.bounded_host.Numbers``."""
SEMINORMAL_NUMBERS: tuple[str, ...]
"""Names of the evidence that :meth:`Core.seminormal` writes, in their order."""

class Bounded:
    """A solution of :meth:`Core.bounded`, its numbers named as in ``neula.kernels.bounded_host.Numbers``."""

    def __getattr__(self, name: str) -> float: ...

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
        """Solve ``A x = b``, or least squares by QR, in the place of b: float64 or complex128.

        Returns False where A has no such factorization.
        """

    def bounded(
        self,
        a: np.ndarray,
        b: np.ndarray,
        bounds: np.ndarray,
        vectors: np.ndarray,
        *,
        in_safe_range: float,
        rough: float,
        settled: float,
        steps: float,
        patience: float,
        sets: float,
        of_all: bool,
    ) -> BoundedNumbers | None:
        """Least squares with bounds: :func:`neula.kernels.bounded_host.minimum`.

        Rows of ``vectors`` become x, the sides of its elements, the norms of columns, and, if `of_all`,
        the solution without bounds.
        """

    def probe_errors(
        self, a: np.ndarray, q: np.ndarray, r: np.ndarray, probes: np.ndarray, threads: int
    ) -> np.ndarray:
        """Make R's diagonal nonnegative, in place: :func:`neula.kernels.probes_host.reflected_errors`."""

    def cholesky_qr(
        self,
        a: np.ndarray,
        q: np.ndarray,
        r: np.ndarray,
        probes: np.ndarray,
        loss: float,
        threads: int,
    ) -> np.ndarray:
        """Factorize A, overwriting Q and R: :func:`neula.kernels.cholesky_qr_host.cholesky_qr`."""

    def one_pass(
        self,
        a: np.ndarray,
        x: np.ndarray | None,
        b: np.ndarray | None,
        image: np.ndarray | None,
        back: np.ndarray | None,
        threads: int,
    ) -> None:
        """``R = A X``, ``B - A X`` or B to image, and ``A^T R`` to back, for vectors as rows.

        A (m, n) has rows without gaps: :class:`neula.kernels.one_pass_host.OnePass`.

        Raises
        ------
        MemoryError
    ) -> Bounded | None:
        """Least squares with bounds: :func:`neula.kernels.bounded_host.minimum`."""

    def seminormal(
        self,
        a: np.ndarray,
        b: np.ndarray,
        written: np.ndarray,
        probes: np.ndarray | None,
        *,
        tolerance: float,
        max_steps: float,
        max_rate: float,
        noise: float,
        floor: float,
        stagnation: float,
        computed: float,
        in_safe_range: float,
        backward_error: float,
        condition: float,
        rcond: float,
        rounding: float,
        probe_margin: float,
        probe_rounding: float,
        single: bool,
    ) -> bool:
        """Least squares by seminormal equations, in ``written``; False where there is too little memory.

        :func:`neula.kernels.seminormal_host.solved` says what the limits are, and
        :class:`neula.kernels.seminormal_host.SeminormalHostSolutions` what is written.
        """
