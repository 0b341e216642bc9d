"""LU factors, and what they keep for the solves to come."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from neula.pipeline.result import shown
from neula.pipeline.result.factored import Factored
from neula.pipeline.result.shown import ArrayT

if TYPE_CHECKING:
    from torch import Tensor

    from neula.algorithms.elimination.butterfly import TwoSided
    from neula.algorithms.elimination.lu import PackedLU
    from neula.algorithms.krylov.iterative_refinement import KeptMatrix
    from neula.algorithms.triangular.substitution import Substitution


@dataclass(eq=False)
class KeptSolvers:
    """Data shared by solves with these factors."""

    substitutions: dict[Any, Substitution] = field(default_factory=dict)  # by the dtype that is solved in
    better: LUFactors[Any] | None = None  # in double precision, where the factors are too coarse
    adjoint: LUFactors[Any] | None = None  # as those of the conjugate transpose, once it was solved with
    none_better: bool = False  # whether the factors are as good as they can be
    # Solves and measures in microseconds, if the factors are LAPACK's: returns None for what it rejects.
    measured: Callable[[Any], Any | None] | None = None


@dataclass(frozen=True, eq=False, repr=False)
class LUFactors(Factored[ArrayT], shown.Shown, Generic[ArrayT]):
    """LU factors ``A[permutation] = L U`` of a matrix or a batch, how they were computed, and the methods of
    :class:`~neula.pipeline.result.Factored`.

    Attributes
    ----------
    packed : PackedLU
        Both factors in one matrix, in their own format; of a batch one after the other.
    variant : str
        The paper's algorithm; ``"lapack"`` where that factorized (a CPU, in single or double precision).
    panel, inner_panel : int, tuple of int, or None
        Widths of the panels; ``inner_panel`` is None where the algorithm has none, both are for LAPACK.
    compute, storage : str
        Formats of the products' operands and of the factors.
    engine : str
        The engine that multiplied.
    dtype : torch.dtype
        That of A.
    transform : TwoSided or None
        How A was mixed, with ``pivot="rbt"``.
    kept : KeptMatrix or None
        A itself, by reference, for :func:`neula.lu_solve` to refine with; None after ``keep_a=False``, and of
        a batch, whose members have theirs.
    members : tuple of LUFactors, or None
        The factors of each matrix of a batch, in the memory of ``packed``; None for a single matrix.
    seconds : float
        Time of the factorization.
    """

    _arrays: ClassVar[str] = ".L and .U"

    packed: PackedLU
    variant: str
    panel: int | None
    inner_panel: int | tuple[int, ...] | None
    compute: str
    storage: str
    engine: str
    dtype: Any
    _measure_growth: Callable[[], Any]
    # Turns a tensor into an array of the library and on the device of A, in its dtype or another.
    _give_back: Callable[..., Any]
    transform: TwoSided | None = None
    kept: KeptMatrix | None = None
    members: tuple[LUFactors[Any], ...] | None = None
    seconds: float = math.nan
    # State that neula.lu_solve keeps between solves.
    _solvers: KeptSolvers = field(default_factory=KeptSolvers)
    _factors: Any = None

    @cached_property
    def growth(self) -> Any:
        """Largest element of U by that of A, of the mixed matrix where butterflies have mixed A.

        It says how much elimination magnified rounding errors; beyond the inverse of the unit roundoff of the
        format the factors hold nothing else. A float, of a batch an array of them.
        """
        return self._measure_growth()

    @property
    def L(self) -> ArrayT:
        """Unit lower triangular, made when requested, in the dtype of A.

        Its shape is (..., n, n), with n rounded up to a multiple of four where butterflies have mixed the
        matrix.
        """
        return self._attached(self.packed.lower, 0)

    @property
    def U(self) -> ArrayT:
        """Upper triangular, of the shape of L: made when requested, in the dtype of A."""
        return self._attached(self.packed.lu.triu, 1)

    def _attached(self, make: Callable[[], Tensor], place: int) -> ArrayT:
        """A factor, where somebody differentiates with respect to A attached to its graph."""
        variable = self._factors is not None and self._factors.is_variable
        return self._give_back(self._factors.triangles()[place] if variable else make())

    @property
    def pivots(self) -> Any:
        """Row ``i`` was interchanged with row ``pivots[i]``, in this order, as in SciPy.

        A list of int, of a batch an integer array of shape (..., n).
        """
        return self._integers(self.packed.pivots)

    @property
    def permutation(self) -> Any:
        """Rows of A, or of the mixed matrix, as L and U have them: ``A[permutation]`` is ``L @ U``.

        A list of int, of a batch an integer array of shape (..., n).
        """
        return self._integers(self.packed.permutation)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of A."""
        *batch, n, _ = self.packed.lu.shape
        n = n if self.transform is None else self.transform.n
        return (*batch, n, n)

    @property
    def storage_bytes(self) -> int:
        """Bytes of the factors in their format, also where it is emulated in a wider one."""
        return self.packed.storage_bytes

    @property
    def keeps_a(self) -> bool:
        """Whether A is at hand to refine solutions with."""
        if self.members is None:
            return self.kept is not None
        return all(member.keeps_a for member in self.members)

    def _integers(self, numbers: Tensor) -> Any:
        return numbers.tolist() if self.members is None else self._give_back(numbers, numbers.dtype)

    def _headline(self) -> str:
        return f"LU factors of {self.shape} {str(self.dtype).rpartition('.')[2]}"

    def _rows(self) -> shown.Rows:
        inner = self.inner_panel if isinstance(self.inner_panel, tuple) else (self.inner_panel,)
        widths = " and ".join(str(width) for width in (self.panel, *inner) if width is not None)
        return {
            "variant": f"{self.variant}, {f'panels of {widths}' if widths else 'partial pivoting'}",
            "formats": f"products in {self.compute}, factors in {self.storage}",
            "memory": f"{self.storage_bytes:,} bytes",
            "refinement": "with A, which is kept" if self.keeps_a else "none: A is not kept",
            "time": f"{shown.duration(self.seconds)}, engine {self.engine}",
        }.items()
