"""Fits of a model to data, as SciPy has them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack, overload

import numpy as np
import torch

from neula.algorithms.nonlinear.differentiate import Differences
from neula.algorithms.nonlinear.feasible import Bounds
from neula.algorithms.nonlinear.one_function import COMPLEX, DOUBLE, Unusual, Vectors
from neula.engines import Engine
from neula.engines.formats import double_of, in_double
from neula.errors import check_name
from neula.io.integers import in_float64
from neula.kernels import scipy_linalg
from neula.pipeline.inputs import take
from neula.pipeline.names import by_name, check_aligned, ends_by_name, row_labels
from neula.pipeline.operators import eager
from neula.pipeline.progress import Progress
from neula.pipeline.result import CurveFitResult
from neula.problems.nonlinear.by_minpack import fit_by_minpack, is_plain
from neula.problems.nonlinear.fit import Residuals, Watched, result_of, run_fit
from neula.problems.nonlinear.functions import SCHEMES, Jacobian, complex_rows, mode_of, real_rows, tensor_of
from neula.problems.nonlinear.least_squares import NOWHERE, begin
from neula.problems.nonlinear.problem import (
    Start,
    are_open,
    bounds_of,
    check_names,
    loss_of,
    step_of,
    tolerances_of,
)
from neula.problems.signatures import ArrayLike, BoundsLike, CurveFitKeywords, Kind, NameOrFunction


@dataclass(frozen=True)
class Model:
    """``f(xdata, *params)``, called with the parameters of one problem, or of several."""

    f: Callable[..., Any]
    wrap: Callable[[torch.Tensor], Any]  # makes an array of the caller's library
    batch: tuple[int, ...]  # leading dimensions of the data
    is_tensor: bool  # whether f is a function of torch

    def values(self, function: Callable[..., Any], xdata: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        """Values of the model, or of a function with its arguments, at parameters x, shape (P, n)."""
        # Of a batch each parameter has shape (P, 1), else none.
        rows = x[:, :, None].unbind(1) if self.batch else x[0].unbind()
        given = [self.wrap(value) for value in rows]
        if not self.batch and not self.is_tensor:
            given = [value[()] for value in given]
        out = tensor_of(function(xdata, *given), name, or_complex=True).to(x.device)
        return out if self.batch else out[None]

    def select(self, xdata: Any, which: torch.Tensor, shape: tuple[int, ...]) -> Any:
        """The rows of ``xdata`` for problems ``which``, if it has the shape of the data."""
        if not self.batch or tuple(getattr(xdata, "shape", ())) != shape:
            return xdata
        rows = xdata.reshape(-1, shape[-1])
        return rows[which.to(rows.device) if isinstance(rows, torch.Tensor) else which.cpu().numpy()]


@dataclass(frozen=True)
class Observations:
    """Residuals of a model, in units of their standard deviations."""

    model: Model
    xdata: Any
    y: torch.Tensor  # shape (P, m)
    shape: tuple[int, ...]  # of the data as they came
    deviations: torch.Tensor | None  # shape (P, m), real
    factor: torch.Tensor | None  # shape (P, m, m): lower Cholesky factors of their covariance matrices

    def residuals(self, x: torch.Tensor, which: torch.Tensor, _: Any) -> torch.Tensor:
        xdata, y = self.model.select(self.xdata, which, self.shape), self.y[which]
        found = self.model.values(self.model.f, xdata, x, "f(xdata, ...)")
        try:
            left = found - y
        except RuntimeError:
            left = found
        if left.shape != y.shape:
            raise ValueError(
                "f must return one value for each observation, shape "
                f"{tuple(y.shape[not self.model.batch :])}, got {tuple(found.shape[not self.model.batch :])}"
            )
        return self.whitened(left[..., None], which)[..., 0]

    def derivatives(self, jac: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        def call(x: torch.Tensor, which: torch.Tensor, _: Any) -> torch.Tensor:
            xdata = self.model.select(self.xdata, which, self.shape)
            return self.whitened(self.model.values(jac, xdata, x, "jac(xdata, ...)"), which)

        return call

    def in_arrays(self, function: Callable[..., Any], y: np.ndarray | float, ndim: int) -> Vectors:
        """A function of xdata and parameters, minus y, with one whitened float64 row an observation."""
        xdata, m = self.xdata, self.y.shape[1]
        deviations = None if self.deviations is None else self.deviations[0].numpy()
        factor = None if self.factor is None else self.factor[0].numpy()

        def call(x: np.ndarray) -> np.ndarray:
            found = function(xdata, *x)
            usual = type(found) is np.ndarray and found.ndim == ndim and found.dtype in (DOUBLE, COMPLEX)
            if not usual or len(found) != m:
                raise Unusual
            rows: np.ndarray = found - y
            if deviations is not None:
                rows = (rows.T / deviations).T
            if factor is None:
                return rows
            if rows.dtype == COMPLEX:
                raise Unusual
            return scipy_linalg.lapack.dtrtrs(factor, rows, lower=1)[0]

        return call

    def whitened(self, columns: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        """Columns, shape (P, m, k), in units of the standard deviations of observations."""
        if self.y.is_complex():
            columns = columns.to(columns.dtype.to_complex())
        if self.deviations is not None:
            return columns / self.deviations[which][..., None]
        if self.factor is not None:
            factor = self.factor[which].to(columns.dtype)
            return torch.linalg.solve_triangular(factor, columns, upper=False)
        return columns


@dataclass(frozen=True)
class Prediction:
    """The model and its derivatives anywhere, at the parameters that were found."""

    model: Model
    jac: Any  # as for neula.curve_fit
    x: torch.Tensor  # shape (P, n)
    shape: tuple[int, ...]  # of the data

    def __call__(self, xdata: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Values, shape (*batch, k), and derivatives, shape (*batch, k, n)."""
        x, everyone = self.x, torch.arange(len(self.x), device=self.x.device)
        if isinstance(xdata, (list, tuple)):
            xdata = floats(xdata, "xdata")

        def call(x: torch.Tensor, which: torch.Tensor, _: Any) -> torch.Tensor:
            found = self.model.values(
                self.model.f, self.model.select(xdata, which, self.shape), x, "f(xdata, ...)"
            )
            return found if found.ndim > 1 else found[:, None]

        def derivatives(x: torch.Tensor, which: torch.Tensor, _: Any) -> torch.Tensor:
            found = self.model.values(self.jac, self.model.select(xdata, which, self.shape), x, "jac")
            return found.reshape(len(x), -1, x.shape[1])

        with torch.no_grad():
            y = call(x, everyone, None)
            mode = mode_of(self.jac, is_tensor=self.model.is_tensor)
            endless = torch.full_like(x, torch.inf, dtype=torch.float64)
            found = Jacobian(
                call,
                derivatives if callable(self.jac) else None,
                "5-point" if mode in SCHEMES and mode != "cs" else mode,
                Differences("5-point", Bounds.from_arrays(-endless, endless)),
                self.jac is None,
                x.abs(),
            )
            if y.is_complex():
                found.values = y.dtype
            f = real_rows(y)
            slopes = f.new_empty(*f.shape, x.shape[1])
            found.write(x, everyone, None, f, slopes)
            slopes = complex_rows(slopes) if y.is_complex() else slopes
        return y.reshape(*self.model.batch, -1), slopes.reshape(*self.model.batch, *slopes.shape[1:])


