"""``scipy.optimize``, with least squares by neula: ``import neula.compat.scipy.optimize as opt``.

All other names are SciPy's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from scipy import optimize

import neula
from neula.compat.drop_in import SMALL, drop_in, names_of, need, need_finite
from neula.compat.measured import EPS, is_accurate_minimum
from neula.errors import warn
from neula.problems.nonlinear.curve_fit import parameters_of

NOWHERE = (-np.inf, np.inf)

METHODS, SCHEMES = ("trf", "dogbox", "lm"), ("2-point", "3-point", "cs")

FIELDS = (
    *("x", "cost", "fun", "jac", "grad", "optimality", "active_mask"),
    *("nfev", "njev", "status", "message", "success"),
)


@drop_in(optimize)
def least_squares(
    fun: Callable[..., Any],
    x0: Any,
    jac: Any = "2-point",
    bounds: Any = NOWHERE,
    method: str = "trf",
    ftol: float | None = 1e-8,
    xtol: float | None = 1e-8,
    gtol: float | None = 1e-8,
    x_scale: Any = None,
    loss: Any = "linear",
    f_scale: float = 1.0,
    diff_step: Any = None,
    tr_solver: str | None = None,
    tr_options: Any = None,
    jac_sparsity: Any = None,
    max_nfev: int | None = None,
    verbose: int = 0,
    args: Any = (),
    kwargs: Any = None,
    callback: Any = None,
    workers: Any = None,
) -> optimize.OptimizeResult:
    """Non-linear least squares as by :func:`scipy.optimize.least_squares`, by :func:`neula.least_squares`.

    There is one method, which refuses what SciPy's of the given name refuses. ``gtol`` is a cosine, as for
    SciPy's "lm", and ``x_scale`` by default the norms of the columns of the Jacobian. With ``jac="2-point"``
    x is refined in the end by differences of fourth order. With ``tr_solver``, ``tr_options``,
    ``jac_sparsity``, ``max_nfev``, ``verbose``, ``callback`` or ``workers`` SciPy minimizes.

    >>> opt.least_squares(lambda x: np.array([10 * (x[1] - x[0] ** 2), 1 - x[0]]), [-1.2, 1.0]).x.round(12)
    array([1., 1.])
    """
    others = (tr_solver, jac_sparsity, max_nfev, callback, workers)
    need(all(other is None for other in others) and not tr_options and verbose == 0)
    need(method in METHODS and (callable(jac) or jac in SCHEMES))
    start = np.atleast_1d(x0)
    need(start.ndim == 1 and start.dtype.kind in "iubf")
    need(all(np.shape(end) in ((), start.shape) for end in ends_of(bounds)))
    if method == "lm":
        need(_unbounded(bounds) and loss == "linear")
        need(all(x is not None and x >= np.finfo(float).eps for x in (ftol, xtol, gtol)))
    found, missed = fitted(
        neula.least_squares,
        fun,
        start.astype(np.float64),
        None if isinstance(jac, str) and jac == "2-point" else jac,
        bounds,
        method,
        ftol=ftol,
        xtol=xtol,
        gtol=gtol,
        x_scale=x_scale,
        loss=loss,
        f_scale=f_scale,
        diff_step=diff_step,
        args=args,
        kwargs=kwargs,
    )
    need(method != "lm" or len(found.fun) >= len(found.x))
    if missed:
        warn(missed, neula.AccuracyWarning)
    fields = {name: getattr(found, name) for name in FIELDS}
    return optimize.OptimizeResult(fields | ({"njev": None} if method == "lm" and not callable(jac) else {}))


@drop_in(optimize)
def curve_fit(
    f: Callable[..., Any],
    xdata: Any,
    ydata: Any,
    p0: Any = None,
    sigma: Any = None,
    absolute_sigma: bool = False,
    check_finite: bool | None = None,
    bounds: Any = NOWHERE,
    method: str | None = None,
    jac: Any = None,
    *,
    full_output: bool = False,
    nan_policy: str | None = None,
    **kwargs: Any,
) -> Any:
    """A fit as by :func:`scipy.optimize.curve_fit`, measured, and by :func:`neula.curve_fit` if inaccurate.

    MINPACK's, with one more Gauss-Newton step, is returned if half of the digits, or more, are measured to be
    correct. Fits with ``sigma``, ``bounds``, ``method``, ``jac``, ``nan_policy`` or more keywords are always
    neula's. SciPy fits where ydata is not a vector, with ``full_output``, whose dictionary has LAPACK's
    factors, and with other keywords than ``ftol``, ``xtol``, ``gtol``, ``x_scale``, ``loss`` and ``f_scale``,
    which are as for :func:`least_squares`.

    >>> x = np.linspace(0, 4, 30)
    >>> popt, pcov = opt.curve_fit(lambda x, a, b: a * np.exp(-b * x), x, 3 * np.exp(-1.5 * x))
    >>> popt.round(8)
    array([3. , 1.5])
    """
    need(not full_output and method in (None, *METHODS))
    need(set(kwargs) <= {"ftol", "xtol", "gtol", "x_scale", "loss", "f_scale"})
    need(jac is None or callable(jac) or jac in SCHEMES)
    observed = np.asarray(ydata)
    need(observed.ndim == 1 and observed.dtype.kind in "iubf" and np.ndim(p0) <= 1)
    need(method != "lm" or (_unbounded(bounds) and "loss" not in kwargs))
    plain = bounds is NOWHERE and sigma is method is jac is nan_policy is None and not kwargs
    plain = plain and check_finite in (None, True)
    if plain and (soon := _measured(f, xdata, observed, p0, absolute_sigma)) is not None:
        return soon
    given = {"bounds": bounds, "method": method, "jac": jac, "nan_policy": nan_policy, **kwargs}
    given |= {"p0": p0, "sigma": sigma, "check_finite": check_finite}
    given |= {"absolute_sigma": absolute_sigma}
    found, missed = fitted(neula.curve_fit, f, xdata, observed, **given)
    # Without a certificate, the result is that of the fit alone.
    found, pcov = (found, found.covariance(absolute=absolute_sigma)) if missed else (found.result, found.pcov)
    # SciPy refuses fits that did not end, and covariances that do not exist.
    need(found.success and bool(np.isfinite(pcov).all()))
    if missed:
        warn(missed, neula.AccuracyWarning)
    return found.x, pcov


def _measured(
    f: Callable[..., Any], xdata: Any, observed: np.ndarray, p0: Any, absolute: bool
) -> tuple[np.ndarray, np.ndarray] | None:
    """SciPy's fit after one more step; None unless half of the digits, or more, are measured to be correct.

    Steps ``C J^T r`` have a fixed ``C = (J^T J)^-1``, which SciPy returns, and differences J, whose errors
    are of the order of ``eps^(1/2)``. Two steps tell by what they shrink, and so how far the minimum is away.
    """
    y = np.asarray_chkfinite(observed, float)
    data = np.asarray_chkfinite(xdata, float) if isinstance(xdata, (list, tuple, np.ndarray)) else xdata
    begin = np.ones(parameters_of(f)) if p0 is None else np.atleast_1d(p0)
    x, inverse, found, _, status = optimize.leastsq(lambda p: f(data, *p) - y, begin, full_output=True)
    freedom, r = len(y) - len(x), found["fvec"]
    if inverse is None or status not in range(1, 5) or not freedom:
        return None
    far = EPS**0.5 * (np.abs(x) + (x == 0))
    with np.errstate(all="ignore"):  # NaN is not accepted
        slopes = (np.array([f(data, *near) - y for near in x + np.diag(far)]) - r) / far[:, None]
        norms, squares = np.sqrt(np.einsum("nm,nm->n", slopes, slopes)), r @ r
        step = inverse @ (slopes @ r)
        there = x - step
        left = f(data, *there) - y
        size, first, second = (math.sqrt(z @ z) for z in norms * (there, step, inverse @ (slopes @ left)))
        squared_condition = norms @ (inverse.diagonal() * norms) * len(x)  # from above, of normalized columns
        noise = 4 * EPS**0.5 * squared_condition * squares**0.5
        converges = second <= max(first / 4, EPS**0.75 * size) and left @ left <= (1 + len(y) * EPS) * squares
    if not (converges and 2 * second + noise <= EPS**0.5 * size):
        return None
    return there, inverse if absolute else inverse * (squares / freedom)


def fitted(fit: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, str]:
    """The result of a fit, and the reason if it is not certified."""
    try:
        found = fit(*args, **kwargs, strict=True)
    except neula.AccuracyError as error:
        return error.result, str(error)
    return found, ""


def ends_of(bounds: Any) -> tuple[Any, ...]:
    """Lower and upper ends, of bounds in either of SciPy's forms."""
    return (bounds.lb, bounds.ub) if hasattr(bounds, "lb") else tuple(bounds)


