"""Cholesky factors with the signatures of SciPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import linalg

import neula
from neula.compat.drop_in import drop_in, has_safe_diagonal, need
from neula.compat.scipy.inputs import lapack_arrays


@drop_in(linalg)
def cholesky(a: Any, lower: bool = False, overwrite_a: bool = False, check_finite: bool = True) -> np.ndarray:
    """Cholesky factor by :func:`scipy.linalg.cholesky`, and by :func:`neula.cholesky` if A is badly scaled.

    Parameters
    ----------
    a : array_like, shape (..., n, n)
        Only the triangle of the factor is read.
    lower : bool, optional
        Whether to return L with ``a = L L^T`` in place of U with ``a = U^T U``.
    overwrite_a, check_finite : bool, optional
        As for SciPy, which factorizes unless A is badly scaled.

    Returns
    -------
    ndarray, shape (..., n, n)

    Raises
    ------
    numpy.linalg.LinAlgError
        If a is not positive definite.
    ValueError
        If a is not square, and for NaN or Inf.

    Warns
    -----
    AccuracyWarning
        If the factor is not certified.

    Examples
    --------
    >>> import neula.compat.scipy as la
    >>> la.cholesky([[4.0, 2.0], [2.0, 5.0]])
    array([[2., 1.],
           [0., 2.]])
    """
    return _factor(a, lower=lower)


@drop_in(linalg)
def cho_factor(
    a: Any, lower: bool = False, overwrite_a: bool = False, check_finite: bool = True
) -> tuple[np.ndarray, bool | np.ndarray]:
    """Cholesky factor for :func:`scipy.linalg.cho_solve`, as by :func:`cholesky`.

    Parameters
    ----------
    a : array_like, shape (..., n, n)
    lower, overwrite_a, check_finite : bool, optional
        As for :func:`cholesky`.

    Returns
    -------
    c : ndarray, shape (..., n, n)
        The factor; the other triangle holds anything.
    lower : bool, or ndarray of bool, shape (...), for a batch

    Raises
    ------
    numpy.linalg.LinAlgError, ValueError
        As :func:`cholesky`.

    Warns
    -----
    AccuracyWarning
        If the factor is not certified.

    Examples
    --------
    >>> import neula.compat.scipy as la
    >>> la.cho_solve(la.cho_factor([[4.0, 2.0], [2.0, 5.0]]), [8.0, 12.0]).round(12)
    array([1., 2.])
    """
    factor = _factor(a, lower=lower)
    return factor, lower if factor.ndim == 2 else np.full(factor.shape[:-2], lower)


def _factor(a: Any, *, lower: bool) -> np.ndarray:
    (A,) = lapack_arrays(a)
    need(A.size > 0 and not has_safe_diagonal(A) and bool(np.isfinite(A).all()))
    factor: np.ndarray = neula.cholesky(A, upper=not lower).factor
    return factor
