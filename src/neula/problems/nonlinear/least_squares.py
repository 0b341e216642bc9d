"""Non-linear least squares: check the input, minimize, measure, return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack, overload

import numpy as np
import torch

from neula.algorithms.nonlinear.differentiate import Differences
from neula.engines import Engine
from neula.pipeline.call import Call
from neula.pipeline.names import keeps_names_of_start
from neula.pipeline.operators import eager
from neula.pipeline.progress import Progress
from neula.pipeline.result import LeastSquaresResult
from neula.problems.nonlinear.by_minpack import fit_by_minpack, is_plain
from neula.problems.nonlinear.fit import Residuals, Watched, result_of, run_fit
from neula.problems.nonlinear.functions import Jacobian, Points, derivatives, refuse_dependence, residuals
from neula.problems.nonlinear.problem import Start, check_names, loss_of, step_of, tolerances_of
from neula.problems.signatures import ArrayLike, BoundsLike, Kind, LeastSquaresKeywords, NameOrFunction

NOWHERE = (-np.inf, np.inf)


@overload
def least_squares(
    fun: Callable[..., Any],
    x0: Kind,
    jac: Any = ...,
    bounds: Any = ...,
    method: str = ...,
    **keywords: Unpack[LeastSquaresKeywords],
) -> LeastSquaresResult[Kind]: ...
@overload
def least_squares(
    fun: Callable[..., Any],
    x0: Any,
    jac: Any = ...,
    bounds: Any = ...,
    method: str = ...,
    **keywords: Unpack[LeastSquaresKeywords],
) -> LeastSquaresResult[Any]: ...
@eager
@keeps_names_of_start
def least_squares(
    fun: Callable[..., Any],
    x0: ArrayLike,
    jac: NameOrFunction | None = None,
    bounds: BoundsLike = NOWHERE,
    method: str = "trf",
    *,
    ftol: float | None = 1e-8,
    xtol: float | None = 1e-8,
    gtol: float | None = 1e-8,
    x_scale: str | ArrayLike | None = None,
    loss: NameOrFunction = "linear",
    f_scale: float = 1.0,
    diff_step: ArrayLike | None = None,
    max_nfev: int | None = None,
    verbose: int = 0,
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    callback: Callable[..., Any] | None = None,
    blocks: Sequence[Any] | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    progress: Progress | None = None,
) -> LeastSquaresResult:
    """Minimize half the sum of squares of the residuals ``fun(x)``, within bounds, for one problem or a
    batch.

    Returns SciPy's fields, with an estimate of the error of x. Parameters are those of
    :func:`scipy.optimize.least_squares`, unless said otherwise.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args, **kwargs)`` returns the residuals, shape (m,). It is called with an array like ``x0``:
        of NumPy, or a tensor. Of a batch, with x of shape (*batch, n), it returns shape (*batch, m), each row
        from its own row of x alone. Complex residuals count as two real ones, the real and the imaginary
        part, also for losses.
    x0 : array_like, shape (n,) or (*batch, n)
        Starting point, of real numbers. Tensors keep their dtype; all else is taken as float64, as in SciPy.
    jac : {"forward", "reverse", "2-point", "3-point", "cs"} or callable, optional
        ``jac(x, *args, **kwargs)`` of shape (*batch, m, n), complex if the residuals are; or derivatives of
        torch in one mode, or differences. By default torch, in the mode with fewer directions, where ``x0``
        is a tensor; else 2-point differences, and fourth-order ones for the Gauss-Newton steps at the end.
    bounds : pair of array_like, or scipy.optimize.Bounds, optional
        Lower and upper bounds, broadcast with ``x0``; if that is a series, those in series go by its labels.
    method : {"trf", "dogbox", "lm"}, optional
        Accepted for compatibility with SciPy; the method is the same for each, with bounds, losses and
        batches.
    ftol, xtol, gtol : float or None, optional
        Tolerances: for the relative decrease of the cost, actual and predicted; for the length of the step
        relative to x, both scaled; and for the largest cosine of the angle between residuals and a column of
        the Jacobian (independent of units, as SciPy's "lm"). In formats coarser than float64, tolerances
        below the unit roundoff are replaced by its root. None disables a test.
    x_scale : {"jac"} or array_like, optional
        Sizes of the variables; by default the largest norms of the columns so far set the scale.
    loss : {"linear", "soft_l1", "huber", "cauchy", "arctan"} or callable, optional
    f_scale : float, optional
        Size of residuals above which they count as outliers.
    diff_step : array_like, optional
        Relative steps of differences.
    max_nfev : int, optional
        Calls of ``fun``, without those for differences; by default ``100 n (n + 1)``. The refinement at the
        end may take some more.
    verbose : {0, 1, 2}, optional
    args, kwargs : optional
        Further arguments of ``fun`` and ``jac``.
    callback : callable, optional
        Called after each step, with x, or with ``intermediate_result`` if that is the name of its parameter
        (with x, cost, nit, nfev, optimality); it stops the fit by StopIteration, or by returning True.
    blocks : sequence, optional
        Of a Jacobian that does not fit in memory: for each item ``fun(x, item, *args, **kwargs)`` returns
        some of the residuals, and the triangular factor is merged from block to block. A block should have
        several times as many rows as there are variables.
    engine : {"auto", "cpu", "cuda", "emulated"} or Engine, optional
        The engine that factorizes the Jacobian. ``"auto"`` chooses it by the device of ``x0``.
    strict : bool, optional
        Raise an :class:`~neula.pipeline.result.AccuracyError` instead of a warning.
    progress : callable or bool, optional
        Called with the name of the stage and the completed fraction; True shows a progress bar.

    Returns
    -------
    LeastSquaresResult
        With SciPy's fields, and with the evidence: ``converged``, ``stationarity``, ``rank``, ``condition``,
        ``forward_error``, ``digits``; and ``covariance()``, ``standard_errors()``, ``leverage()``.

    Raises
    ------
    ValueError
        If bounds exclude ``x0`` or each other, residuals or the Jacobian are not finite at ``x0``, shapes do
        not fit, or a name is unknown; and if ``fun`` depends on a tensor that requires a gradient.
    TypeError
        For arguments that are not arrays of numbers, and if torch cannot differentiate ``fun``.
    AccuracyError
        If x is not certified and ``strict`` is set.

    Warns
    -----
    AccuracyWarning
        If x is not certified to be a stationary point with a Jacobian of full rank.

    See Also
    --------
    curve_fit : for a model and data.
    lstsq : where residuals are linear in x.

    Notes
    -----
    The method of Levenberg and Marquardt [1]_ factorizes the Jacobian once an iteration, in double precision,
    and computes damped steps by QR of R stacked on the damping. Bounds are respected by steps of free
    variables alone [2]_. Once one of SciPy's tests is passed, Gauss-Newton steps continue while they shrink,
    so that x is as accurate as rounding errors allow. A step that leads to NaN or Inf is rejected, the trust
    region shrinks, and the result counts the rejection.

    The certificate shows that x is a minimum near ``x0``, not that it is the global minimum.

    References
    ----------
    .. [1] J. J. Moré, "The Levenberg-Marquardt algorithm: implementation and theory", Numerical Analysis,
       Lecture Notes in Mathematics 630, 1978.
    .. [2] D. P. Bertsekas, "Projected Newton methods for optimization problems with simple constraints",
       SIAM J. Control Optim. 20, 1982.

    Examples
    --------
    >>> import numpy as np, neula
    >>> def rosenbrock(x):
    ...     return np.array([10 * (x[1] - x[0] ** 2), 1 - x[0]])
    >>> result = neula.least_squares(rosenbrock, [-1.2, 1.0])
    >>> result.x.round(12), result.converged
    (array([1., 1.]), True)
    """
    call = begin({"x0": x0}, [*args, *dict(kwargs or {}).values()], engine, strict)
    check_names(method, verbose)
    is_tensor = isinstance(x0, torch.Tensor)
    dtype = call.dtype if is_tensor else torch.float64
    x = torch.atleast_1d(call.first.tensor.to(dtype))
    tolerances = tolerances_of(ftol, xtol, gtol, max_nfev, x.shape[-1], dtype)
    fun, jac = with_arguments(fun, args, kwargs), with_arguments(jac, args, kwargs)
    others = (x_scale, diff_step, max_nfev, callback, blocks, progress, verbose or None)
    if is_plain(call, x, loss, f_scale, jac, *others):
        found = fit_by_minpack(call, fun, jac, x.numpy(), bounds, (loss, f_scale), tolerances)
        if found is not None:
            return found
    start = Start.from_arrays(x, bounds, x_scale, call.engine.device)
    points = Points(start.batch, lambda x: call.give_back(x.clone(), x.dtype), start.x)
    blocked = blocks is not None
    if blocks is not None and (isinstance(blocks, Iterator) or not len(blocks)):
        raise ValueError(f"blocks must be a sequence that can be read again and again, got {blocks!r}")
    function = residuals(points, fun, blocked=blocked)
    given = derivatives(points, jac, blocked=blocked) if callable(jac) else None
    steps = Differences("2-point", start.bounds, step_of(diff_step, start))
    jacobian = Jacobian.asked_for(function, given, jac, start.x, steps, is_tensor=is_tensor)
    problem = Residuals(
        function, jacobian, loss_of(loss, f_scale, points.wrap, call.engine.device), call.engine, blocks
    )
    fit = run_fit(problem, start, tolerances, Watched(callback, verbose, progress, points.wrap))
    return result_of(fit, problem, call, start)


def with_arguments(function: Any, args: Iterable[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """A function of what comes before these arguments; what is no function, as it is."""
    if not callable(function) or not (args or kwargs):
        return function
    after, named = tuple(args), dict(kwargs or {})
    return lambda *before: function(*before, *after, **named)


def begin(
    arrays: Mapping[str, Any],
    others: Iterable[Any],
    engine: str | Engine,
    strict: bool,
    *,
    or_complex: bool = False,
) -> Call:
    """Take the arrays and choose the engine; gradients would be lost in a fit, and are refused."""
    for name, array in (*arrays.items(), *(("an argument of fun", other) for other in others)):
        refuse_dependence(array, name)
    call = Call.begin(arrays, engine=engine, strict=strict, or_complex=or_complex)
    return replace(call, engine=call.engine.real) if call.engine.is_complex else call