def _unbounded(bounds: Any) -> bool:
    return all(bool(np.isinf(end).all()) for end in ends_of(bounds))


__all__ = ["curve_fit", "least_squares", "lsq_linear", "nnls"]


@drop_in(optimize)
def nnls(A: Any, b: Any, *, maxiter: int | None = None) -> tuple[np.ndarray, float]:
    """Least squares with ``x >= 0`` as by :func:`scipy.optimize.nnls`, by :func:`neula.nnls`.

    For small problems SciPy's is returned if half of its digits, or more, are measured to be correct, and
    with ``maxiter``.

    >>> opt.nnls([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], [2.0, 1.0, -1.0])[0].round(12)
    array([1.5, 0. ])
    """
    if np.ndim(A) == 2 and np.size(A) == 0:  # SciPy's aborts, or returns uninitialized memory
        A, b = (np.asarray_chkfinite(x, dtype=np.float64) for x in (A, b))
    matrix, rhs = _arrays(A, b)
    if matrix.size == 0:
        empty = neula.nnls(matrix, rhs)
        return empty.x, empty.rnorm
    need(maxiter is None)
    if matrix.size <= 4 * SMALL:
        with suppress(RuntimeError):  # SciPy's iteration did not end
            x, rnorm = optimize.nnls(matrix, rhs)
            if is_accurate_minimum(matrix, rhs, x):
                return x, rnorm
    result = _sure(neula.nnls, matrix, rhs)
    return result.x, result.rnorm