def floats(x: Any, name: str, *, or_complex: bool = False) -> Any:
    """A tensor as it is, all else as SciPy takes it: as an array in float64, or complex128."""
    if isinstance(x, torch.Tensor):
        if not x.is_floating_point():
            take(x, name, or_complex=or_complex)
        return x
    if x is None or isinstance(x, np.ma.MaskedArray) or np.asarray(x).dtype.kind not in "biufO":
        take(x, name, or_complex=or_complex)
        if np.iscomplexobj(x):
            return np.asarray(x, dtype=np.complex128)
    return in_float64(x, name)


def parameters_of(f: Callable[..., Any]) -> int:
    """How many parameters a model has, by its signature. Raises ValueError if that does not say."""
    if (names := names_of_parameters(f)) is None:
        raise ValueError(f"the number of parameters does not follow from f{inspect.signature(f)}: pass p0")
    return len(names)


def names_of_parameters(f: Callable[..., Any]) -> tuple[str, ...] | None:
    """Names of a model's parameters; None if its signature does not have them."""
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # of some functions of C
        return None
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(named) < 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return tuple(named[1:])


def spread_of(
    sigma: Any, y: torch.Tensor, shape: tuple[int, ...]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Standard deviations of observations, or Cholesky factors of their covariance matrices."""
    if sigma is None:
        return None, None
    or_complex = y.is_complex()
    tensor = take(floats(sigma, "sigma", or_complex=or_complex), "sigma", or_complex=or_complex).tensor
    tensor, m = tensor.to(y if tensor.is_complex() else y.real), shape[-1]
    if tensor.ndim == len(shape) + 1 or (tensor.shape == (m, m) and tensor.shape != shape):
        wide = in_double(tensor).expand(*shape, m) if tensor.shape[-2:] == (m, m) else None
        if wide is not None:
            factor, info = torch.linalg.cholesky_ex(wide)
            if bool((info > 0).any()):
                raise ValueError("sigma must be positive definite")
            return None, factor.reshape(-1, m, m)
    if tensor.is_complex():
        raise TypeError("sigma is complex: standard deviations are real, and only covariances may be complex")
    try:
        deviations = tensor.expand(shape).reshape(y.shape)
    except RuntimeError:
        raise ValueError(
            f"sigma has incorrect shape {tuple(tensor.shape)}: expected {shape}, or {(*shape, m)} for "
            "covariances"
        ) from None
    if not bool((deviations > 0).all()):
        raise ValueError("sigma must be positive: it holds standard deviations of the observations")
    return deviations, None


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
    xdata: ArrayLike,
    ydata: ArrayLike,
    p0: ArrayLike | None = None,
    sigma: ArrayLike | None = None,
    absolute_sigma: bool = False,
    check_finite: bool | None = None,
    bounds: BoundsLike = NOWHERE,
    method: str | None = None,
    jac: NameOrFunction | None = None,
    *,
    full_output: bool = False,
    nan_policy: str | None = None,
    ftol: float | None = 1e-8,
    xtol: float | None = 1e-8,
    gtol: float | None = 1e-8,
    x_scale: str | ArrayLike | None = None,
    loss: NameOrFunction = "linear",
    f_scale: float = 1.0,
    diff_step: ArrayLike | None = None,
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
        given = data.in_arrays(jac, 0.0, 2) if callable(jac) else jac
        result = fit_by_minpack(
            call,
            data.in_arrays(f, flat[0].numpy(), 1),
            given,
            guess.numpy(),
            bounds,
            (loss, f_scale),
            tolerances,
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
