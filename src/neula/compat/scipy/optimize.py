"""``scipy.optimize``, with least squares by neula: ``import neula.compat.scipy.optimize as opt``.

All other names are SciPy's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from scipy import optimize

import neula
from neula.compat.drop_in import SMALL, drop_in, names_of, need, need_finite
from neula.compat.least_squares import is_accurate_minimum
from neula.compat.scipy.fits import curve_fit, ends_of, fitted, least_squares
from neula.errors import warn

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