@drop_in(optimize)
def lsq_linear(
    A: Any,
    b: Any,
    bounds: Any = (-np.inf, np.inf),
    method: str = "trf",
    tol: float = 1e-10,
    lsq_solver: str | None = None,
    lsmr_tol: Any = None,
    max_iter: int | None = None,
    verbose: int = 0,
    *,
    lsmr_maxiter: int | None = None,
) -> optimize.OptimizeResult:
    """Least squares with bounds as by :func:`scipy.optimize.lsq_linear`, by :func:`neula.lsq_linear`.

    There is one algorithm, whatever ``method`` and ``tol`` say. With ``lsq_solver``, ``lsmr_tol``,
    ``max_iter``, ``lsmr_maxiter`` or ``verbose`` SciPy solves.

    >>> opt.lsq_linear([[1.0, 0.0], [0.0, 1.0]], [3.0, 0.5], (0.0, 1.0)).x
    array([1. , 0.5])
    """
    matrix, rhs = _arrays(A, b)
    need(matrix.size > 0 and (lsq_solver, lsmr_tol, max_iter, lsmr_maxiter) == (None,) * 4)
    need(np.ndim(b) == 1 and method in ("trf", "bvls") and verbose == 0)
    lower, upper = (np.broadcast_to(x, matrix.shape[1:]).astype(float) for x in ends_of(bounds))
    need(bool((lower < upper).all()))
    result = _sure(neula.lsq_linear, matrix, rhs, (lower, upper))
    names = ("x", "fun", "cost", "optimality", "active_mask", "nit", "status", "message", "success")
    unbounded = np.linalg.lstsq(matrix, rhs, rcond=-1)
    return optimize.OptimizeResult({name: result[name] for name in names} | {"unbounded_sol": unbounded})


def _sure(solve: Callable[..., Any], *args: Any) -> Any:
    """A solution with guaranteed digits; of several, SciPy chooses one."""
    result, missed = fitted(solve, *args)
    need(result.digits > 0)
    if missed:
        warn(missed, neula.AccuracyWarning)
    return result


def _arrays(A: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    """Convert A and b to a matrix and a vector of finite numbers."""
    need(not hasattr(A, "tocoo") and not hasattr(A, "matvec"))
    matrix, rhs = np.asarray(A), np.asarray(b)
    for x in (matrix, rhs):
        need_finite(x, ValueError("array must not contain infs or NaNs"))
    need(matrix.ndim == 2 and all(x.dtype.kind in "iubf" for x in (matrix, rhs)))
    matrix, rhs = (x.astype(np.float64, copy=False) for x in (matrix, rhs))
    need(rhs.shape in ((len(matrix),), (len(matrix), 1)))
    return matrix, rhs.ravel()


__dir__, __getattr__ = names_of(optimize, globals())
