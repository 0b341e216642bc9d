"""What the solvers return: the answer, and the evidence that it is one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from neula.errors import warn

if TYPE_CHECKING:
    from torch import Tensor

    from neula.algorithms.elimination.butterfly import TwoSided
    from neula.algorithms.elimination.lu import PackedLU
    from neula.algorithms.krylov.lu_refinement import KeptMatrix
    from neula.algorithms.triangular.substitution import Substitution

NAMED = 5
"""Matrices of a batch that a message names; it counts the others."""


class AccuracyWarning(UserWarning):
    """The result is the best that was found, but it is not certified to the accuracy asked for."""


class IllConditionedWarning(AccuracyWarning):
    """The problem is so ill-conditioned, or singular, that no digit of the solution is sure."""


class AccuracyError(ArithmeticError):
    """The accuracy was not reached, and ``strict=True`` asked for an exception instead of a warning.

    Attributes
    ----------
    result : QRResult, LstsqResult or SolveResult
        The best that was found, as it would have been returned with a warning.
    indices : tuple of tuple of int
        Which matrices of the batch missed; of a single matrix the empty index.
    """

    def __init__(self, message: str, result: Any, indices: Sequence[Sequence[int]]) -> None:
        super().__init__(message)
        self.result = result
        self.indices = tuple(tuple(index) for index in indices)

    def __reduce__(self) -> tuple[Any, ...]:
        """All three arguments, so that it travels between processes."""
        return type(self), (str(self), self.result, self.indices)


def report_missed(
    what: str, why: str, result: Any, indices: Sequence[Sequence[int]], *, strict: bool, unsure: bool = False
) -> None:
    """Warn the caller of a public function, or raise, and name the matrices of a batch.

    ``unsure`` says that no digit of one of the solutions is sure.

    Raises
    ------
    AccuracyError
        If ``strict``.
    """
    named = [f"A[{', '.join(map(str, index))}]" for index in indices[:NAMED] if index]
    more = [f"{len(indices) - NAMED} more"] if len(indices) > NAMED else []
    message = f"{what}{' for ' * bool(named)}{', '.join(named + more)}: {why}"
    if strict:
        raise AccuracyError(message, result, indices)
    warn(message, IllConditionedWarning if unsure else AccuracyWarning)


@dataclass(frozen=True)
class Attempt:
    """One link of the chain: what was tried, and what its certificate said.

    Attributes
    ----------
    method : str
        The algorithm and its arithmetic, e.g. ``"rgsqrf fp16 + cgls"``.
    accepted : bool
        Whether the measured certificate met the accuracy asked for.
    reason : str
        The measured numbers, in words.
    """

    method: str
    accepted: bool
    reason: str


@dataclass(frozen=True)
class QRCertificate:
    """Measured quality of a QR factorization, in the scaling in which every column has norm near 1.

    Attributes
    ----------
    residual : float
        Estimate of ``||A - Q R||_F / ||A||_F`` from a few random vectors.
    orthogonality : float
        Estimate of ``||I - Q^T Q||_F / sqrt(n)`` from a few random vectors.
    residual_bound, orthogonality_bound : float
        What was asked for.
    """

    residual: float
    orthogonality: float
    residual_bound: float
    orthogonality_bound: float

    @property
    def accepted(self) -> bool:
        """Whether both measures meet their bounds (NaN never does)."""
        return self.residual <= self.residual_bound and self.orthogonality <= self.orthogonality_bound

    def __str__(self) -> str:
        return (
            f"residual {self.residual:.1e} (bound {self.residual_bound:.1e}), "
            f"orthogonality {self.orthogonality:.1e} (bound {self.orthogonality_bound:.1e})"
        )


@dataclass(frozen=True)
class QRResult:
    """``Q, R = result`` as with ``torch.linalg.qr``; the rest says how it was made and how good it is.

    Attributes
    ----------
    Q, R : array
        The factors, in the library, on the device and in the dtype of the input.
        ``Q`` is ``None`` for ``mode="r"``.
    certificate : QRCertificate or sequence of QRCertificate
        One for each matrix of a batch; not accepted where that holds NaN or Inf, and its factors are NaN.
    attempts : tuple of Attempt
        The chain that led here; the last one is the accepted one, if any was accepted.
    engine : str
        The engine that multiplied.
    accuracy : str
        The accuracy that was asked for.
    """

    Q: Any = field(repr=False)
    R: Any = field(repr=False)
    certificate: Any = None
    attempts: tuple[Attempt, ...] = ()
    engine: str = ""
    accuracy: str = ""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.Q, self.R))

    def __getitem__(self, index: int) -> Any:
        return (self.Q, self.R)[index]

    def __len__(self) -> int:
        return 2

    @property
    def converged(self) -> bool:
        """Whether the factorization is certified to the accuracy asked for."""
        return bool(self.attempts) and self.attempts[-1].accepted


@dataclass(frozen=True)
class LstsqResult:
    """Solution of a least-squares problem, or of a batch of them, with the measured evidence.

    Of a batch the single numbers are those of the worst problem; the arrays have one for each.

    Attributes
    ----------
    x : array, shape (*batch, n) or (*batch, n, k)
        The solution, in the library, on the device and in the dtype of the input; NaN where a problem of a
        batch holds NaN or Inf.
    converged : bool
        Whether the measured backward error meets the accuracy asked for.
    iterations : int
        Refinement iterations, over all attempts (and all problems that were solved alone).
    backward_error : float
        Upper bound on the relative perturbation of ``A`` and ``b`` for which ``x`` is exact (with a
        low-precision R one of its terms is an estimate); the worst right-hand side counts.
    optimality : float
        ``||A^T r|| / (||A|| ||r||)`` in the column-scaled matrix; the worst right-hand side counts.
    tolerance : float
        What ``backward_error`` was asked to be.
    residual_norm : float or list of float
        ``||b - A x||`` of each right-hand side, flattened (with damping and weights, of the augmented
        problem).
    rank : int
        Numerical rank of ``A``, with damping of the stacked matrix; where it is below the largest possible
        one, the minimum-norm solution was computed. Of a batch the smallest of those that were solved.
    condition : float
        Condition number of A with normalized columns, estimated; below full rank that of its part of this
        rank. Of a batch the largest.
    forward_error : float
        Bound on ``||D (x - x*)|| / ||D x*||``, x* being the exact solution for A and b as they are
        stored, below full rank of the problem of this rank, and D the norms of
        the columns of A; the worst right-hand side counts.
    digits : float
        Decimal digits of x that are sure: the negative logarithm of ``forward_error``.
    history : tuple of float
        The backward error at every restart, first to last; empty if all problems were solved together.
    factorization : str
        What the accepted attempt did, e.g. ``"rgsqrf fp16 + cgls"``.
    attempts : tuple of Attempt
        The chain that led here; the last one is the accepted one, if any was accepted.
    engine : str
        The engine that multiplied.
    accuracy : str
        The accuracy that was asked for.
    accepted : array of bool, shape (*batch,)
        Whether each problem meets the accuracy, with no doubt about its rank.
    backward_errors : array of float64, shape (*batch,)
    ranks : array of int64, shape (*batch,)
        0 where a problem holds NaN or Inf.
    conditions : array of float64, shape (*batch,)
    forward_errors : array of float64, shape (*batch,) or (*batch, k)
        Of each right-hand side.
    """

    x: Any
    converged: bool
    iterations: int
    backward_error: float
    optimality: float
    tolerance: float
    residual_norm: Any
    rank: int
    condition: float = math.nan
    forward_error: float = math.nan
    digits: float = 0.0
    history: tuple[float, ...] = ()
    factorization: str = ""
    attempts: tuple[Attempt, ...] = ()
    engine: str = ""
    accuracy: str = ""
    accepted: Any = field(default=None, repr=False)
    backward_errors: Any = field(default=None, repr=False)
    ranks: Any = field(default=None, repr=False)
    conditions: Any = field(default=None, repr=False)
    forward_errors: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class SolveResult:
    """Solution of a linear system, or of a batch of them, with the measured evidence.

    Of a batch the single numbers are those of the worst system; the arrays have one for each.

    Attributes
    ----------
    x : array, shape (*batch, n) or (*batch, n, k)
        The solution, in the library, on the device and in the dtype of the input.
    converged : bool
        Whether the measured backward error meets the accuracy asked for.
    iterations : int
        Solves with the factors, over all attempts and all systems.
    backward_error : float
        ``||b - A x|| / (||A|| ||x|| + ||b||)`` in the infinity norm, of A as it was given and, where it is
        badly scaled, with its rows and columns scaled: the larger one; the worst right-hand side counts.
    tolerance : float
        What ``backward_error`` was asked to be.
    growth : float
        Largest element of U, relative to that of the scaled A: by how much elimination magnified errors.
    condition : float
        Condition number of A with normalized columns, estimated; infinite if A seems singular. Of a batch
        the largest.
    forward_error : float
        Bound on ``||D (x - x*)|| / ||D x*||``, x* being the exact solution for A and b as they are
        stored and D the norms of
        the columns of A; the worst right-hand side counts.
    digits : float
        Decimal digits of x that are sure: the negative logarithm of ``forward_error``.
    history : tuple of float
        The largest backward error after every step of refinement, first to last: the first one is that of
        a solve with the factors. Of a batch that was solved together the largest of all, else of the worst.
    method : str
        What the accepted attempt did, e.g. ``"rbt + lu fp32 + gmres"``.
    attempts : tuple of Attempt
        The chain that led here; the last one is the accepted one, if any was accepted.
    engine : str
        The engine that multiplied.
    accuracy : str
        The accuracy that was asked for.
    accepted : array of bool, shape (*batch,)
        Whether each system is solved to the accuracy asked for.
    backward_errors, conditions : array of float64, shape (*batch,)
    forward_errors : array of float64, shape (*batch,) or (*batch, k)
        Of each right-hand side.
    """

    x: Any
    converged: bool
    iterations: int
    backward_error: float
    tolerance: float
    growth: float
    condition: float = math.nan
    forward_error: float = math.nan
    digits: float = 0.0
    history: tuple[float, ...] = ()
    method: str = ""
    attempts: tuple[Attempt, ...] = ()
    engine: str = ""
    accuracy: str = ""
    accepted: Any = field(default=None, repr=False)
    backward_errors: Any = field(default=None, repr=False)
    conditions: Any = field(default=None, repr=False)
    forward_errors: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class SVDResult:
    """``U, s, Vh = result``: a truncated singular value decomposition.

    Attributes
    ----------
    U : array, shape (m, k)
    s : array, shape (k,)
        Singular values, descending.
    Vh : array, shape (k, n)
    relative_error : float
        ``||A - U diag(s) Vh||_F / ||A||_F``, estimated from a few random vectors, or by Pythagoras from the
        norms of A and s, which is exact.
    qr : QRResult
        The factorization behind it, with its certificate (its ``Q`` and ``R`` are dropped). Where the
        triplets come from the Gram matrix of A, the certificate is theirs: its residual is
        ``||A^T U - V diag(s)||_F / ||A||_F``, its orthogonality that of U.
    """

    U: Any = field(repr=False)
    s: Any
    Vh: Any = field(repr=False)
    relative_error: float
    qr: QRResult = field(repr=False)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.U, self.s, self.Vh))

    def __getitem__(self, index: int) -> Any:
        return (self.U, self.s, self.Vh)[index]

    def __len__(self) -> int:
        return 3


@dataclass(frozen=True)
class LUFactors:
    """``A[permutation] = L U``: the factors as they were computed, and how; of a matrix, or of a batch.

    Attributes
    ----------
    packed : PackedLU
        Both factors in one matrix, in their own format; of a batch one after the other.
    variant : str
        The paper's algorithm.
    panel, inner_panel : int
        Widths of the panels; ``inner_panel`` is None where the algorithm has none.
    compute, storage : str
        Formats of the products' operands and of the factors.
    engine : str
        The engine that multiplied.
    dtype : torch.dtype
        That of A.
    transform : TwoSided or None
        How A was mixed, with ``pivot="rbt"``.
    measure_growth : callable
        Makes :attr:`growth`.
    give_back : callable
        Turns a tensor into an array of the library and on the device of A, in its dtype or another.
    kept : KeptMatrix or None
        A itself, by reference, for :func:`neula.lu_solve` to refine with; None after ``keep_a=False``, and of
        a batch, whose members have theirs.
    members : tuple of LUFactors, or None
        The factors of each matrix of a batch, in the memory of ``packed``; None for a single matrix.
    solvers : dict
        What :func:`neula.lu_solve` keeps from one solve to the next, by precision.
    """

    packed: PackedLU = field(repr=False)
    variant: str
    panel: int
    inner_panel: int | None
    compute: str
    storage: str
    engine: str
    dtype: Any
    measure_growth: Callable[[], Any] = field(repr=False, compare=False)
    give_back: Callable[..., Any] = field(repr=False)
    transform: TwoSided | None = field(default=None, repr=False)
    kept: KeptMatrix | None = field(default=None, repr=False, compare=False)
    members: tuple[LUFactors, ...] | None = field(default=None, repr=False, compare=False)
    solvers: dict[Any, Substitution] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def growth(self) -> Any:
        """Largest element of U by that of A, of the mixed matrix where butterflies have mixed A.

        It says how much elimination magnified rounding errors; beyond the inverse of the unit roundoff of the
        format the factors hold nothing else. A float, of a batch an array of them.
        """
        return self.measure_growth()

    @property
    def L(self) -> Any:
        """Unit lower triangular, made when asked for, in the dtype of A.

        Its shape is (..., n, n), with n rounded up to a multiple of four where butterflies have mixed the
        matrix.
        """
        lower = self.packed.lu.tril(-1)
        lower.diagonal(dim1=-2, dim2=-1).fill_(1)
        return self.give_back(lower)

    @property
    def U(self) -> Any:
        """Upper triangular, of the shape of L: made when asked for, in the dtype of A."""
        return self.give_back(self.packed.lu.triu())

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
        return numbers.tolist() if self.members is None else self.give_back(numbers, numbers.dtype)
