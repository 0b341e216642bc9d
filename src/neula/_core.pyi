"""The compiled core (``cpp/``): kernels for small problems on a CPU.

Arrays are NumPy's. Matrices that are only read may be float64 or float32, of any strides.
"""

from collections.abc import Sequence

import numpy as np

source_hash: str
"""SHA-256 of the sources that the module was built from."""

def levels() -> list[str]:
    """Names of the instruction sets of this processor: ``baseline``, ``avx2``, ``avx512``."""

def share_threads(pool: int) -> None:
    """Run parts of kernels in the threads of the OpenMP whose function GOMP_parallel has this address.

    0 stands for threads that are started for each call.
    """

SEMINORMAL_NUMBERS: tuple[str, ...]
"""Names of the evidence that :meth:`Core.seminormal` writes, in their order."""

class SystemsSetting:
    """Random vectors and limits: :meth:`Core.systems_setting`."""

class LargeSystem:
    """A linear system that is to be solved by factors of a copy of A^T: :meth:`Core.large_system`."""

    def copy(self) -> None:
        """Copy A to the place of the factors, where LAPACK may factorize it."""

    def solve(self, *, definite: bool) -> None:
        """Solve by LU factors with their pivots, or by a Cholesky factor, and measure the solution."""

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

    def bounded(
        self,
        a: np.ndarray,
        b: np.ndarray,
        bounds: np.ndarray,
        vectors: np.ndarray,
        limits: Sequence[float],
        of_all: bool,
    ) -> list[float] | None:
        """Least squares with bounds: :func:`neula.kernels.small_problems.bounded_host.minimum`.

        Limits and numbers of the solution are in the order of their classes there.

        Rows of ``vectors`` become x, the sides of its elements, the norms of columns, and, if `of_all`,
        the solution without bounds.
        """

    def probe_errors(
        self, a: np.ndarray, q: np.ndarray, r: np.ndarray, probes: np.ndarray, threads: int
    ) -> np.ndarray:
        """Make R's diagonal nonnegative, in place: ``probes_host.reflected_errors``."""

    def cholesky_qr(
        self, a: np.ndarray, q: np.ndarray, r: np.ndarray, probes: np.ndarray, loss: float, threads: int
    ) -> np.ndarray:
        """Factorize A, overwriting Q and R: :func:`neula.kernels.qr.cholesky_qr_host.cholesky_qr`.

        They may also be complex64 or complex128, with real random vectors of twice the length.
        """

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

        A (m, n) has rows without gaps: :func:`neula.kernels.few_vectors.one_pass_host.one_pass`.

        Raises
        ------
        MemoryError
        """

    def doubled_normal(
        self,
        a: np.ndarray,
        x: np.ndarray,
        x_low: np.ndarray | None,
        b: np.ndarray,
        residual: np.ndarray,
        gradient: np.ndarray,
        threads: int,
    ) -> None:
        """``R = B - A (X + X_low)`` and ``A^T R`` as pairs: ``kernels.doubled.doubled_normal``.

        Vectors are rows: x (k, n), b (k, m); residual (2, k, m) and gradient (2, k, n) are overwritten.

        Raises
        ------
        MemoryError
        """

    def block_fma(
        self, a: np.ndarray, b: np.ndarray, c: np.ndarray, block: int, ulp: float, threads: int
    ) -> None:
        """``C = A B``, summed as a matrix unit does: ``block_fma.block_fma_product``.

        A (2, batch, m, k) and B (2, batch, tiles, k, 8) hold the elements and their powers of two, tiles of 8
        columns; C (batch, tiles, m, 8) is overwritten.
        """

    def seminormal(
        self,
        a: np.ndarray,
        b: np.ndarray,
        written: np.ndarray,
        probes: np.ndarray | None,
        limits: Sequence[float],
        single: bool,
    ) -> bool:
        """Least squares by seminormal equations, in ``written``; False where there is too little memory.

        :func:`neula.kernels.small_problems.seminormal_host.prepared` says what the limits are, and
        :class:`neula.kernels.small_problems.seminormal_host.SeminormalHostSolutions` what is written.
        """

    system_evidence: dict[str, tuple[int, int]]
    """The numbers of ``SystemEvidence`` (``cpp/kernels.hpp``): the place of each, and how many it is."""

    def systems_setting(self, vectors: np.ndarray, limits: Sequence[float]) -> SystemsSetting:
        """Random vectors as rows, and ``SystemLimits``: the same for all systems of an order."""

    def solve_systems(
        self,
        a: np.ndarray,
        b: np.ndarray,
        setting: SystemsSetting,
        x: np.ndarray,
        forward_error: np.ndarray,
        evidence: np.ndarray,
        definite: bool,
        single_result: bool,
        threads: int,
    ) -> bool:
        """Systems, one or a batch, with their evidence: :func:`neula.algorithms.elimination.compiled.solved`.

        Matrices may also be complex64 or complex128, b is real where A is, and x is float64 or complex128.

        Returns False where memory does not suffice.
        """

    def large_system(
        self,
        a: np.ndarray,
        b: np.ndarray,
        setting: SystemsSetting,
        factors: np.ndarray,
        pivots: np.ndarray,
        x: np.ndarray,
        forward_error: np.ndarray,
        evidence: np.ndarray,
        single_result: bool,
        doubled: bool,
        threads: int,
    ) -> LargeSystem:
        """One system by factors: :func:`neula.algorithms.elimination.factored.solved_by_factors`."""
