"""Results of linear systems and least squares, also with bounds and with many dampings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Generic, Self

import numpy as np

from neula.pipeline.result import shown
from neula.pipeline.result.named import Named, as_numpy
from neula.pipeline.result.regression import Regression
from neula.pipeline.result.shown import ArrayT, CertifiedResult, Deferrable, Unpacked


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SolutionResult(CertifiedResult, Generic[ArrayT]):
    """Solution of a problem ``A x = b``, or of a batch: a :class:`CertifiedResult`.

    For a batch, scalars describe the worst problem, and arrays have one entry a problem.

    Attributes
    ----------
    x : array, shape (*batch, n) or (*batch, n, k)
        The solution, in the library, on the device and in the dtype of the input.
    converged : bool
        Whether the measured backward error meets the requested accuracy.
    iterations : int
        Refinement steps, over all attempts; for problems solved together those of the slowest. On a GPU
        several steps are launched before the host reads their errors, and all of these count.
    backward_error : float
        Relative change of the data for which ``x`` is exact; the worst right-hand side counts.
    tolerance : float
        Largest accepted ``backward_error``.
    condition : float
        Condition number of A with normalized columns, estimated. Of a batch the largest.
    forward_error : float
        Bound on ``||D (x - x*)|| / ||D x*||``, where x* is the exact solution for A and b as stored and D
        holds the column norms of A; the worst right-hand side counts.
    digits : float
        Guaranteed correct decimal digits of x: ``-log10(forward_error)``, at most as many as the dtype of x
        holds. Noise in A and b, which are taken as stored, is not counted.
    history : tuple of float
        Backward errors during refinement, first to last.
    accepted : array of bool, shape (*batch,)
        Whether each problem is solved to the requested accuracy.
    backward_errors, conditions : array of float64, shape (*batch,)
    forward_errors : array of float64, shape (*batch,) or (*batch, k)
        Of each right-hand side.
    """

    x: ArrayT
    converged: bool
    iterations: int = 0
    backward_error: float
    tolerance: float = math.nan
    condition: float = math.nan
    forward_error: float = math.nan
    digits: float = 0.0
    history: tuple[float, ...] = ()
    accepted: Any = Deferrable(None)  # noqa: RUF009
    backward_errors: Any = Deferrable(None)  # noqa: RUF009
    conditions: Any = Deferrable(None)  # noqa: RUF009
    forward_errors: Any = Deferrable(None)  # noqa: RUF009

    def _headline(self) -> str:
        return super()._headline() + self._remark()

    def _remark(self) -> str:
        """End of the first line, after the verdict."""
        return f", {shown.correct(self.digits)}"

    def _rows_with(self, method: str, more: dict[str, str]) -> shown.Rows:
        after = {
            "iterations": f"{self.iterations}",
            "backward error": f"{self.backward_error:.1e} (tolerance {self.tolerance:.1e})",
            "forward error": f"{self.forward_error:.1e}, condition number {self.condition:.1e}",
        }
        return self._lines({}, after | more, method)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SolveResult(SolutionResult[ArrayT], Generic[ArrayT]):
    """Solution of a linear system, or of a batch: a :class:`SolutionResult`.

    The backward error is ``||b - A x|| / (||A|| ||x|| + ||b||)`` in the infinity norm, for A as given and, if
    it is badly scaled, with scaled rows and columns; the larger one counts. ``history`` has it after every
    step of refinement, the first of which is a solve with the factors; for a batch solved together the
    largest of all systems, else that of the worst.

    Attributes
    ----------
    growth : float
        Largest element of U, relative to that of the scaled A: by how much elimination magnified errors.
    method : str
        Method of the accepted attempt, e.g. ``"rbt + lu fp32 + gmres"``.
    """

    growth: float = math.nan
    method: str = ""

    def _rows(self) -> shown.Rows:
        return self._rows_with(self.method, {"growth": f"{self.growth:.2g}"})


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LstsqResult(SolutionResult[ArrayT], Regression, Generic[ArrayT]):
    """Solution of a least-squares problem, or of a batch: a :class:`SolutionResult` with the numerical rank.

    Below full rank, measured errors refer to the problem of the numerical rank. Problems of a batch that hold
    NaN or Inf have a solution of NaN. The backward error is an upper bound (with a low-precision R one of its
    terms is an estimate); ``history`` has it at every restart, and is empty if all problems were solved
    together.

    Attributes
    ----------
    optimality : float
        ``||A^T r|| / (||A|| ||r||)`` in the column-scaled matrix; the worst right-hand side counts.
    residual_norm : float or list of float
        ``||b - A x||`` of each right-hand side, flattened (with damping and weights, of the augmented
        problem).
    rank : int
        Numerical rank of ``A``, with damping of the stacked matrix; where it is below the largest possible
        one, the minimum-norm solution was computed. Of a batch the smallest of those that were solved.
    full_rank : int
        Largest possible rank; 0 if it was not determined.
    factorization : str
        Method of the accepted attempt, e.g. ``"rgsqrf fp16 + cgls"``.
    constraint_error : float
        With constraints the largest ``|C x - d|`` of a row relative to ``|C| |x| + |d|``, with absolute
        values of all elements; of the worst right-hand side.
    constraint_rank : int or None
        With constraints, the numerical rank of C; there is a warning if C as stored has a larger one.
        Otherwise None.
    ranks : array of int64, shape (*batch,)
        0 where a problem holds NaN or Inf.
    passes : int
        How often A was read, if it was read in blocks; 0 if it was in memory.
    """

    optimality: float = math.nan
    residual_norm: Any = Deferrable(math.nan)  # noqa: RUF009
    rank: int
    full_rank: int = 0
    factorization: str = ""
    ranks: Any = Deferrable(None)  # noqa: RUF009
    passes: int = 0
    constraint_error: float = 0.0
    constraint_rank: int | None = None
    _fit: Any = Deferrable(None)  # noqa: RUF009

    def __getstate__(self) -> dict[str, Any]:
        """Pickles have no rows, nor their labels."""
        return {**super().__getstate__(), "_row_labels": None}

    def __copy__(self) -> Self:
        """Copies share the rows, and so have their labels."""
        made = object.__new__(type(self))
        vars(made).update(super().__getstate__())
        return made

    def _remark(self) -> str:
        """Which problem was solved where the rank is not full, else how many digits are correct."""
        return self._deficiency() or super()._remark()

    def _deficiency(self) -> str:
        """Remark that the rank is not full; empty if it is."""
        if not self.rank < self.full_rank:
            return ""
        smallest = "smallest " if shown.members(self.accepted) else ""
        return f", {smallest}rank {self.rank} of {self.full_rank}: minimum-norm solution"

    def _rows(self) -> shown.Rows:
        norms = self.residual_norm if isinstance(self.residual_norm, list) else [self.residual_norm]
        more = {"rank": f"{self.rank}", "residual norm": shown.numbers(norms)}
        if self.constraint_rank is not None:
            more["rank"] += f", rank {self.constraint_rank} of the constraints"
        if self._deficiency():
            more = {"digits": shown.correct(self.digits), **more}
        if self.passes:
            more["passes over A"] = f"{self.passes}"
        return self._rows_with(self.factorization, more)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BoundedResult(SolutionResult[ArrayT], Named, Generic[ArrayT]):
    """Solution of least squares with bounds, or of many: a :class:`SolutionResult`, and where x is at a
    bound.

    The backward error is that of the conditions of Karush, Kuhn and Tucker: x is within its bounds, and exact
    for A and b changed by so much. Scalars describe the worst problem, arrays each right-hand side.

    Attributes
    ----------
    condition : float
        Of those columns of A, normalized, whose variables may be between their bounds.
    accepted, backward_errors, conditions, forward_errors : array, shape (*batch,) or (*batch, k)
    residual_norms : array of float64, shape (*batch,) or (*batch, k)
        ``||b - A x||``.
    active_mask : array of int64, of the shape of x
        -1 at the lower bound, 1 at the upper one, 0 between them.
    is_variable : bool
        Whether derivatives are required: norms and the cost of a single problem are tensors then, too.
    """

    residual_norms: Any = Deferrable(None)  # noqa: RUF009
    active_mask: Any = Deferrable(None)  # noqa: RUF009
    is_variable: bool = False
    _axis: int | None = 0  # after those of the batch

    @property
    def residual_norm(self) -> Any:
        """A number for a single problem, an array otherwise, or if a gradient is required."""
        of_all = self.residual_norms
        return of_all if of_all.ndim or self.is_variable else float(of_all)

    def _rows(self) -> shown.Rows:
        at_bounds = int((self.active_mask != 0).sum())
        return self._rows_with("", {"at bounds": f"{at_bounds} of {shown.count(self.x)} unknowns"})


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class NNLSResult(BoundedResult[ArrayT], Unpacked, Generic[ArrayT]):
    """Nonnegative solution and its errors: ``x, rnorm = result``, as from ``scipy.optimize.nnls``."""

    @property
    def rnorm(self) -> Any:
        """``||b - A x||``, as :attr:`residual_norm`."""
        return self.residual_norm

    def _parts(self) -> tuple[Any, ...]:
        return self.x, self.rnorm


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LsqLinearResult(BoundedResult[ArrayT], Generic[ArrayT]):
    """Solution within bounds: SciPy's fields, as attributes and as ``result["x"]``, with the measured errors.

    Attributes
    ----------
    cost : float or array of float64, shape (*batch,) or (*batch, k)
        ``||A x - b||^2 / 2``.
    fun : array, of the shape of b
        ``A x - b``.
    optimality : float
        The largest component of the gradient that no bound forbids to follow, of the worst problem.
    unbounded_sol : array, of the shape of x
        The solution without bounds; zeros where the columns of A are dependent.
    nit : int
        Exchanges between bounds; of several problems the most that one took. 0 where the solution without
        bounds is within them.
    status : int
        3: the solution without bounds is within them; 1: the conditions hold; 0: they do not.
    message : str
    """

    cost: Any
    fun: ArrayT
    optimality: float = math.nan
    unbounded_sol: ArrayT
    nit: int
    status: int
    message: str

    @property
    def success(self) -> bool:
        """Whether the conditions hold; ``converged`` also requires a guaranteed digit of x."""
        return self.status > 0

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except (AttributeError, TypeError):
            raise KeyError(name) from None


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class RidgePath(CertifiedResult, Named, Generic[ArrayT]):
    """Solutions of ``min ||A x - b||^2 + damp^2 ||x||^2`` for many dampings, and how well each predicts.

    A :class:`CertifiedResult`. With k right-hand sides arrays have one more dimension.

    Attributes
    ----------
    damps : array of float64, shape (p,)
    x : array, shape (p, n) or (p, n, k)
        In the library, on the device and in the dtype of the input.
    residual_norms, solution_norms : array of float64, shape (p,) or (p, k)
        ``||A x - b||`` and ``||x||``: the L-curve.
    effective_degrees_of_freedom : array of float64, shape (p,)
    gcv : array of float64, shape (p,) or (p, k)
        Generalized cross-validation, ``m ||A x - b||^2 / (m - effective degrees of freedom)^2``.
    leave_one_out : array of float64, shape (p,) or (p, k)
        Mean square of the error with which each row of b is predicted by the fit of all others, exactly.
    squared_errors : array of float64, shape (p, m) or (p, m, k)
        Squared errors whose mean is ``leave_one_out``.
    backward_errors : array of float64, shape (p,) or (p, k)
        Relative change of A and b (with the rows of damping below) for which each x is exact.
    forward_errors : array of float64, shape (p,) or (p, k)
        Bounds on ``||D (x - x*)|| / ||D x*||``, D being the norms of the columns of A with the damping below,
        as :func:`neula.lstsq` has them. Above 0.1 no digit is guaranteed.
    residual_norm_errors, gcv_errors, leave_one_out_errors : array of float64, shape (p,) or (p, k)
        Bounds on the relative errors of these numbers, for A, b and damps as they are stored.
    accepted : array of bool, shape (p,) or (p, k)
        Whether the backward error is small enough, and each of these has a guaranteed digit, or is zero to
        within rounding errors of b.
    tolerance : float
        Largest accepted backward error.
    converged : bool
        Whether all solutions are accepted.
    """

    _axis = 1
    _facts = ("converged", "accuracy", "damps", "residual_norms", "gcv", "leave_one_out", "forward_errors")

    damps: Any
    x: ArrayT
    residual_norms: Any
    solution_norms: Any
    effective_degrees_of_freedom: Any
    gcv: Any
    leave_one_out: Any
    squared_errors: Any
    backward_errors: Any
    forward_errors: Any
    residual_norm_errors: Any
    gcv_errors: Any
    leave_one_out_errors: Any
    accepted: Any
    tolerance: float
    converged: bool

    def best(self, by: str = "gcv") -> Any:
        """The index of the damping with the smallest error: a number, or one for each right-hand side.

        Parameters
        ----------
        by : {"gcv", "leave_one_out"}, optional
        """
        if by not in ("gcv", "leave_one_out"):
            raise ValueError(f"unknown error {by!r}: choose 'gcv' or 'leave_one_out'")
        found = np.nan_to_num(np.array(getattr(self, by).tolist()), nan=math.inf).argmin(0)
        return found if found.ndim else int(found)

    def _columns(self) -> dict[str, np.ndarray]:
        found = self._coefficients()
        if found.ndim > 2:
            raise ValueError(f"a table is for one right-hand side, and there are {found.shape[2]}")
        return dict(zip((f"{damp:.6g}" for damp in as_numpy(self.damps)), found.T, strict=True))

    def _rows(self) -> shown.Rows:
        def largest(x: Any) -> float:
            return float(x.max()) if shown.count(x) else 0.0

        before = {"damps": shown.numbers(self.damps)}
        before["effective dof"] = shown.numbers(self.effective_degrees_of_freedom)
        after = {
            "backward error": f"{largest(self.backward_errors):.1e} (tolerance {self.tolerance:.1e})",
            "forward error": f"{largest(self.forward_errors):.1e}",
            "error of gcv": f"{largest(self.gcv_errors):.1e}",
            "error of leave_one_out": f"{largest(self.leave_one_out_errors):.1e}",
        }
        return self._lines(before, after)
