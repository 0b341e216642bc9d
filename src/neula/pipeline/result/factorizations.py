"""Results of factorizations, and the methods that they share: solutions, determinants and quadratic forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from neula.pipeline.result import shown
from neula.pipeline.result.shown import ArrayT, CertifiedResult, Deferrable, Unpacked
from neula.pipeline.result.solutions import SolutionResult

if TYPE_CHECKING:
    from torch import Tensor

    from neula.algorithms.elimination.butterfly import TwoSided
    from neula.algorithms.elimination.lu import PackedLU
    from neula.algorithms.krylov.iterative_refinement import KeptMatrix
    from neula.algorithms.krylov.kept_batch import BatchSolver, KeptBatch
    from neula.algorithms.triangular.substitution import Substitution
from dataclasses import replace


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FactorValue(shown.Shown, Generic[ArrayT]):
    """Numbers that follow from a factorization, with a bound on their errors.

    Attributes
    ----------
    value : array
        In the library and on the device of the factors, in the wider of their dtype and that of b, at least
        float32; a torch tensor can be differentiated.
    error : array of float64
        Bound on the difference from the exact value for A as it is stored.
    """

    _answers: ClassVar[tuple[str, ...]] = ("value",)

    value: ArrayT
    error: Any

    def _headline(self) -> str:
        return "value with a bound on its error"

    def _rows(self) -> shown.Rows:
        return [(name, in_words(getattr(self, name))) for name in ("value", "error")]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SlogdetResult(shown.Shown, Unpacked, Generic[ArrayT]):
    """``sign, logabsdet = result``, as with ``numpy.linalg.slogdet``, and a bound on the error.

    Attributes
    ----------
    sign : array
        1 or -1; of complex matrices a number of magnitude 1.
    logabsdet : array
        Logarithm of the magnitude of the determinant; a torch tensor can be differentiated.
    error : array of float64
        Bound on the error of the logarithm, and of a complex sign in radians; a real sign is certain where it
        is finite.
    """

    _answers: ClassVar[tuple[str, ...]] = ("sign", "logabsdet")

    sign: ArrayT
    logabsdet: ArrayT
    error: Any

    def _parts(self) -> tuple[Any, ...]:
        return self.sign, self.logabsdet

    def _headline(self) -> str:
        return "sign and logarithm of a determinant"

    def _rows(self) -> shown.Rows:
        return [(name, in_words(getattr(self, name))) for name in ("sign", "logabsdet", "error")]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FactorSolution(SolutionResult[ArrayT], Generic[ArrayT]):
    """Solution of a linear system by factors of its matrix: a :class:`SolutionResult`.

    The backward error is ``||b - A x|| / (||A||_F ||x|| + ||b||)`` in the 2-norm, with scaled columns of A.

    Attributes
    ----------
    method : str
        How it was found.
    """

    method: str = ""

    def _rows(self) -> shown.Rows:
        return self._rows_with(self.method, {})


class Factored(Generic[ArrayT]):
    """Methods of a factorization: of :class:`CholeskyResult`, :class:`LUFactors` and, for square matrices and
    without pivoting, :class:`QRResult`.

    The methods compute with the existing factors, in double precision, and keep A by reference: they refine
    solutions with A, and measure the error of the factors. Do not change A. Values and solutions of torch
    tensors are differentiable by A and b, to any order, without another factorization. Right-hand sides have
    the shape (n,) or (..., n, k), as for :func:`neula.solve`.

    All methods raise a ValueError if A was changed or is not kept (after pickling, with ``keep_a=False`` or
    ``overwrite_a=True``, in graphs of ``torch.compile`` and transforms of ``torch.func``), and for a b that
    does not fit or has NaN or Inf. If no digit of a number is guaranteed, they warn with an
    :class:`~neula.IllConditionedWarning`.

    Notes
    -----
    With factors ``A = M1 M2`` (``L L^H``, ``P^T L U``, ``Q R``) and ``E = M1^-1 A M2^-1 - I``, ``log |det
    A|`` is ``log |det M1 M2| + log |det (I + E)|``. Products with eight Gaussian vectors bound the second
    term, with a probability of failure below 1e-6. The error is this bound and the rounding errors of the sum
    (N. J. Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 4.2); see
    :mod:`neula.certificates.factored`.
    """

    _factors: Any

    @property
    def _known(self) -> Any:
        if self._factors is None:
            raise ValueError(
                "this result does not keep A, which its methods need to certify an answer: results that were "
                "pickled or computed over processes, with keep_a=False, overwrite_a=True, torch.compile or "
                "torch.func do not; call the method before that, or factorize A again"
            )
        return self._factors

    def solve(self, b: Any) -> FactorSolution[ArrayT]:
        """Solution ``x`` of ``A x = b``, refined with A to the accuracy of its dtype, and its evidence."""
        return self._known.solve(b)

    def solve_triangular(self, b: Any, *, transposed: bool = False) -> FactorSolution[ArrayT]:
        """Solution ``x`` of a system with L of ``L L^H``, U of ``L U`` or R of ``Q R``, or with its conjugate
        transpose.

        The evidence is that for the factor as it is stored: substitution is backward stable (Higham 2002,
        theorem 8.5), and the condition number bounds the forward error.
        """
        return self._known.solve_triangular(b, transposed)

    def logdet(self) -> FactorValue[ArrayT]:
        """``log |det A|`` of each matrix, shape (...)."""
        return self._known.logdet()

    def slogdet(self) -> SlogdetResult[ArrayT]:
        """Sign of the determinant and :meth:`logdet`: unpacks into ``sign, logabsdet``, shape (...)."""
        return self._known.slogdet()

    def inv_quad(self, b: Any) -> FactorValue[ArrayT]:
        """``b^H A^-1 b`` of each right-hand side, shape (...) for a vector, else (..., k)."""
        return self._known.inv_quad(b)

    def diag_inverse(self) -> FactorValue[ArrayT]:
        """Diagonal of ``A^-1``, shape (..., n), in the time of n right-hand sides."""
        return self._known.diag_inverse()


def in_words(x: Any) -> str:
    if getattr(x, "shape", ()):
        return shown.array(x)
    number = complex(x)
    return f"{number:.6g}" if number.imag else f"{number.real:.6g}"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CholeskyResult(Factored[ArrayT], CertifiedResult, Generic[ArrayT]):
    """Cholesky factor of a matrix, or of a batch: a :class:`CertifiedResult` with ``L``, ``U = L^H`` and the
    methods of :class:`Factored`.

    For a batch, scalars describe the worst matrix, and arrays have one entry a matrix.

    Attributes
    ----------
    factor : array, shape (..., n, n)
        L, or with ``upper=True`` U, in the library, on the device and in the dtype of the input; zero in the
        other triangle.
    upper : bool
        Which of the two it is.
    converged : bool
        Whether the factorization is certified to the requested accuracy.
    residual : float
        Estimate of ``||A - L L^H||_F / ||A||_F`` from a few random vectors, in higher precision than that of
        the accuracy, for A scaled symmetrically to a diagonal near one.
    bound : float
        Largest accepted ``residual``.
    residuals : array of float64, shape (*batch,)
    accepted : array of bool, shape (*batch,)
    jitter : float, or array of float64, shape (*batch,)
        What was added to the diagonal of A, with ``jitter="auto"``; an array where a matrix of a batch needs
        it, else 0. The factor, what is measured of it and all methods are those of the sum.
    """

    _answers: ClassVar[tuple[str, ...]] = ("L",)

    factor: ArrayT
    upper: bool
    converged: bool
    residual: float
    bound: float = math.nan
    residuals: Any
    accepted: Any = Deferrable()  # noqa: RUF009
    jitter: Any = 0.0
    _factors: Any = None

    @property
    def L(self) -> ArrayT:
        """The lower factor; with ``upper=True`` the conjugate transpose of U."""
        return _transposed(self.factor) if self.upper else self.factor

    @property
    def U(self) -> ArrayT:
        """The upper factor; without ``upper=True`` the conjugate transpose of L."""
        return self.factor if self.upper else _transposed(self.factor)

    def _rows(self) -> shown.Rows:
        has_jitter = not isinstance(self.jitter, float) or self.jitter > 0
        jitter = {"jitter": in_words(self.jitter)} if has_jitter else {}
        residual = {"residual": f"{self.residual:.1e} (bound {self.bound:.1e})"}
        return self._lines(jitter, residual, answers="U" if self.upper else "L")


def _transposed(x: Any) -> Any:
    """The conjugate transpose of the last two dimensions, as the library of the array has it."""
    if hasattr(x, "mH"):
        return x.mH
    turned = x.mT if hasattr(x, "mT") else x.swapaxes(-2, -1)
    return turned.conj() if "complex" in str(x.dtype) else turned


@dataclass(eq=False)
class KeptSolvers:
    """Data shared by solves with these factors."""

    substitutions: dict[Any, Substitution] = field(default_factory=dict)  # by the dtype that is solved in
    better: LUFactors[Any] | None = None  # in double precision, where the factors are too coarse
    adjoint: LUFactors[Any] | None = None  # as those of the conjugate transpose, once it was solved with
    none_better: bool = False  # whether the factors are as good as they can be
    members: dict[tuple[int, ...], LUFactors[Any]] = field(default_factory=dict)  # of a batch, as requested
    # Solvers for a whole batch, and for the conjugate transposes, if the factors are LAPACK's.
    together: dict[bool, BatchSolver] = field(default_factory=dict)
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
    kept : KeptMatrix, KeptBatch or None
        A itself, by reference, for :func:`neula.lu_solve` to refine with; None after ``keep_a=False``.
    seconds : float
        Time of the factorization.
    """

    _answers: ClassVar[tuple[str, ...]] = ("L", "U")

    packed: PackedLU
    variant: str
    panel: int | None
    inner_panel: int | tuple[int, ...] | None
    compute: str
    storage: str
    engine: str
    dtype: Any
    _largest: Tensor  # magnitudes in what was factorized, shape (...)
    _measure_growth: Callable[[Tensor, Tensor], Any]
    # Turns a tensor into an array of the library and on the device of A, in its dtype or another.
    _give_back: Callable[..., Any]
    transform: TwoSided | None = None
    kept: KeptMatrix | KeptBatch | None = None
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
        return self._measure_growth(self.packed.lu, self._largest)

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
        """A factor, attached to the graph of A if its derivatives are required."""
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
        return self.kept is not None

    @property
    def members(self) -> tuple[LUFactors[Any], ...] | None:
        """The factors of each matrix of a batch, in the memory of ``packed``; None for a single matrix."""
        batch = self.shape[:-2]
        return tuple(map(self._member, product(*map(range, batch)))) if batch else None

    def _member(self, index: tuple[int, ...]) -> LUFactors[Any]:
        """The factors of one matrix of a batch, made once; of a single matrix for ``()`` these."""
        known = self._solvers.members
        if not index or index in known:
            return known.get(index, self)
        methods = None if self._factors is None else self._factors.member(index)
        packed, kept = (methods.packed, methods.kept) if methods else (self.packed.member(index), None)
        return known.setdefault(
            index,
            replace(
                self,
                packed=packed,
                kept=kept,
                _largest=self._largest[index],
                _factors=methods,
                _solvers=KeptSolvers(),
            ),
        )

    def _integers(self, numbers: Tensor) -> Any:
        return numbers.tolist() if numbers.ndim == 1 else self._give_back(numbers, numbers.dtype)

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


