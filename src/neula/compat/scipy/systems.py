"""Linear systems with the signature of SciPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import linalg
from scipy.linalg.blas import find_best_blas_type

import neula
from neula.compat.drop_in import Unsuited, drop_in, need, right_hand_sides
from neula.compat.measured import UNSURE, measured_determinants, measured_inverse, mirrored
from neula.errors import warn
from neula.kernels.phases import adjoint
from neula.pipeline.plans import DTYPES
from neula.problems.signatures import Structure


def solved_in(dtype: np.dtype) -> type:
    """The dtype in which SciPy's ``solve`` computes."""
    need(_is_lapacks(dtype))
    if dtype.kind == "c":
        return np.complex64 if dtype.itemsize <= 8 else np.complex128
    return np.float32 if dtype.kind == "f" and dtype.itemsize <= 4 else np.float64


def _is_lapacks(dtype: np.dtype) -> bool:
    return dtype.kind in "iub" or dtype.char in "efdFD"


def lapack_arrays(*given: Any) -> list[np.ndarray]:
    """Arrays in what LAPACK would compute in."""
    arrays = [np.asarray(x) for x in given]
    dtypes = {x.dtype for x in arrays}
    if len(dtypes) == 1 and dtypes <= DTYPES:
        return arrays
    need(all(_is_lapacks(x.dtype) for x in arrays))
    dtype = find_best_blas_type(arrays)[1]
    return [x.astype(dtype, copy=False) for x in arrays]


GENERAL = ("gen", "general", "sym", "symmetric", "her", "hermitian")
POSITIVE = ("pos", "positive definite")


class AccuracyLinAlgWarning(neula.AccuracyWarning, linalg.LinAlgWarning):
    """The solution is not certified to the accuracy of its dtype; caught as SciPy's warning, too."""


UNCERTIFIED_SOLUTION = """AccuracyLinAlgWarning
    If the solution is not certified, including if no digit of it is guaranteed; it is a ``LinAlgWarning``,
    too. A matrix that is badly scaled and nothing else is solved to full accuracy, and without it.
    """


@drop_in(linalg, UNCERTIFIED_SOLUTION)
def solve(
    a: Any,
    b: Any,
    lower: bool = False,
    overwrite_a: bool = False,
    overwrite_b: bool = False,
    check_finite: bool = True,
    assume_a: str | None = None,
    transposed: bool = False,
) -> np.ndarray:
    """Solve ``a x = b`` as :func:`scipy.linalg.solve` does, by :func:`neula.solve`.

    Triangular, banded and diagonal matrices are left to SciPy, also those that it would find by itself.
    Everything is checked, whatever ``check_finite`` says.

    >>> la.solve([[2.0, 1.0], [1.0, 3.0]], [4.0, 7.0]).round(12)
    array([1., 2.])
    """
    need(not isinstance(a, np.ma.MaskedArray) and not isinstance(b, np.ma.MaskedArray))
    A, B = np.asarray(a), np.asarray(b)
    dtype = solved_in(np.result_type(A, B))
    A, B = A.astype(dtype, copy=False), B.astype(dtype, copy=False)
    need(A.ndim >= 2 and A.size > 1 and B.size > 0 and A.shape[-1] == A.shape[-2])
    need(not (transposed and A.dtype.kind == "c"))  # which SciPy refuses
    if transposed:
        A, lower = A.swapaxes(-1, -2), not lower
    if assume_a is None:
        structures = _structures(A)
    else:
        need(assume_a in GENERAL + POSITIVE)
        structures = ("pos",) if assume_a in POSITIVE else ("gen",)
        if assume_a not in GENERAL[:2]:
            A = mirrored(A, upper=not lower, hermitian=not assume_a.startswith("sym"))
    return _first(A, right_hand_sides(A, B), structures)


@drop_in(linalg, UNSURE)
def det(a: Any, overwrite_a: bool = False, check_finite: bool = True) -> Any:
    """Determinants as by :func:`scipy.linalg.det`, with a measured error.

    >>> float(la.det([[1.0, 2.0], [3.0, 4.0]]).round(12))
    -2.0
    """
    (A,) = lapack_arrays(a)
    work = np.ascontiguousarray(A, dtype=np.result_type(A, np.float64))
    return measured_determinants(work).product


@drop_in(linalg)
def inv(
    a: Any,
    overwrite_a: bool = False,
    check_finite: bool = True,
    *,
    assume_a: str | None = None,
    lower: bool = False,
) -> np.ndarray:
    """Inverse by :func:`scipy.linalg.inv`, measured, and by :func:`neula.solve` if it is inaccurate.

    It is returned as it is where half of its digits, or more, are measured to be correct.

    >>> la.inv([[2.0, 0.0], [0.0, 4.0]])
    array([[0.5 , 0.  ],
           [0.  , 0.25]])
    """
    need(assume_a is None and not overwrite_a)
    (A,) = lapack_arrays(a)
    inverse: np.ndarray = measured_inverse(A, linalg.inv(A, check_finite=check_finite))
    return inverse


def _structures(a: np.ndarray) -> tuple[Structure, ...]:
    """Structures that SciPy would try, likeliest first.

    Raises
    ------
    Unsuited
        If one has zeros in a corner, and so may be triangular or banded.
    """
    corners = a[..., 0, -1], a[..., -1, 0]
    need(all(bool(np.all(corner)) for corner in corners))
    if not np.array_equal(corners[0], corners[1].conj()) or not np.array_equal(a, adjoint(a)):
        return ("gen",)
    positive = bool((np.diagonal(a, axis1=-2, axis2=-1).real > 0).all())
    return ("pos", "gen") if positive else ("gen",)


def _first(a: np.ndarray, b: np.ndarray, structures: tuple[Structure, ...]) -> np.ndarray:
    """The solution with the first structure that a matrix turns out to have."""
    for structure in structures:
        try:
            x: np.ndarray = neula.solve(a, b, assume_a=structure, strict=True).x
        except neula.AccuracyError as error:
            warn(str(error), AccuracyLinAlgWarning)
            x = error.result.x
        except np.linalg.LinAlgError:
            continue
        return x
    raise Unsuited
