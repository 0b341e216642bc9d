"""Least squares with solutions that are not negative."""

from __future__ import annotations

import math
from typing import Any, Unpack, overload

import numpy as np

from neula.certificates.bounds import Accuracy
from neula.engines import Engine
from neula.errors import number, whole_number
from neula.pipeline.names import keeps_names
from neula.pipeline.operators import with_operator
from neula.pipeline.progress import Progress, stage
from neula.pipeline.result import NNLSResult
from neula.problems.bounded.run import solve_bounded
from neula.problems.operators.bounded import traced_nnls
from neula.problems.signatures import ArrayLike, Kind, NNLSKeywords


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
