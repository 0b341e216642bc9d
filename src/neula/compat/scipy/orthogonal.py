"""QR, ranges and least squares with the signatures of SciPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import linalg

import neula
from neula.compat.drop_in import SMALL, drop_in, is_for_library, need, need_finite, with_nonnegative_diagonal
from neula.compat.measured import is_accurate_inverse, is_accurate_solution, refined_solution
from neula.compat.scipy.systems import lapack_arrays


@drop_in(linalg)
def lstsq(
    a: Any,
    b: Any,
    cond: float | None = None,
    overwrite_a: bool = False,
    overwrite_b: bool = False,
    check_finite: bool = True,
    lapack_driver: str | None = None,
) -> tuple[Any, Any, int, Any]:
    """Least squares by :func:`scipy.linalg.lstsq`, measured, and by :func:`neula.lstsq` if it is inaccurate.

    SciPy's is returned where half of its digits, or more, are measured to be correct, below full rank, and
    with ``lapack_driver``. Everything is checked, whatever ``check_finite`` says.

    >>> x, residues, rank, s = la.lstsq([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]], [1.0, 3.0, 5.0])
    >>> x.round(12), rank, s.shape
    (array([1., 2.]), 2, (2,))
    """
    if np.ndim(a) >= 2 and not check_finite:
        need_finite(np.asarray(a), linalg.LinAlgError("SVD did not converge in Linear Least Squares"))
    need(lapack_driver is None)
    A, B = lapack_arrays(a, b)
    need(A.ndim == 2 and A.size > 0 and B.size > 0)
    found = linalg.lstsq(A, B, cond)
    x, _, rank, s = found
    if rank < len(s) or is_accurate_solution(A, B, x, s):
        return found
    x, squares = refined_solution(A, B)
    if not squares.size:  # SciPy's are of the dtype of x where there are none
        squares = squares.astype(x.dtype)
    return x, squares[0] if B.ndim == 1 and squares.size else squares, rank, s


@drop_in(linalg)
def qr(
    a: Any,
    overwrite_a: bool = False,
    lwork: int | None = None,
    mode: str = "full",
    pivoting: bool = False,
    check_finite: bool = True,
) -> Any:
    """QR factorization as by :func:`scipy.linalg.qr`, by :func:`neula.qr`: the diagonal of R is nonnegative.

    With ``pivoting``, and with ``mode="raw"``, it is SciPy's own. Everything is checked, whatever
    ``check_finite`` says.

    >>> Q, R = la.qr([[3.0], [4.0]])
    >>> Q.shape, R.round(12).tolist()
    ((2, 2), [[5.0], [0.0]])
    """
    need(mode in ("full", "qr", "r", "economic") and not pivoting)
    (A,) = lapack_arrays(a)
    need(A.size > 0 and bool(np.isfinite(A).all()))
    if mode != "r" and is_for_library(A):
        return with_nonnegative_diagonal(*linalg.qr(A, mode=mode, check_finite=False))
    if mode == "economic":
        return tuple(neula.qr(A))
    if mode == "r":
        R = neula.qr(A, mode="r").R
        below = np.zeros((*A.shape[:-2], A.shape[-2] - R.shape[-2], A.shape[-1]), A.dtype)
        R = np.concatenate([R, below], -2)
        return (R,) if A.ndim == 2 else R
    return tuple(neula.qr(A, "complete"))


@drop_in(linalg)
def orth(A: Any, rcond: float | None = None) -> np.ndarray:
    """Orthonormal basis of the range as by :func:`scipy.linalg.orth`, by :func:`neula.orth`.

    Small matrices are SciPy's. Of larger ones of full rank it is the Q of a QR factorization, not singular
    vectors.

    >>> la.orth([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]]).shape
    (3, 1)
    """
    (a,) = lapack_arrays(A)
    need(bool(np.isfinite(a).all()) and 0 not in a.shape[:-2])
    if a.ndim == 2 and a.size <= SMALL:
        return linalg.orth(a, rcond)
    cut = np.finfo(a.dtype).eps * max(a.shape[-2:]) if rcond is None else rcond
    basis: np.ndarray = neula.orth(a, rcond=cut)
    return basis


@drop_in(linalg)
def pinv(
    a: Any,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    return_rank: bool = False,
    check_finite: bool = True,
) -> Any:
    """Pseudoinverse by :func:`scipy.linalg.pinv`, measured, and by :func:`neula.pinv` if it is inaccurate.

    SciPy's is returned where half of its digits, or more, are measured to be correct, and below full rank.
    Everything is checked, whatever ``check_finite`` says.

    >>> B, rank = la.pinv([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]], return_rank=True)
    >>> B.round(12).tolist(), int(rank)
    ([[1.0, 0.0, 0.0], [0.0, 0.5, 0.0]], 2)
    """
    if np.ndim(a) >= 2:
        need_finite(np.asarray(a), ValueError("array must not contain infs or NaNs"))
    (A,) = lapack_arrays(a)
    need(A.ndim == 2 and A.size > 0 and min(atol or 0.0, rtol or 0.0) >= 0)
    found, rank = linalg.pinv(A, atol=atol, rtol=rtol, return_rank=True, check_finite=False)
    if not is_accurate_inverse(A, found) and rank == min(A.shape):
        found = neula.pinv(A, 0.0)
    return (found, rank) if return_rank else found
