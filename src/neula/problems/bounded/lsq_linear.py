"""Least squares with bounds."""

from __future__ import annotations

import math
from typing import Any, Unpack, overload

import numpy as np

from neula.certificates.bounds import Accuracy
from neula.engines import Engine
from neula.errors import check_name, number, whole_number
from neula.pipeline.names import column_names, ends_by_name, keeps_names
from neula.pipeline.operators import with_operator
from neula.pipeline.progress import Progress, stage
from neula.pipeline.result import LsqLinearResult, NNLSResult
from neula.problems.bounded.run import solve_bounded
from neula.problems.operators.bounded import traced_lsq_linear, traced_nnls
from neula.problems.signatures import ArrayLike, BoundsLike, Kind, LsqLinearKeywords, NNLSKeywords

METHODS, SOLVERS = ("trf", "bvls"), ("exact", "lsmr")

MESSAGES = {
    3: "The unconstrained solution is optimal.",
    1: "The conditions of Karush, Kuhn and Tucker hold to the accuracy asked for.",
    0: "The conditions of Karush, Kuhn and Tucker do not hold to the accuracy asked for.",
}


@overload
def lsq_linear(
    A: Kind,
    b: Any,
    bounds: Any = ...,
    method: str = ...,
    tol: float = ...,
    lsq_solver: str | None = ...,
    lsmr_tol: float | str | None = ...,
    max_iter: int | None = ...,
    verbose: int = ...,
    **keywords: Unpack[LsqLinearKeywords],
) -> LsqLinearResult[Kind]: ...
@overload
def lsq_linear(
    A: Any,
    b: Any,
    bounds: Any = ...,
    method: str = ...,
    tol: float = ...,
    lsq_solver: str | None = ...,
    lsmr_tol: float | str | None = ...,
    max_iter: int | None = ...,
    verbose: int = ...,
    **keywords: Unpack[LsqLinearKeywords],
) -> LsqLinearResult[Any]: ...
@with_operator(traced_lsq_linear)
@keeps_names
def lsq_linear(
    A: ArrayLike,
    b: ArrayLike,
    bounds: BoundsLike = (-math.inf, math.inf),
    method: str = "trf",
    tol: float = 1e-10,
    lsq_solver: str | None = None,
    lsmr_tol: float | str | None = None,
    max_iter: int | None = None,
    verbose: int = 0,
    *,
    lsmr_maxiter: int | None = None,
    constraints: tuple[ArrayLike, ArrayLike] | None = None,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    progress: Progress | None = None,
) -> LsqLinearResult:
    """Solve ``min ||A x - b||^2 / 2`` for ``lb <= x <= ub``, for one right-hand side or many.

    Returns SciPy's fields, with a bound on the error of every solution. A is factorized once for all
    right-hand sides.

    Parameters
    ----------
    A : array_like, shape (..., m, n)
        NumPy array, torch tensor or DLPack object, float16 to float64; integers are taken as float64. Not
        modified. Leading dimensions are a batch. Every dimension may be zero; m < n is no error.
    b : array_like, shape (m,) or (..., m, k)
        One vector, the same for every matrix of A, or a matrix of right-hand sides; leading dimensions of A
        and b are broadcast as in NumPy.
    bounds : pair of array_like, or scipy.optimize.Bounds, optional
        Lower and upper bounds, each one number or of shape (n,); perhaps infinite. The same for all
        right-hand sides and matrices. If A is a table, series and dictionaries go by its column names.
    method : {"trf", "bvls"}, optional
    lsq_solver : {None, "exact", "lsmr"}, optional
    lsmr_tol, lsmr_maxiter : optional
    tol : float, optional
        Accepted for compatibility with SciPy, without effect: there is one algorithm, which factorizes A and
        ends with the set of active bounds, not with a tolerance.
    max_iter : int, optional
        Largest number of active sets for each right-hand side and attempt; by default 100 if many unknowns
        change at once, and ``3 n`` if one changes.
    verbose : {0, 1, 2}, optional
        Above 0 the message is printed.
    constraints : pair of array_like, optional
        (C, d) for equality constraints ``C x = d``, of shape (p, n) and (p,) or (p, k), as for :func:`lstsq`;
        the same for all matrices. Rows of C have to be independent on the unknowns between their bounds.
        There are no gradients.
    accuracy : {"fp16", "bf16", "tf32", "fp32", "fp64"}, dtype or float, optional
        Accuracy of the result; by default that of the dtype. A number is the largest acceptable backward
        error. It does not change the arithmetic, which is double precision.
    engine : {"auto", "cpu", "cuda", "emulated"} or Engine, optional
        The engine that multiplies matrices. ``"auto"`` chooses it by the device of A.
    strict : bool, optional
        Raise an :class:`~neula.pipeline.result.AccuracyError` instead of a warning, and reject NaN and Inf in
        batches.
    progress : callable or bool, optional
        Called with the name of the stage and the completed fraction; True shows a progress bar.

    Returns
    -------
    LsqLinearResult
        SciPy's fields (``x``, ``cost``, ``fun``, ``optimality``, ``active_mask``, ``nit``, ``status``,
        ``message``, ``success``), and the evidence: ``converged``, ``backward_error``, ``condition``,
        ``forward_error`` and ``digits``, of each right-hand side ``accepted``, ``backward_errors`` and so on.

    Raises
    ------
    ValueError
        For shapes that do not match, a lower bound above its upper bound, NaN or Inf, and unknown names; for
        bounds that require a gradient, and in the backward pass if columns of free unknowns are dependent.
        Problems of a batch with NaN or Inf are an error only if ``strict``: otherwise their solutions are NaN
        and not accepted.
    TypeError
        For complex or sparse input.
    AccuracyError
        If the accuracy was not reached and ``strict`` is set.

    Warns
    -----
    AccuracyWarning
        If the accuracy was not reached; the result has the error that was reached.
    IllConditionedWarning
        If no digit of a solution is guaranteed. A subclass of AccuracyWarning.

    See Also
    --------
    nnls : for ``x >= 0``.
    lstsq : without bounds, or with equality constraints.
    scipy.optimize.lsq_linear : for sparse A.

    Notes
    -----
    Block principal pivoting with two bounds [1]_, [2]_ on the R of :func:`neula.qr` in double precision,
    beginning with the solution without bounds, followed by the active-set method of Stark and Parker [3]_ if
    it does not terminate or columns are dependent. For one right-hand side on a CPU, the compiled core first
    uses parts of ``A^T A`` instead of R, and refines with A.

    If A or b are torch tensors that require gradients, ``x``, ``fun``, ``residual_norms``, ``cost`` and
    ``unbounded_sol`` are differentiable, to any order, as least squares on the unknowns between their bounds.

    References
    ----------
    .. [1] J. J. Júdice, F. M. Pires, "Basic-set algorithm for a generalized linear complementarity problem",
       J. Optim. Theory Appl. 74, 1992.
    .. [2] J. Kim, H. Park, "Fast nonnegative matrix factorization: an active-set-like method and
       comparisons", SIAM J. Sci. Comput. 33, 2011.
    .. [3] P. B. Stark, R. L. Parker, "Bounded-variable least-squares: an algorithm and applications",
       Computational Statistics 10, 1995.

    Examples
    --------
    >>> import numpy as np, neula
    >>> A = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    >>> result = neula.lsq_linear(A, np.array([1.0, 3.0, 5.0]), bounds=([0.0, 0.0], [np.inf, 1.5]))
    >>> result.x.round(12), result.active_mask, result.converged
    (array([1.5, 1.5]), array([0, 1]), True)
    """
    both, most = checked(ends_by_name(bounds, column_names(A)), method, lsq_solver, max_iter, verbose)
    report = stage(progress, "solving with bounds")
    solved = solve_bounded(
        A,
        b,
        both,
        max_iterations=most,
        accuracy=accuracy,
        engine=engine,
        strict=strict,
        unbounded=True,
        constraints=constraints,
    )
    known = solved.linear()
    result = solved.result(LsqLinearResult, known | {"message": MESSAGES[known["status"]]})
    report(1.0)
    if verbose > 0:
        print(result.message)
    solved.report(result)
    return result


