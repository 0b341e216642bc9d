"""``numpy.linalg``, with the answers of neula: ``import neula.compat.numpy as la``.

All other names are NumPy's.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import numpy as np
from numpy import linalg

import neula
from neula.compat.drop_in import (
    drop_in,
    has_safe_diagonal,
    is_for_library,
    names_of,
    need,
    need_finite,
    right_hand_sides,
    with_nonnegative_diagonal,
)
from neula.compat.measured import (
    UNSURE,
    Determinants,
    are_eigenvectors,
    are_singular_vectors,
    are_values,
    is_accurate_inverse,
    is_accurate_solution,
    is_for_lapack,
    measured_determinants,
    measured_inverse,
    mirrored,
    need_finite_triangle,
    refined_solution,
)
from neula.problems.signatures import QRMode

LinAlgError = linalg.LinAlgError

_QRResult = type(linalg.qr(np.eye(1)))
"""The named tuple, whose module has moved from one version of NumPy to the next."""

_SlogdetResult = type(linalg.slogdet(np.eye(1)))

_EighResult, _SVDResult = type(linalg.eigh(np.eye(1))), type(linalg.svd(np.eye(1)))


@drop_in(linalg)
def solve(a: Any, b: Any) -> Any:
    """Solve ``a x = b`` as :func:`numpy.linalg.solve` does, by :func:`neula.solve`.

    A warning says if no digit is guaranteed, where NumPy says nothing.

    >>> la.solve(np.array([[2.0, 1.0], [1.0, 3.0]]), np.array([4.0, 7.0])).round(12)
    array([1., 2.])
    """
    A, B = _numbers(a), _numbers(b)
    need(B.size > 0)  # else nothing is solved, and NumPy looks at A
    return _as(b, neula.solve(A, right_hand_sides(A, B)).x)


@drop_in(linalg)
def lstsq(a: Any, b: Any, rcond: float | None = None) -> tuple[Any, Any, Any, Any]:
    """Least squares by :func:`numpy.linalg.lstsq`, measured, and by :func:`neula.lstsq` if it is inaccurate.

    NumPy's is returned where half of its digits, or more, are measured to be correct, and below full rank.

    >>> A = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    >>> x, residuals, rank, s = la.lstsq(A, np.array([1.0, 3.0, 5.0]))
    >>> x.round(12), int(rank), s.shape
    (array([1., 2.]), 2, (2,))
    """
    A, B = np.asarray(a), np.asarray(b)
    fits = A.ndim == 2 and B.ndim in (1, 2) and len(A) == len(B)
    if fits and 2 not in (A.dtype.itemsize, B.dtype.itemsize):  # NumPy takes no half precision
        need_finite(A, LinAlgError("SVD did not converge in Linear Least Squares"))
    A, B = _numbers(A), _numbers(B)
    need(A.size > 0 and B.size > 0)
    found = linalg.lstsq(a, b, rcond)
    x, _, rank, s = found
    if rank < len(s) or is_accurate_solution(A, B, np.asarray(x), s):
        return found
    x, squares = refined_solution(A, B)
    return _as(b, x), _as(b, squares), rank, s


@drop_in(linalg)
def qr(a: Any, mode: str = "reduced") -> Any:
    """QR factorization as by :func:`numpy.linalg.qr`, by :func:`neula.qr`: the diagonal of R is nonnegative.

    >>> A = np.array([[3.0, 1.0], [4.0, 2.0]])
    >>> Q, R = la.qr(A)
    >>> bool(np.allclose(Q @ R, A))
    True
    """
    A = _numbers(a)
    # NumPy computes in double precision, whatever the dtype, and so is more accurate than single precision.
    work = _in_double(A)
    if mode in ("reduced", "complete") and is_for_library(work):
        Q, R = with_nonnegative_diagonal(*linalg.qr(work, cast(QRMode, mode)))
    else:
        result = neula.qr(work, mode=cast(QRMode, mode))
        if mode == "raw":
            h, tau = result
            return _as(a, _rounded(h.swapaxes(-2, -1), A)), _rounded(tau, A)
        Q, R = result.Q, result.R
    R = _as(a, _rounded(R, A))
    return R if mode == "r" else _QRResult(_as(a, _rounded(Q, A)), R)


@drop_in(linalg)
def cholesky(a: Any, /, *, upper: bool = False) -> Any:
    """Cholesky factor by :func:`numpy.linalg.cholesky`, and by :func:`neula.cholesky` if A is badly scaled.

    >>> la.cholesky(np.array([[4.0, 2.0], [2.0, 5.0]]))
    array([[2., 0.],
           [1., 2.]])
    """
    A = _numbers(a)
    work = _in_double(A)
    need(not has_safe_diagonal(work))
    return _as(a, _rounded(neula.cholesky(work, upper=upper).factor, A))


@drop_in(linalg, UNSURE)
def slogdet(a: Any) -> Any:
    """Sign and logarithm of determinants as by :func:`numpy.linalg.slogdet`, with a measured error.

    >>> sign, logabsdet = la.slogdet(np.array([[1.0, 2.0], [3.0, 4.0]]))
    >>> float(sign), float(round(logabsdet, 6))
    (-1.0, 0.693147)
    """
    found = _determinants(a)
    return _SlogdetResult(found.sign, found.logabsdet)


@drop_in(linalg, UNSURE)
def det(a: Any) -> Any:
    """Determinants as by :func:`numpy.linalg.det`, with a measured error.

    >>> float(la.det(np.array([[1.0, 2.0], [3.0, 4.0]])).round(12))
    -2.0
    """
    return _determinants(a).product


@drop_in(linalg)
def inv(a: Any) -> Any:
    """Inverse by :func:`numpy.linalg.inv`, measured, and by :func:`neula.solve` if it is inaccurate.

    It is returned as it is where half of its digits, or more, are measured to be correct.

    >>> la.inv(np.array([[2.0, 0.0], [0.0, 4.0]]))
    array([[0.5 , 0.  ],
           [0.  , 0.25]])
    """
    A = _numbers(a)
    found = linalg.inv(a)
    better = measured_inverse(A, np.asarray(found))
    return found if better is found else _as(a, better)


@drop_in(linalg)
def pinv(a: Any, rcond: Any = None, hermitian: bool = False, *, rtol: Any = np._NoValue) -> Any:
    """Pseudoinverse by :func:`numpy.linalg.pinv`, measured, and by :func:`neula.pinv` if it is inaccurate.

    NumPy's is returned where half of its digits, or more, are measured to be correct, and below full rank.

    >>> la.pinv(np.array([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])).round(12)
    array([[1. , 0. , 0. ],
           [0. , 0.5, 0. ]])
    """
    need(rcond is None or rtol is np._NoValue)
    A = np.asarray(a)
    if A.dtype.itemsize != 2:
        _check_finite(A, hermitian)
    A = _numbers(A)
    need(A.ndim >= 2 and A.size > 0 and (not hermitian or A.shape[-1] == A.shape[-2]))
    given = {} if rtol is np._NoValue else {"rtol": rtol}
    found = linalg.pinv(a, rcond, hermitian, **given)
    if hermitian:
        A = mirrored(A)
    if is_accurate_inverse(A, np.asarray(found)):
        return found
    s = linalg.svd(A, compute_uv=False)
    if rcond is None and rtol is None:
        rcond = max(A.shape[-2:]) * np.finfo(s.dtype).eps
    elif rcond is None:
        rcond = 1e-15 if rtol is np._NoValue else rtol
    if not (s[..., -1] > np.asarray(rcond) * s[..., 0]).all():
        return found
    return _as(a, neula.pinv(A, 0.0))


@drop_in(linalg)
def eigh(a: Any, UPLO: str = "L") -> Any:
    """Eigenvectors by :func:`numpy.linalg.eigh`, measured, and by :func:`neula.eigh` if they are inaccurate.

    Of small matrices nothing is measured: LAPACK's methods are backward stable.

    >>> w, V = la.eigh(np.array([[2.0, 1.0], [1.0, 2.0]]))
    >>> w.round(12)
    array([1., 3.])
    """
    _check_triangle(a, UPLO)
    A = _numbers(a)
    need(A.ndim >= 2 and not is_for_lapack(A))
    found = linalg.eigh(a, cast(Literal["L", "U"], UPLO))
    upper = UPLO.upper() == "U"
    if are_eigenvectors(mirrored(A, upper=upper), *map(np.asarray, found)):
        return found
    w, v = neula.eigh(A, upper=upper)
    return _EighResult(w, _as(a, v))


@drop_in(linalg)
def svd(a: Any, full_matrices: bool = True, compute_uv: bool = True, hermitian: bool = False) -> Any:
    """Singular vectors by :func:`numpy.linalg.svd`, measured, and by :func:`neula.svd` if inaccurate.

    As for :func:`eigh`, nothing is measured of small matrices, and without vectors.

    >>> U, s, Vh = la.svd(np.array([[0.0, 2.0], [3.0, 0.0]]))
    >>> s.round(12)
    array([3., 2.])
    """
    _check_finite(a, hermitian)
    A = _numbers(a)
    need(A.ndim >= 2 and compute_uv and not is_for_lapack(A))
    found = linalg.svd(a, full_matrices, hermitian=hermitian)
    if hermitian:
        A = mirrored(A)
    if are_singular_vectors(A, *map(np.asarray, found)):
        return found
    u, s, vh = neula.svd(A, full_matrices=full_matrices)
    return _SVDResult(_as(a, u), s, _as(a, vh))


def _check_finite(a: Any, hermitian: bool = False) -> None:
    """Refuse what singular values are not computed of; of Hermitian matrices the lower triangle is read."""
    if hermitian:
        _check_triangle(a)
    elif np.ndim(a) >= 2:
        need_finite(np.asarray(a), LinAlgError("SVD did not converge"))


def _check_triangle(a: Any, UPLO: str = "L") -> None:
    need_finite_triangle(
        np.asarray(a), LinAlgError("Eigenvalues did not converge"), lower=UPLO.upper() == "L"
    )


def _check_norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> None:
    is_matrix = np.ndim(x) == 2 if axis is None else np.size(axis) == 2
    if is_matrix and isinstance(ord, int | float | str) and ord in (2, -2, "nuc"):
        _check_finite(x)


eigvalsh = are_values(linalg, "eigvalsh", __name__, _check_triangle)
matrix_rank = are_values(
    linalg, "matrix_rank", __name__, lambda A, tol=None, hermitian=False, **_: _check_finite(A, hermitian)
)
cond = are_values(linalg, "cond", __name__, lambda x, p=2: _check_norm(x, 2 if p is None else p, (-2, -1)))
norm = are_values(linalg, "norm", __name__, _check_norm)
if hasattr(linalg, "svdvals"):  # since NumPy 2
    svdvals = are_values(linalg, "svdvals", __name__, _check_finite)


def _determinants(a: Any) -> Determinants:
    work = np.ascontiguousarray(_numbers(a))
    return measured_determinants(work if work.dtype.kind in "fc" else work.astype(np.float64))


def _numbers(x: Any) -> np.ndarray:
    """Accept the arrays that both NumPy and neula take: numbers in single or double precision."""
    array = np.asarray(x)
    need(array.dtype.kind in "iub" or array.dtype.char in "fdFD")
    return array


def _rounded(answer: np.ndarray, given: np.ndarray) -> np.ndarray:
    """An answer in the precision of what was given."""
    return answer.astype(given.dtype.type if given.dtype.kind in "fc" else np.float64, copy=False)


def _in_double(a: np.ndarray) -> np.ndarray:
    return a.astype(np.complex128 if a.dtype.kind == "c" else np.float64, copy=False)


def _as(given: Any, answer: np.ndarray) -> Any:
    """An answer as an array of the class that was given: that of a matrix is a matrix."""
    wrap = getattr(given, "__array_wrap__", None)
    return answer if wrap is None or type(given) is np.ndarray else wrap(answer)


__dir__, __getattr__ = names_of(linalg, globals())
