"""Least squares: check the input, choose, solve, refine, certify."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack, overload

import numpy as np
import torch

from neula.certificates.bounds import Accuracy, lstsq_bound
from neula.engines import Arithmetic, Engine
from neula.errors import check_name, needs_extra, number, part_of_one, whole_number
from neula.io.sources import is_source
from neula.pipeline.call import Call, HostTuning
from neula.pipeline.distributed import OverProcesses
from neula.pipeline.inputs import check_finite, refuse_gradient
from neula.pipeline.names import INTERCEPT, check_aligned, column_names, keeps_names, row_labels
from neula.pipeline.operators import with_operator
from neula.pipeline.plans import Plan, Plans, tensors_of
from neula.pipeline.progress import Progress
from neula.pipeline.result import LstsqResult
from neula.pipeline.shapes import BatchedProblem, broadcast_system
from neula.pipeline.solutions import by_parts, complex_columns, has_parts
from neula.problems.least_squares import by_core
from neula.problems.least_squares.general import (
    General,
    checked_general,
    row_factors,
    solve_general,
    with_intercept,
)
from neula.problems.least_squares.problem import LeastSquaresAnswer, LeastSquaresOptions
from neula.problems.least_squares.regression import LinearFit, RegressionFit, fit_spread
from neula.problems.least_squares.run import LeastSquaresPlan, begin_system, plan_for, solve_system
from neula.problems.least_squares.streamed import lstsq_streamed
from neula.problems.operators.solutions import traced_lstsq
from neula.problems.signatures import Array, ArrayLike, Kind, LstsqKeywords, TableLike

ALGORITHMS = ("cgls", "lsqr", "direct", "normal", "householder", "svd")
CERTIFIED = ("backward", "forward")


@overload
def lstsq(A: Kind, b: Any, **keywords: Unpack[LstsqKeywords]) -> LstsqResult[Kind]: ...
@overload
def lstsq(A: Any, b: Any, **keywords: Unpack[LstsqKeywords]) -> LstsqResult[Any]: ...
@with_operator(
    traced_lstsq,
    Plans(
        lambda A, b, **keywords: _plan(A, b, **keywords),
        go_on=lambda begun, *args, **keywords: _gone_on(*_asked(*args, **keywords), begun),
        also="weights",
    ),
)
@keeps_names
@OverProcesses(
    lambda result, tall, replicated: replace(result, x=replicated(result.x)),
    operands=("A", "b", "weights"),
    refused={"wait": (False,)},
    wide=lambda asked: bool(asked.get("damp", 0.0)),
    instead="solutions of minimum norm are for whole matrices: pass A.full() and b.full(), or damp=",
)
# item: Q (1); V future work
def lstsq(
    A: ArrayLike,
    b: ArrayLike,
    *,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    algorithm: str | None = None,
    compute: str | None = None,
    damp: float = 0.0,
    intercept: bool = False,
    weights: ArrayLike | None = None,
    sigma: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
    constraints: tuple[ArrayLike, ArrayLike] | None = None,
    covariance: ArrayLike | None = None,
    covariance_factor: ArrayLike | None = None,
    rcond: float | None = None,
    max_iterations: int = 60,
    certify: str = "backward",
    strict: bool = False,
    progress: Progress | None = None,
    wait: bool = True,
) -> LstsqResult:
    """Solve ``min ||A x - b||`` in the 2-norm to the requested accuracy.

    Returns x with a bound on its error, which guarantees its number of correct digits. Wide and
    rank-deficient problems have the minimum-norm solution. Damping, weights, equality constraints and
    correlated errors are options.

    Parameters
    ----------
    A : array_like, shape (..., m, n)
        NumPy array, torch tensor or DLPack object, float16 to float64, complex64, complex128; integers are
        taken as float64. Not modified. Leading dimensions are a batch. Every dimension may be zero. With
        m < n the minimum-norm solution is computed. Or a matrix whose rows are distributed over processes
        (:func:`neula.distributed.rows`), or one that is larger than memory: a source of row blocks
        (:func:`neula.io.sources.row_blocks`), an array of Dask, or a memory map, h5py dataset or array of
        Zarr of more than 256 MB. If A is a table (pandas, Polars, Arrow, xarray), the result keeps
        its column names, and b and weights must have the same row labels.
    b : array_like, shape (m,) or (..., m, k)
        One vector, the same for every matrix of A, or a matrix of right-hand sides; leading dimensions of A
        and b are broadcast as in NumPy. A source of rows if A is one. With a real A, the parts of a complex b
        are right-hand sides.
    accuracy : {"fp16", "bf16", "tf32", "fp32", "fp64"}, dtype or float, optional
        Accuracy of the result; by default that of the dtype. A number is the largest acceptable backward
        error; the cheapest sufficient format is used.
    engine : {"auto", "cpu", "cuda", "emulated"} or Engine, optional
        The engine that multiplies matrices. ``"auto"`` chooses it by the device of A; one small matrix of a
        GPU goes to the CPU.
    algorithm : {"cgls", "lsqr", "direct", "normal", "householder", "svd"}, optional
        Force this algorithm, without a fallback: QR with CGLS or LSQR, ``R^-1 Q^H b`` without refinement, the
        normal equations, Householder QR in double precision with refinement, the SVD. By default the chain in
        the Notes.
    compute : str, optional
        Format in which R (or the Gram matrix) is computed, or ``"fp16_cor"``, half precision with error
        correction on a GPU; the engine's preference by default.
    damp : float, optional
        Solve ``min ||A x - b||^2 + damp^2 ||x||^2`` (ridge regression, Tikhonov).
    intercept : bool, optional
        Add a column of ones before those of A: ``x[0]`` is the intercept, which ``damp`` does not damp.
    weights : array_like, shape (m,), optional
        Factors of the rows, square roots of statistical weights: ``min ||diag(weights) (A x - b)||``, as in
        :func:`numpy.polyfit`. Signs do not matter.
    sigma : array_like, shape (m,), optional
        Standard deviations of b, the reciprocals of ``weights``, as in :func:`scipy.optimize.curve_fit`. Must
        be positive.
    sample_weight : array_like, shape (m,), optional
        Statistical weights, the squares of ``weights``, as in scikit-learn and statsmodels: a row of weight 2
        counts twice. Must not be negative.
    constraints : pair of array_like, optional
        C of shape (p, n) and d of shape (p,), or (p, k) for each right-hand side: x satisfies ``C x = d``,
        for every matrix of a batch. Rows of C may be dependent if d is consistent with them;
        ``constraint_rank`` of the result is the numerical rank used. With ``intercept=True`` C may have a
        first column for it.
    covariance : array_like, shape (m, m) or (m,), optional
        Covariance V of b, or a vector of variances: ``min (A x - b)^T V^-1 (A x - b)`` (generalized least
        squares).
    covariance_factor : array_like, shape (m, m), optional
        Its Cholesky factor, lower triangular, in place of V.
    rcond : float, optional
        Singular values of A with normalized columns below ``rcond`` times the largest count as zero. By
        default ``max(m, n)`` times the precision of float64, or the precision of A's dtype if that is larger.
    max_iterations : int, optional
        Refinement iterations of each attempt.
    certify : {"backward", "forward"}, optional
        The error that refinement reduces to the level of the accuracy: the backward error, or the forward
        error of x. The latter takes residuals in twice the working precision, and a condition number well
        below the reciprocal of the unit roundoff; otherwise the solution is not accepted. Small problems (on
        a CPU up to 4096 elements) are refined that far in any case; with weights on a CPU the forward error
        includes the rounding of weighted rows.
    strict : bool, optional
        Raise an :class:`~neula.pipeline.result.AccuracyError` instead of a warning, and reject NaN and Inf in
        batches.
    progress : callable or bool, optional
        Called with the name of the stage and the completed fraction; True shows a progress bar.
    wait : bool, optional
        False returns once the first link of the chain is launched, without waiting for the device.
        ``accepted`` is then an array on the device, and :func:`neula.finish` runs the rest of the chain. If
        the first link waits for the device (on a CPU, for large problems, and with weights), the answer is
        complete.

    Returns
    -------
    LstsqResult
        The solution ``x`` with its evidence: ``converged``, ``backward_error``, ``condition``,
        ``forward_error`` and ``digits``, ``iterations``, ``rank``; for a batch also ``accepted``,
        ``backward_errors``, ``conditions``, ``forward_errors`` and ``ranks``.

    Raises
    ------
    ValueError
        For shapes that do not fit, NaN or Inf, and unknown names; for constraints that contradict one
        another, and a covariance that is not positive definite; if b or the weights require a gradient and A
        is no torch tensor. Problems of a batch with NaN or Inf are no error unless ``strict``: their
        solutions are NaN, and are not accepted; others are solved, those with the same matrix as well.
    TypeError
        For sparse input, and for complex weights.
    ArithmeticError
        If a named algorithm breaks down without an answer, or the answer overflows the dtype.
    AccuracyError
        If the accuracy was not reached and ``strict`` is set.

    Warns
    -----
    AccuracyWarning
        If the accuracy was not reached; the result has the error that was reached.
    IllConditionedWarning
        If A is so ill-conditioned that no digit of x is guaranteed, or if its rank is ambiguous: the singular
        values next to the threshold are less than a factor of ten apart, or a direction counted as zero is
        real and carries part of b (:mod:`neula.certificates.rank`); or if C as stored has a larger rank than
        its numerical rank. A subclass of AccuracyWarning.

    See Also
    --------
    scipy.linalg.lstsq, torch.linalg.lstsq : direct solvers, for small problems just as good.

    Notes
    -----
    A factor R of A, cheap to compute, preconditions a refinement in double precision. R comes from a QR
    factorization in low precision if A is large, otherwise from a Gram matrix or LAPACK. A solution is
    accepted if its backward error, computed from the true residual, is small enough and A certainly has full
    rank. If not, a more accurate R follows, finally by Householder reflections in double precision. Below
    full rank a complete orthogonal decomposition or the SVD computes the minimum-norm solution.

    With constraints, C is scaled and its transpose factorized with column pivoting, which reveals its rank. x
    is the minimum-norm solution of the constraints plus a vector of the null space of C, which solves an
    unconstrained problem (as LAPACK's ``gglse``). ``constraint_error`` measures the residual of the
    constraints; backward and forward error include it. With a covariance, A and b are multiplied by the
    inverse of its Cholesky factor, whose condition number enters the forward error.

    If A, b or the weights are torch tensors that require gradients, x is differentiable, to any order. The
    backward pass factorizes A in double precision, and raises a ValueError where A lacks full rank
    (:class:`neula.pipeline.derivatives.Solution`).

    Large problems run Algorithm 3 of [1]_ with a stopping rule, restarts on the true residual, several
    right-hand sides and column scaling; small ones, and on a CPU all that are not wide, the corrected
    seminormal equations [2]_ with residuals in twice the working precision; on a CPU square ones of some
    hundred unknowns LU, as :func:`neula.solve`. Solutions by LU in double precision are not refined: one or
    two digits fewer are guaranteed than by the seminormal equations, which ``certify="forward"`` takes. Each
    problem of a batch is measured by itself. The attempts are those of the batch, then those of the worst
    problem that was solved alone; the page *Links* of the documentation has the table of all of them.

    The forward error bounds ``||D (x - x*)|| / ||D x*||``. D holds the column norms of A, and x* is the exact
    solution for A and b as stored, below full rank of the problem of the numerical rank. If residuals are in
    twice the working precision, the last update measures it; otherwise it follows from the condition number
    and the backward error (:mod:`neula.certificates.forward_error`).

    References
    ----------
    .. [1] S. Zhang, E. Baharlouei, P. Wu, "High Accuracy Matrix Computations on Neural Engines: A Study of QR
       Factorization and its Applications", HPDC 2020.
    .. [2] Å. Björck, "Stability analysis of the method of seminormal equations for linear least squares
       problems", Linear Algebra and its Applications 88/89, 1987.

    Examples
    --------
    >>> import numpy as np, neula
    >>> A = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    >>> result = neula.lstsq(A, np.array([1.0, 3.0, 5.0]))
    >>> result.x.round(12), result.converged, result.rank
    (array([1., 2.]), True, 2)
    """
    check_name("algorithm", algorithm, ALGORITHMS, optional=True)
    check_name("certify", certify, CERTIFIED)
    max_iterations = whole_number("max_iterations", max_iterations)
    rcond, damp = part_of_one("rcond", rcond), check_damp(damp)
    weights = row_factors(weights, sigma, sample_weight)
    keywords: Any = {
        "accuracy": accuracy,
        "engine": engine,
        "algorithm": algorithm,
        "compute": compute,
        "damp": damp,
        "intercept": intercept,
        "weights": weights,
        "rcond": rcond,
        "max_iterations": max_iterations,
        "certify": certify,
        "strict": strict,
        "progress": progress,
    }
    if is_source(A):
        if intercept or any(x is not None for x in (constraints, covariance, covariance_factor)):
            raise ValueError(
                "intercept, constraints and covariances need A in memory: leave them out, or load A first"
            )
        return lstsq_streamed(A, b, **keywords)
    more = {"constraints": constraints, "covariance": covariance, "covariance_factor": covariance_factor}
    general_asked = any(x is not None for x in more.values())
    call, shapes, options = _asked(A, b, wait=wait, general=general_asked, **keywords)
    if has_parts(shapes.a, options.dtype) and not general_asked:
        whole = partial(_asked, A, b, general=True, **keywords)
        joined = _by_parts(call, shapes, partial(lstsq, **keywords), whole)
        vars(joined)["intercept"] = intercept
        return joined
    general = checked_general(
        call, constraints, covariance, covariance_factor, options.observations, intercept=intercept
    )
    if general is not None:
        solved = solve_general(call, shapes, options, general)
    elif not wait and call.weights is None and (pending := begin_system(call, shapes, options)) is not None:
        return pending
    else:
        solved = solve_system(call, shapes, options)
        if options.damp and not solved.result.converged and not call.engine.over_rows.spread:
            limited = solve_general(call, shapes, options, General(None, None, computed=False))
            solved = limited if limited.result.converged else solved
    vars(solved.result)["intercept"] = intercept
    return solved.reported(call)


def _asked(
    A: Any,
    b: Any,
    *,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    algorithm: str | None = None,
    compute: str | None = None,
    damp: float = 0.0,
    intercept: bool = False,
    weights: Any = None,
    rcond: float | None = None,
    max_iterations: int = 60,
    certify: str = "backward",
    strict: bool = False,
    progress: Progress | None = None,
    wait: bool = True,
    general: bool = False,
) -> tuple[Call, BatchedProblem, LeastSquaresOptions]:
    """Check the arguments of :func:`lstsq`; ``general`` with constraints or covariances."""
    call = Call.begin(
        {"A": A, "b": b},
        engine=engine,
        accuracy=accuracy,
        bound=lambda target, shape: lstsq_bound(target, min((1, *shape)[-1 if damp else -2 :]) or 1),
        strict=strict,
        gradients=True,
        weights=weights,
    )
    given, observations = call.first.tensor, None
    if given.is_complex() and not call.operands["b"].tensor.is_complex():
        call = replace(call, operands={**call.operands, "b": call.operands["b"].to(call.dtype)})
    if call.weights is not None and given.ndim > 1:
        factors, over_rows, m = call.weights.tensor, call.engine.over_rows, given.shape[-2]
        if factors.shape != (m,):
            shape = tuple(factors.shape)
            raise ValueError(f"weights must have shape ({m},), one for each row of A, got {shape}")
        if m > 0:
            check_finite(factors, over_rows.largest(factors.abs().max().reshape(1)), "weights", over_rows)
    if intercept and (general or not has_parts(given, call.dtype)):
        observations = given.shape[-2] if damp and given.ndim > 1 else None
        call, damp = with_intercept(call, damp), 0.0
    if wait and algorithm is None and compute is None:
        plain = not (damp or general) and weights is None
        dtype, most = call.dtype, call.engine.tuning[HostTuning].by_host_kernel
        call = call.by_host(engine, has_kernel=lambda m, n: plain and by_core.suits(m, n, dtype), most=most)
    a, w = call.first.tensor, call.weights
    shapes = broadcast_system(*call.tensors)
    options = LeastSquaresOptions.of_call(
        call,
        given.dtype,
        (call.engine.over_rows.count(a.shape[-2]), a.shape[-1]),
        rcond,
        algorithm=algorithm,
        compute=None if compute is None else Arithmetic.named(compute).name,
        damp=damp,
        weights=None if w is None else w.tensor.to(call.engine.device).double(),
        max_iterations=max_iterations,
        forward=certify == "forward",
        progress=progress,
        by_host=engine == "auto",
        observations=observations,
    )
    return call, shapes, options


def _by_parts(
    call: Call,
    shapes: BatchedProblem,
    solve: Callable[..., LstsqResult[Any]],
    whole: Callable[[], tuple[Call, BatchedProblem, LeastSquaresOptions]],
) -> LstsqResult[Any]:
    """Solutions for complex right-hand sides of real matrices, with the norms of their residuals."""
    found, k = by_parts(call, shapes, solve), shapes.b.shape[-1]
    pairs = np.reshape(found.residual_norm, (-1 if k else len(shapes.matrices), 2, k))
    norms = np.hypot(pairs[:, 0], pairs[:, 1]).flatten().tolist()
    fit: Any = found._fit
    if isinstance(fit, LinearFit) and k:
        x, sizes = (y.unflatten(-1, (y.shape[-1] // (2 * k), 2 * k)) for y in (fit.x, fit.norms))
        make = fit_spread if call.engine.over_rows.spread else RegressionFit
        fit = make(*whole(), complex_columns(x).flatten(-2), torch.hypot(*sizes.split(k, -1)).flatten(-2))
    return replace(found, residual_norm=norms[0] if len(norms) == 1 else norms, _fit=fit)


PLANNED = ("accuracy", "engine", "damp", "weights", "rcond", "max_iterations", "certify", "strict")


def _plan(A: Any, b: Any, *, wait: bool = True, **keywords: Any) -> Plan | None:
    """Plan for a problem of the core, or for a plain one whose first link launches its work."""
    if not keywords.keys() <= set(PLANNED):
        return None
    check_name("certify", keywords.get("certify", "backward"), CERTIFIED)
    for name, checked in (("rcond", part_of_one), ("max_iterations", whole_number)):
        if name in keywords:
            keywords[name] = checked(name, keywords[name])
    keywords["damp"] = check_damp(keywords.get("damp", 0.0))
    if len({x.dtype.is_complex for x in tensors_of((A, b))}) > 1:
        return None
    _, shapes, options = _asked(A, b, wait=wait, **keywords)

    keywords.pop("weights", None)  # those of a call are its third operand

    def fit_of(operands: Sequence[Any], x: torch.Tensor, norms: torch.Tensor) -> RegressionFit:
        weights = operands[2] if len(operands) > 2 else None
        return RegressionFit(*_asked(*operands[:2], weights=weights, **keywords), x, norms)

    plan = plan_for(shapes, options, fit_of)
    plain = not options.damp and options.weights is None
    return plan if (wait and plain) or isinstance(plan, LeastSquaresPlan) else None


def _gone_on(
    call: Call, shapes: BatchedProblem, options: LeastSquaresOptions, begun: LeastSquaresAnswer
) -> LstsqResult[Any]:
    """The result where the first link has not solved all."""
    return solve_system(call, shapes, options, begun).reported(call)


def check_damp(damp: Any) -> float:
    """A number that is finite and not negative, without a gradient."""
    refuse_gradient(damp, "damp")
    return number("damp", damp, "finite and not negative", lambda x: 0 <= x < math.inf)


OF_ROWS = ("weights", "sigma", "sample_weight")
"""Keywords that may name a column of the table."""


def fit_formula(formula: str, data: TableLike, **keywords: Unpack[LstsqKeywords]) -> LstsqResult[Array]:
    """Solve the least-squares problem of a formula, such as ``"y ~ x1 + C(region)"``, for a table.

    Categories become columns of zeros and ones; one of them, the reference, has none where there is an
    intercept. The intercept is that of ``intercept=True``, and is not damped.

    Parameters
    ----------
    formula : str
        In the notation of patsy and R, read by `formulaic <https://matthewwardrop.github.io/formulaic>`_:
        variables are columns of the table, ``a:b`` and ``a * b`` interactions, ``- 1`` leaves out the
        intercept, ``C(x)`` a category, ``np.log(x)`` a function, ``I(x**2)`` arithmetic, and backticks
        quote names that Python does not allow.
    data : table
        Of pandas, Polars or Arrow, or a dictionary of columns.
    **keywords
        Of :func:`neula.lstsq`. ``weights``, ``sigma`` and ``sample_weight`` may be names of columns.

    Returns
    -------
    LstsqResult
        Whose ``predict`` takes a table with the same variables.

    Raises
    ------
    ImportError
        Without formulaic.
    ValueError
        For a formula without a response, missing values, and as :func:`neula.lstsq`.

    See Also
    --------
    lstsq : the same for matrices.

    Examples
    --------
    >>> import pandas, neula
    >>> table = pandas.DataFrame({"y": [1.0, 3.0, 4.0, 8.0], "x": [0.0, 1.0, 0.0, 2.0], "kind": list("aabb")})
    >>> result = neula.fit_formula("y ~ x + kind", table)
    >>> {name: round(value, 12) for name, value in result.coefficients.items()}
    {'intercept': 1.0, 'x': 2.0, 'kind[T.b]': 3.0}
    >>> result.predict(pandas.DataFrame({"x": [1.0], "kind": ["b"]})).round(12)
    array([6.])
    """
    try:
        import formulaic
    except ImportError:
        raise needs_extra("a formula", "formulaic", "formula") from None
    if isinstance(data, dict):
        import pandas

        data = pandas.DataFrame(data)
    given: dict[str, Any] = dict(keywords)
    for name in OF_ROWS:
        if isinstance(column := given.get(name), str):
            given[name] = data[column]
    check_aligned(row_labels(data), {name: given.get(name) for name in OF_ROWS}, "data")
    matrices = _evaluated(formula, data, partial(formulaic.model_matrix, formula, data, context=None))
    if not hasattr(matrices, "lhs"):
        raise ValueError(f"the formula {formula!r} has no response: write it like 'y ~ {formula}'")
    names, responses = (_names(one) for one in (matrices.rhs, matrices.lhs))
    constant = "Intercept" in names
    a, b = (_numbers(one) for one in (matrices.rhs, matrices.lhs))
    result = lstsq(_without(a, names), b[:, 0] if b.shape[1] == 1 else b, **{**given, "intercept": constant})
    kept = [name for name in names if name != "Intercept"]
    vars(result).update(
        names=(INTERCEPT, *kept) if constant else tuple(kept),
        responses=tuple(responses),
        _library=type(data).__module__.partition(".")[0],
        _row_labels=row_labels(data),
        _design=_Design(matrices.rhs.model_spec),
    )
    return result


def _names(matrix: Any) -> list[str]:
    return [str(name) for name in matrix.model_spec.column_names]


def _numbers(matrix: Any) -> np.ndarray:
    found = np.asarray(matrix)
    return found.astype(np.complex128 if found.dtype.kind == "c" else np.float64, copy=False)


def _without(a: np.ndarray, names: list[str]) -> np.ndarray:
    """Columns other than the intercept."""
    return np.ascontiguousarray(a[:, [name != "Intercept" for name in names]])


@dataclass(frozen=True)
class _Design:
    """From a table to the columns of the fit."""

    spec: Any  # of formulaic

    def __call__(self, table: Any) -> np.ndarray:
        found = _evaluated(self.spec.formula, table, partial(self.spec.get_model_matrix, table))
        return _without(_numbers(found), _names(found))


def _evaluated(formula: Any, table: Any, matrices: Callable[..., Any]) -> Any:
    """Matrices of a formula and a table."""
    from formulaic.errors import DataMismatchWarning, FormulaicError

    try:
        with warnings.catch_warnings():
            # A category that the fit has not seen would be taken for the reference.
            warnings.simplefilter("error", DataMismatchWarning)
            return matrices(output="numpy", na_action="raise")
    except (FormulaicError, DataMismatchWarning, ValueError) as wrong:
        why = str(wrong).partition("\n")[0].partition(". They are being")[0]
        names = column_names(table) or ()
        if twice := [name for name in names if names.count(name) > 1 and f"`{name}`" in why]:
            why = f"two columns are named {twice[0]!r}: rename one"
        if "null values" in why:
            why = why.rstrip(".") + ": drop these rows, or fill the values in"
        raise ValueError(f"the formula {str(formula)!r} does not fit the table: {why}") from wrong