def checked(
    bounds: Any, method: str, lsq_solver: str | None, max_iter: int | None, verbose: int
) -> tuple[tuple[Any, Any], int | None]:
    """Lower and upper bounds, and how many sets may be tried, where names and numbers are those of SciPy."""
    check_name("method", method, METHODS)
    check_name("lsq_solver", lsq_solver, SOLVERS, optional=True)
    if not isinstance(verbose, int) or verbose not in (0, 1, 2):
        raise ValueError(f"verbose must be 0, 1 or 2, got {verbose!r}")
    if method == "bvls" and lsq_solver == "lsmr":
        raise ValueError("method='bvls' can't be used with lsq_solver='lsmr'")
    if hasattr(bounds, "lb") and hasattr(bounds, "ub"):
        bounds = np.array(bounds.lb), np.array(bounds.ub)  # SciPy's share memory
    elif not hasattr(bounds, "__len__") or len(bounds) != 2:
        raise ValueError(f"bounds must be a pair, the lower and the upper ones, got {bounds!r}")
    return (bounds[0], bounds[1]), None if max_iter is None else whole_number("max_iter", max_iter)


@overload
def nnls(A: Kind, b: Any, **keywords: Unpack[NNLSKeywords]) -> NNLSResult[Kind]: ...
@overload
def nnls(A: Any, b: Any, **keywords: Unpack[NNLSKeywords]) -> NNLSResult[Any]: ...
@with_operator(traced_nnls)
@keeps_names
def nnls(
    A: ArrayLike,
    b: ArrayLike,
    *,
    maxiter: int | None = None,
    sum_to: float | None = None,
    accuracy: Accuracy | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    progress: Progress | None = None,
) -> NNLSResult:
    """Solve ``min ||A x - b||`` for ``x >= 0``, for one right-hand side or hundreds of thousands.

    Returns ``x, rnorm`` as SciPy does, with a bound on the error of every solution. A is factorized once for
    all right-hand sides.

    Parameters
    ----------
    A : array_like, shape (..., m, n)
        NumPy array, torch tensor or DLPack object, float16 to float64; integers are taken as float64. Not
        modified. Leading dimensions are a batch. Every dimension may be zero; m < n is no error.
    b : array_like, shape (m,) or (..., m, k)
        One vector, the same for every matrix of A, or a matrix of right-hand sides; leading dimensions of A
        and b are broadcast as in NumPy.
    maxiter : int, optional
        Largest number of active sets for each right-hand side and attempt; by default 100 if many unknowns
        change at once, and ``3 n`` if one changes.
    sum_to : float, optional
        Sum of the unknowns of each right-hand side, above 0: 1 for parts of a mixture. It is the constraint
        ``(np.ones((1, n)), [sum_to])`` of :func:`lsq_linear`. There are no gradients.
    accuracy : {"fp16", "bf16", "tf32", "fp32", "fp64"}, dtype or float, optional
        Accuracy of the result; by default that of the dtype. A number is the largest acceptable backward
        error. It does not change the arithmetic, which is double precision.
    engine : {"auto", "cpu", "cuda", "emulated"} or Engine, optional
        The engine that multiplies matrices. ``"auto"`` chooses it by the device of A.
    strict : bool, optional
        Raise an :class:`~neula.pipeline.result.AccuracyError` instead of a warning, and reject NaN and Inf in
        batches.
    progress : callable or bool, optional
        Called with the name of the stage and the completed fraction; True shows a progress bar.

    Returns
    -------
    NNLSResult
        ``x, rnorm = result``, as from SciPy, and the evidence: ``converged``, ``backward_error``,
        ``condition``, ``forward_error`` and ``digits``; for each right-hand side ``accepted``,
        ``backward_errors``, ``conditions``, ``forward_errors`` and ``residual_norms``.

    Raises
    ------
    ValueError
        For shapes that do not fit, NaN or Inf, and unknown names; in the backward pass where
        columns of positive unknowns are dependent. Problems of a batch with NaN or Inf are no error unless
        ``strict``: their solutions are NaN, and are not accepted.
    TypeError
        For complex or sparse input.
    AccuracyError
        If the accuracy was not reached and ``strict`` is set.

    Warns
    -----
    AccuracyWarning
        If the accuracy was not reached; the result has the error that was reached.
    IllConditionedWarning
        If no digit of a solution is guaranteed because columns of positive unknowns are dependent: other
        solutions have the same residual. A subclass of AccuracyWarning.

    See Also
    --------
    lsq_linear : with any bounds.
    scipy.optimize.nnls : for one right-hand side.

    Notes
    -----
    Block principal pivoting [1]_ on the R of :func:`neula.qr` in double precision, followed by the active-set
    method of Lawson and Hanson [2]_ if it does not terminate or columns are dependent. Right-hand sides with
    the same positive unknowns share a factorization; the others are solved in batches. For one right-hand
    side on a CPU, the compiled core first uses parts of ``A^T A`` instead of R, and refines with A.

    If A or b are torch tensors that require gradients, ``x`` and ``residual_norms`` are differentiable, to
    any order, as least squares on the positive unknowns, with a matrix of order n for each right-hand side.
    ``rnorm`` is then a tensor.

    References
    ----------
    .. [1] J. Kim, H. Park, "Fast nonnegative matrix factorization: an active-set-like method and
       comparisons", SIAM J. Sci. Comput. 33, 2011.
    .. [2] C. L. Lawson, R. J. Hanson, "Solving Least Squares Problems", 1974, chapter 23.

    Examples
    --------
    >>> import numpy as np, neula
    >>> A = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> x, rnorm = neula.nnls(A, np.array([2.0, 1.0, -1.0]))
    >>> x.round(12), round(rnorm, 12)
    (array([1.5, 0. ]), 1.224744871392)
    """
    report = stage(progress, "solving with bounds")
    most = None if maxiter is None else whole_number("maxiter", maxiter)
    asked: dict[str, Any] = {"accuracy": accuracy, "engine": engine, "strict": strict}
    if sum_to is not None:
        total = number("sum_to", sum_to, "above 0", lambda x: 0 < x < math.inf)
        asked["constraints"] = lambda n: (np.ones((1, n)), np.array([total]))
    solved = solve_bounded(A, b, (0.0, math.inf), max_iterations=most, **asked)
    result = solved.result(NNLSResult, {})
    report(1.0)
    solved.report(result)
    return result
