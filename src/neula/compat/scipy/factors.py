"""LU factors with the signatures of SciPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import linalg

import neula
from neula.compat.drop_in import drop_in, need
from neula.compat.scipy.inputs import lapack_arrays
from neula.compat.scipy.systems import AccuracyLinAlgWarning
from neula.errors import warn


class LUPair(tuple[np.ndarray, np.ndarray]):
    """``lu, piv`` as SciPy has them, which remember how they were made.

    Attributes
    ----------
    factors : LUFactors
        The same factors, with which :func:`lu_solve` refines.
    """

    factors: neula.LUFactors

    @classmethod
    def from_factors(cls, factors: neula.LUFactors) -> LUPair:
        """The pair of a square matrix."""
        lu = factors.packed.lu.numpy()
        pair = cls((lu, factors.packed.pivots.numpy().astype(np.int32)))
        pair.factors = factors
        return pair

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, and what travels between processes, are plain tuples: a is left behind."""
        return tuple, (tuple(self),)


@drop_in(linalg)
def lu_factor(a: Any, overwrite_a: bool = False, check_finite: bool = True) -> Any:
    """Pivoted LU factors as by :func:`scipy.linalg.lu_factor`, by :func:`neula.lu_factor`.

    They are as accurate as the dtype, and the pair remembers a, by reference, for :func:`lu_solve` to refine
    with, unless ``overwrite_a`` says that it will not last.

    Parameters
    ----------
    a : array_like, shape (n, n)
        Others are SciPy's to factorize, and so are singular ones.
    overwrite_a : bool, optional
        Do not keep a; it is not overwritten.
    check_finite : bool, optional
        Accepted; everything is checked.

    Returns
    -------
    lu : ndarray, shape (n, n)
    piv : ndarray of int32, shape (n,)

    Raises
    ------
    ValueError
        For NaN or Inf.

    Examples
    --------
    >>> import neula.compat.scipy as la
    >>> lu, piv = la.lu_factor([[1.0, 2.0], [2.0, 1.0]])
    >>> lu.tolist(), piv.tolist()
    ([[2.0, 1.0], [0.5, 1.5]], [1, 1])
    """
    (A,) = lapack_arrays(a)
    need(A.ndim == 2 and A.size > 0)
    compute: Any = {4: "fp32", 8: "fp64"}[A.itemsize]
    return LUPair.from_factors(neula.lu_factor(A, compute=compute, keep_a=not overwrite_a))


@drop_in(linalg)
def lu_solve(
    lu_and_piv: Any,
    b: Any,
    trans: int = 0,
    overwrite_b: bool = False,
    check_finite: bool = True,
) -> np.ndarray:
    """Solve with LU factors as by :func:`scipy.linalg.lu_solve`, refined by :func:`neula.lu_solve`.

    Parameters
    ----------
    lu_and_piv : tuple
        From :func:`lu_factor`. The pair as it was returned knows its matrix, and its solutions are refined
        and certified; with any other, and where the matrix has changed since, SciPy substitutes.
    b : array_like, shape (n,) or (n, k)
    trans : {0, 1, 2}, optional
        SciPy solves with the transpose.
    overwrite_b, check_finite : bool, optional
        Accepted; nothing is overwritten, and everything is checked.

    Returns
    -------
    ndarray, shape (n,) or (n, k)

    Raises
    ------
    ValueError
        If the shapes do not fit, and for NaN or Inf.

    Warns
    -----
    AccuracyLinAlgWarning
        If the solution is not certified; it is a ``LinAlgWarning``, too.

    Examples
    --------
    >>> import neula.compat.scipy as la
    >>> la.lu_solve(la.lu_factor([[2.0, 1.0], [1.0, 3.0]]), [4.0, 7.0]).round(12)
    array([1., 2.])
    """
    need(isinstance(lu_and_piv, LUPair) and lu_and_piv.factors.keeps_a and trans == 0)
    (B,) = lapack_arrays(b)
    need(B.ndim in (1, 2))
    measured = lu_and_piv.factors.solvers.measured
    if measured is not None and (soon := measured(B)) is not None:
        return soon
    try:
        x: np.ndarray = neula.lu_solve(lu_and_piv.factors, B, strict=True)
    except neula.AccuracyError as error:
        warn(str(error), AccuracyLinAlgWarning)
        x = error.result
    return x
