"""Fits of a model to data, as SciPy has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack, overload

import numpy as np
import torch

from neula.algorithms.nonlinear.differentiate import Differences
from neula.engines import Engine
from neula.engines.formats import double_of
from neula.errors import check_name
from neula.pipeline.names import by_name, check_aligned, ends_by_name, row_labels
from neula.pipeline.operators import eager
from neula.pipeline.progress import Progress
from neula.pipeline.result import CurveFitResult
from neula.problems.nonlinear.by_minpack import fit_by_minpack, is_plain
from neula.problems.nonlinear.fit import Watched, result_of, run_fit
from neula.problems.nonlinear.functions import Jacobian
from neula.problems.nonlinear.least_squares import NOWHERE, begin
from neula.problems.nonlinear.models import (
    Model,
    Observations,
    Prediction,
    floats,
    names_of_parameters,
    parameters_of,
    spread_of,
)
from neula.problems.nonlinear.problem import (
    Start,
    are_open,
    bounds_of,
    check_names,
    loss_of,
    step_of,
    tolerances_of,
)
from neula.problems.nonlinear.residuals import Residuals
from neula.problems.signatures import ArrayLike, CurveFitKeywords, Kind


@overload
def curve_fit(
    f: Callable[..., Any],
    xdata: Any,
    ydata: Kind,
    p0: Any = ...,
    sigma: Any = ...,
    absolute_sigma: bool = ...,
    check_finite: bool | None = ...,
    bounds: Any = ...,
    method: str | None = ...,
    jac: Any = ...,
    **keywords: Unpack[CurveFitKeywords],
) -> CurveFitResult[Kind]: ...
@overload
def curve_fit(
    f: Callable[..., Any],
    xdata: Any,
    ydata: Any,
    p0: Any = ...,
    sigma: Any = ...,
    absolute_sigma: bool = ...,
    check_finite: bool | None = ...,
    bounds: Any = ...,
    method: str | None = ...,
    jac: Any = ...,
    **keywords: Unpack[CurveFitKeywords],
) -> CurveFitResult[Any]: ...
@eager
def curve_fit(
    f: Callable[..., Any],
    xdata: Any,
    ydata: ArrayLike,
    p0: ArrayLike | None = None,
    sigma: ArrayLike | None = None,
    absolute_sigma: bool = False,
    check_finite: bool | None = None,
    bounds: Any = NOWHERE,
    method: str | None = None,
    jac: Any = None,
    *,
    full_output: bool = False,
    nan_policy: str | None = None,
    ftol: float | None = 1e-8,
    xtol: float | None = 1e-8,
    gtol: float | None = 1e-8,
    x_scale: Any = None,
    loss: Any = "linear",
    f_scale: Any = 1.0,
    diff_step: Any = None,
    max_nfev: int | None = None,
    maxfev: int | None = None,
    verbose: int = 0,
    callback: Callable[..., Any] | None = None,
    engine: str | Engine = "auto",
    strict: bool = False,
    progress: Progress | None = None,
) -> CurveFitResult:
    """Fit a model to data: ``popt, pcov = curve_fit(f, xdata, ydata)``, with the errors of the parameters.

    The parameters minimize the sum of squares of ``(f(xdata, *popt) - ydata) / sigma``. Arguments are those
    of :func:`scipy.optimize.curve_fit`, unless said otherwise.

    Parameters
    ----------
    f : callable
        ``f(xdata, a, b, ...)``, of torch where ``ydata`` is a tensor. For a batch each parameter has
        shape (problems, 1), which is broadcast with xdata, and the model returns (problems, m). It may
        be called for some of the problems only, when others have converged.
    xdata : object
        Argument of the model; arrays and lists must be finite. For a batch it has the shape of ``ydata``,
        with rows that belong to the problems, or any other shape, and belongs to all of them.
    ydata : array_like, shape (m,) or (*batch, m)
        Observations: of one curve, or of many, each with parameters of its own. Complex ones, of a complex
        model with real parameters, count as two real ones, the real and the imaginary part.
    p0 : array_like, shape (n,) or (*batch, n), optional
        Starting point; by default ones, or the middle of the bounds. A dictionary or series has the
        names of the parameters of f.
    sigma : array_like, optional
        Standard deviations of ``ydata``, broadcast with it; or their covariance matrix, shape (m, m) or
        (*batch, m, m). Of complex data, those of the real and of the imaginary part: half the Hermitian
        matrix of the expected ``e e^H``, for errors e whose expected ``e e^T`` is zero.
    absolute_sigma : bool, optional
        Whether ``sigma`` is in the units of ``ydata``; by default only its ratios count, and ``pcov`` is
        scaled by the residuals.
    check_finite : bool, optional
    bounds : pair of array_like, or scipy.optimize.Bounds, optional
        Dictionaries and series have the parameters by name.
    method : {"trf", "dogbox", "lm"}, optional
        Accepted for compatibility with SciPy; the method is the same for each.
    jac : callable or str, optional
        ``jac(xdata, a, b, ...)``, shape (m, n), or a name as for :func:`neula.least_squares`.
    full_output : bool, optional
        Let the result unpack into ``popt, pcov, infodict, mesg, ier``.
    nan_policy : {"raise", "omit"}, optional
        Whether NaN observations of a single curve are omitted.
    ftol, xtol, gtol, x_scale, loss, f_scale, diff_step, verbose, callback, engine, strict : optional
    progress : optional
        As for :func:`neula.least_squares`.
    max_nfev, maxfev : int, optional
        Largest number of calls of f; both names are accepted, as in SciPy.

    Returns
    -------
    CurveFitResult
        Unpacks as SciPy's. Its ``result`` is a :class:`~neula.pipeline.result.LeastSquaresResult`, with all
        evidence; ``standard_errors()``, ``confidence_intervals()`` and ``band(xdata)`` follow from it.

    Raises
    ------
    ValueError, TypeError, AccuracyError
        As :func:`neula.least_squares`, and for NaN in the data.

    Warns
    -----
    AccuracyWarning
        If the fit is not certified; SciPy raises a RuntimeError if it does not converge.

    Examples
    --------
    >>> import numpy as np, neula
    >>> x = np.linspace(0, 4, 30)
    >>> y = 3 * np.exp(-1.5 * x) + 0.5
    >>> fit = neula.curve_fit(lambda x, a, b, c: a * np.exp(-b * x) + c, x, y)
    >>> popt, pcov = fit
    >>> popt.round(8), fit.converged
    (array([3. , 1.5, 0.5]), True)
    """
    check_names(method, verbose)
    is_tensor, names = isinstance(ydata, torch.Tensor), names_of_parameters(f)
    check_aligned(row_labels(xdata), {"ydata": ydata, "sigma": sigma}, "xdata")
    p0, bounds = by_name(p0, names, "p0"), ends_by_name(bounds, names)
    xdata, ydata, sigma = clean_data(xdata, ydata, sigma, check_finite, nan_policy)
    call = begin({"ydata": ydata}, [xdata, sigma, p0], engine, strict, or_complex=True)
    y = torch.atleast_1d(call.first.tensor).to(
        call.engine.device, call.dtype if is_tensor else double_of(call.dtype)
    )
    shape, dtype = tuple(y.shape), y.dtype.to_real()
    model = Model(f, lambda x: call.give_back(x.clone(), x.dtype), shape[:-1], is_tensor)
    flat = y.reshape(-1, shape[-1])
    data = Observations(model, xdata, flat, shape, *spread_of(sigma, flat, shape))
    most = max_nfev if maxfev is None else maxfev
    guess = _first_guess(f, p0, bounds, shape[:-1], y.real)
    tolerances = tolerances_of(ftol, xtol, gtol, most, guess.shape[-1], dtype)
    result = None
    others = (x_scale, diff_step, most, callback, progress, verbose or None)
    if is_plain(call, y, loss, f_scale, jac, *others):
        given = data.slopes_in_arrays(jac) if callable(jac) else jac
        result = fit_by_minpack(
            call, data.in_arrays(), given, guess.numpy(), bounds, (loss, f_scale), tolerances
        )
    if result is None:
        start = Start.from_arrays(guess, bounds, x_scale, y.device)
        given = data.derivatives(jac) if callable(jac) else None
        steps = Differences("2-point", start.bounds, step_of(diff_step, start))
        jacobian = Jacobian.asked_for(data.residuals, given, jac, start.x, steps, is_tensor=is_tensor)
        robust = loss_of(loss, f_scale, model.wrap, y.device)
        problem = Residuals(data.residuals, jacobian, robust, call.engine)
        fit = run_fit(problem, start, tolerances, Watched(callback, verbose, progress, model.wrap))
        result = result_of(fit, problem, call, start)
    found = torch.as_tensor(result.x, device=y.device).reshape(-1, guess.shape[-1])
    names = names if names and len(names) == guess.shape[-1] else None
    vars(result)["names"] = names
    fitted: CurveFitResult[Any] = CurveFitResult(
        popt=result.x,
        pcov=result.covariance(absolute=absolute_sigma),
        result=result,
        absolute_sigma=absolute_sigma,
        full_output=full_output,
        predict=Prediction(model, jac, found, shape),
    )
    vars(fitted)["names"] = names
    return fitted


def clean_data(
    xdata: Any, ydata: Any, sigma: Any, check_finite: bool | None, nan_policy: str | None
) -> tuple[Any, Any, Any]:
    """Finite arrays instead of lists; of one curve without the observations that are NaN, if requested."""
    check_name("nan_policy", nan_policy, ("raise", "omit"), optional=True)
    ydata = floats(ydata, "ydata", or_complex=True)
    if isinstance(xdata, (list, tuple, np.ndarray)):
        xdata = floats(xdata, "xdata", or_complex=True)
    arrays = isinstance(xdata, (np.ndarray, torch.Tensor))
    if 0 in ydata.shape:
        raise ValueError(f"ydata of shape {tuple(ydata.shape)} must not be empty")
    if nan_policy == "omit":
        if ydata.ndim != 1 or not arrays:
            raise ValueError("nan_policy='omit' is for one curve, whose ydata has one dimension")
        lost = ydata.isnan() if isinstance(ydata, torch.Tensor) else np.isnan(ydata)
        missing = xdata.isnan() if isinstance(xdata, torch.Tensor) else np.isnan(xdata)
        kept = ~(lost | missing.reshape(-1, len(lost)).any(0))
        return xdata[..., kept], ydata[kept], _at(sigma, kept)
    if check_finite or check_finite is None:
        for name, array in (("xdata", xdata), ("ydata", ydata))[not arrays :]:
            finite = array.isfinite() if isinstance(array, torch.Tensor) else np.isfinite(array)
            if not finite.all():
                raise ValueError(f"{name} holds NaN or Inf: leave such observations out (nan_policy='omit')")
    return xdata, ydata, sigma


def _at(sigma: Any, kept: Any) -> Any:
    if sigma is None or np.ndim(sigma) == 0:
        return sigma
    sigma = floats(sigma, "sigma", or_complex=True)
    return sigma[kept] if sigma.ndim == 1 else sigma[kept][:, kept]


def _first_guess(
    f: Callable[..., Any], p0: Any, bounds: Any, batch: tuple[int, ...], y: torch.Tensor
) -> torch.Tensor:
    """Parameters to begin with, of each problem: ones, or within the bounds."""
    if p0 is not None:
        given = torch.atleast_1d(torch.as_tensor(floats(p0, "p0"), dtype=y.dtype, device=y.device))
        try:
            return given.expand(*batch, given.shape[-1])
        except RuntimeError:
            raise ValueError(
                f"p0 of shape {tuple(given.shape)} does not fit curves of shape {batch}"
            ) from None
    shape = torch.Size((*batch, parameters_of(f)))
    if are_open(bounds):
        return y.new_ones(shape)
    limits = bounds_of(bounds, shape, y.device, y.dtype)
    low, high = limits.lower.reshape(shape), limits.upper.reshape(shape)
    guess = torch.where(low.isfinite(), low + 1, torch.where(high.isfinite(), high - 1, 1.0))
    return torch.where(low.isfinite() & high.isfinite(), (low + high) / 2, guess).to(y)
