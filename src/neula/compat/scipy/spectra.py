"""Eigenvalues, singular values and powers of matrices with the signatures of SciPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import linalg

import neula
from neula.compat.drop_in import SMALL, drop_in, need, need_finite, squared
from neula.compat.measured import (
    are_eigenvectors,
    are_eigenvectors_of_pencil,
    are_singular_vectors,
    are_values,
    is_for_lapack,
    mirrored,
    need_finite_triangle,
)
from neula.compat.scipy.systems import lapack_arrays
from neula.kernels.phases import adjoint


@drop_in(linalg)
def eigh(
    a: Any,
    b: Any = None,
    *,
    lower: bool = True,
    eigvals_only: bool = False,
    overwrite_a: bool = False,
    overwrite_b: bool = False,
    type: int = 1,
    check_finite: bool = True,
    subset_by_index: Any = None,
    subset_by_value: Any = None,
    driver: str | None = None,
) -> Any:
    """Eigenvectors by :func:`scipy.linalg.eigh`, measured, and by :func:`neula.eigh` if they are inaccurate.

    Nothing is measured with ``eigvals_only``, with a ``driver``, and with b unless ``type=1``.

    >>> w, V = la.eigh([[2.0, 1.0], [1.0, 2.0]], subset_by_index=(1, 1))
    >>> w.round(12), V.shape
    (array([3.]), (2, 1))
    """
    _check_triangle(a, b, lower=lower)
    need(not eigvals_only and driver is None and type == 1)
    arrays = lapack_arrays(a) if b is None else lapack_arrays(a, b)
    need(all(x.ndim >= 2 and x.size > 0 for x in arrays))
    part: Any = {"subset_by_index": subset_by_index, "subset_by_value": subset_by_value}
    found = w, v = linalg.eigh(a, b, lower=lower, check_finite=check_finite, **part)
    matrices = [mirrored(x, upper=not lower) for x in arrays]
    accurate: Any = are_eigenvectors if b is None else are_eigenvectors_of_pencil
    return found if accurate(*matrices, w, v) else tuple(neula.eigh(*matrices, **part))


@drop_in(linalg)
def svd(
    a: Any,
    full_matrices: bool = True,
    compute_uv: bool = True,
    overwrite_a: bool = False,
    check_finite: bool = True,
    lapack_driver: str = "gesdd",
) -> Any:
    """Singular vectors by :func:`scipy.linalg.svd`, measured, and by :func:`neula.svd` if inaccurate.

    Nothing is measured of small matrices, where LAPACK's method is backward stable, without ``compute_uv``,
    and with another ``lapack_driver``.

    >>> U, s, Vh = la.svd([[0.0, 2.0], [3.0, 0.0]])
    >>> s.round(12)
    array([3., 2.])
    """
    _check_finite(a)
    (A,) = lapack_arrays(a)
    need(A.ndim >= 2 and compute_uv and lapack_driver == "gesdd" and not is_for_lapack(A))
    found = linalg.svd(a, full_matrices, check_finite=check_finite)
    accurate = are_singular_vectors(A, *found)
    return found if accurate else tuple(neula.svd(A, full_matrices=full_matrices))


@drop_in(linalg)
def sqrtm(A: Any, disp: Any = None, blocksize: Any = None) -> Any:
    """Square root as by :func:`scipy.linalg.sqrtm`, of a Hermitian positive definite matrix measured.

    Small ones are SciPy's if they are accurate, and others those of :func:`neula.sqrtm`. SciPy also answers
    for other matrices, and with more arguments.

    >>> la.sqrtm([[5.0, 4.0], [4.0, 5.0]]).round(12)
    array([[2., 1.],
           [1., 2.]])
    """
    need(disp is None and blocksize is None)
    a = _definite(A)
    if a.ndim == 2 and a.size <= 4 * SMALL:
        x = linalg.sqrtm(A)
        limit = 30 * len(a) ** 0.5 * np.finfo(a.dtype).eps / 2 * squared(x).sum()
        if x.dtype == a.dtype and squared(x @ x - a).sum() ** 0.5 <= limit:
            return x
    return _power(a, 0.5)


@drop_in(linalg)
def fractional_matrix_power(A: Any, t: float) -> Any:
    """Power of a Hermitian positive definite matrix as by :func:`scipy.linalg.fractional_matrix_power`, by
    :func:`neula.fractional_matrix_power`.

    SciPy also answers for other matrices, and if t is an integer.

    >>> la.fractional_matrix_power([[5.0, 4.0], [4.0, 5.0]], -0.5).round(6)
    array([[ 0.666667, -0.333333],
           [-0.333333,  0.666667]])
    """
    need(np.ndim(t) == 0 and t != int(t))
    a = _definite(A)
    return _power(a.astype(np.result_type(a, np.float64)), t)  # SciPy's, too, are in double precision


def _definite(A: Any) -> np.ndarray:
    """Hermitian matrices whose diagonal is positive."""
    a = np.asarray(A)
    need(a.dtype.char in "fdFD" or a.dtype.kind in "iub")
    a = a if a.dtype.kind in "fc" else a.astype(np.float64)
    need(a.ndim >= 2 and a.size > 0 and np.array_equal(a, adjoint(a)))
    need(bool((a.diagonal(0, -2, -1).real > 0).all()))
    return a


def _power(a: np.ndarray, t: float) -> np.ndarray:
    found = neula.fractional_matrix_power(a, t)
    w = found.eigenvalues
    # Not singular to rounding.
    need(bool((w[..., 0] > a.shape[-1] * np.finfo(a.dtype).eps * w[..., -1]).all()))
    power: np.ndarray = found.X
    return power


def _check_triangle(a: Any, b: Any = None, *, lower: bool = True, **others: Any) -> None:
    for x in (a, b):
        need_finite_triangle(np.asarray(x), ValueError("array must not contain infs or NaNs"), lower=lower)


def _check_finite(a: Any, overwrite_a: bool = False, check_finite: bool = True) -> None:
    if np.ndim(a) >= 2:
        need_finite(np.asarray(a), ValueError("array must not contain infs or NaNs"))


eigvalsh = are_values(linalg, "eigvalsh", __name__, _check_triangle)
svdvals = are_values(linalg, "svdvals", __name__, _check_finite)