@dataclass(frozen=True, eq=False, repr=False)
class QRResult(Factored[ArrayT], CertifiedResult, Unpacked, Generic[ArrayT]):
    """QR factors, with the certificate and attempts of a :class:`CertifiedResult`: ``Q, R = result``. For
    square matrices, with Q and without pivoting, it has the methods of :class:`Factored`.

    With column pivoting ``Q, R, P = result``, as from ``scipy.linalg.qr``; with ``mode="raw"`` ``H, tau =
    result``, as from ``torch.geqrf``.

    Attributes
    ----------
    Q, R : array
        The factors, in the library, on the device and in the dtype of the input.
        ``Q`` is ``None`` for ``mode="r"``, both are for ``mode="raw"``.
    certificate : QRCertificate or sequence of QRCertificate
        One for each matrix of a batch; not accepted where that holds NaN or Inf, and its factors are NaN.
    P : array of int64, shape (..., n), or None
        With column pivoting the order of the columns: ``A[:, P] = Q R``.
    H, tau : array, shape (..., m, n) and (..., min(m, n)), or None
        With ``mode="raw"`` R in the upper triangle and Householder vectors below, and their factors:
        ``Q = H_1 H_2 ...`` with ``H_j = I - tau_j v_j v_j^H``.
    accepted : array of bool, shape (*batch,), or None
        Whether each factorization is certified to the requested accuracy.
    """

    _answers: ClassVar[tuple[str, ...]] = ("Q", "R")

    Q: ArrayT
    R: ArrayT
    certificate: Any = None
    P: ArrayT | None = None
    H: ArrayT | None = None
    tau: ArrayT | None = None
    accepted: Any = Deferrable(None)  # noqa: RUF009
    _factors: Any = None

    def _parts(self) -> tuple[Any, ...]:
        if self.tau is not None:
            return self.H, self.tau
        return (self.Q, self.R) if self.P is None else (self.Q, self.R, self.P)

    def _member(self, place: int) -> QRResult[Any]:
        found = self.certificate[place]
        attempts = self.attempts
        if attempts:
            attempts = (*attempts[:-1], replace(attempts[-1], accepted=found.accepted, reason=str(found)))
        factors: dict[str, Any] = {"Q": self.Q, "R": self.R, "P": self.P}
        of_one: dict[str, Any] = {name: None if x is None else x[place] for name, x in factors.items()}
        methods = None if self._factors is None else self._factors.of_member(place)
        of_one |= {"certificate": found, "attempts": attempts, "_factors": methods}
        return replace(self, **of_one)

    @property
    def converged(self) -> bool:
        """Whether the factorization is certified to the requested accuracy."""
        if not self.attempts and self.accepted is not None:  # not read yet
            return bool(self.accepted.all())
        return bool(self.attempts) and self.attempts[-1].accepted

    def _rows(self) -> shown.Rows:
        answers = self._answers if self.tau is None else ("H", "tau")
        return self._lines({}, {"certificate": str(self.certificate)}, answers=answers)
