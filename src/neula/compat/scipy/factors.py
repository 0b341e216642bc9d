"""LU and Cholesky factors with the signatures of SciPy."""

from __future__ import annotations

import cmath
from contextlib import suppress
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from scipy import linalg

import neula
from neula.algorithms.krylov.iterative_refinement import direction
from neula.certificates.cholesky import cholesky_bound
from neula.compat.drop_in import drop_in, has_safe_diagonal, need, squared, torch_dtype
from neula.compat.measured import LAPACKS
from neula.compat.scipy.systems import UNCERTIFIED_SOLUTION, AccuracyLinAlgWarning, lapack_arrays
from neula.engines import format_of
from neula.errors import warn
from neula.kernels import scipy_linalg
from neula.kernels.magnitudes import MODERATE
from neula.pipeline.factors import CholeskyMethods
from neula.problems.systems.lu import factors_of
from neula.problems.systems.ways import suits


class _Pair(tuple[np.ndarray, Any]):
    """Factors as SciPy has them, which remember their matrix, except in copies and in other processes."""

    matrix: np.ndarray  # in the memory of the user

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


class LUPair(_Pair):
    """``lu, piv`` as SciPy has them, with their matrix."""

    image: np.ndarray  # its product with a fixed vector, which tells whether it still is the same
    was_used: bool = False  # whether it has solved a system

    @cached_property
    def factors(self) -> neula.LUFactors | None:
        """The factors with which neula refines solutions; None if they are singular or overflow."""
        if not (self[0].diagonal().all() and cmath.isfinite(self[0].sum())):
            return None
        return factors_of(self.matrix, *self, self.image)


@drop_in(linalg, warns="")
def lu_factor(a: Any, overwrite_a: bool = False, check_finite: bool = True) -> Any:
    """Pivoted LU factors by :func:`scipy.linalg.lu_factor`, for :func:`lu_solve` to refine with.

    The pair remembers a, by reference, unless ``overwrite_a`` says that it will not last, or its numbers are
    far from 1.

    >>> lu, piv = la.lu_factor([[1.0, 2.0], [2.0, 1.0]])
    >>> lu.tolist(), piv.tolist()
    ([[2.0, 1.0], [0.5, 1.5]], [1, 1])
    """
    (A,) = lapack_arrays(a)
    need(A.ndim == 2 and 0 < len(A) == A.shape[1] and not overwrite_a)
    found = linalg.lu_factor(A, check_finite=check_finite)
    if not 1 / MODERATE < float(squared(A).sum()) ** 0.5 < MODERATE:
        return found
    pair = LUPair(found)
    pair.matrix, pair.image = A, _image_of(A)
    return pair


def _image_of(A: np.ndarray) -> np.ndarray:
    """A times a fixed vector, by SciPy's BLAS: the threads of NumPy's would wait for those, which still look
    for work.
    """
    vector = direction(len(A), torch.device("cpu")).numpy()
    (multiply,) = linalg.get_blas_funcs(["gemv"], [A, vector])
    image: np.ndarray = multiply(1.0, A.T, vector[:, 0], trans=1)[:, None]
    return image


def _solved_once(pair: LUPair, B: np.ndarray) -> np.ndarray | None:
    """The first solution with a pair, where a whole solution by the core takes less than the evidence about
    its factors; None elsewhere.
    """
    if pair.was_used or not suits(len(B), B.size // len(B), map(torch_dtype, (pair.matrix, B))):
        return None
    pair.was_used = True
    if not np.array_equal(_image_of(pair.matrix), pair.image):
        return None
    with suppress(neula.AccuracyError, np.linalg.LinAlgError):
        x: np.ndarray = neula.solve(pair.matrix, B, strict=True).x
        return x
    return None


@drop_in(linalg, UNCERTIFIED_SOLUTION)
def lu_solve(
    lu_and_piv: Any, b: Any, trans: int = 0, overwrite_b: bool = False, check_finite: bool = True
) -> np.ndarray:
    """Solve with LU factors as by :func:`scipy.linalg.lu_solve`, refined by :func:`neula.lu_solve`.

    The pair as :func:`lu_factor` returned it knows its matrix, and its solutions are refined and certified.
    With any other, with ``trans``, and where the matrix has changed since, SciPy substitutes. Everything is
    checked, whatever ``check_finite`` says.

    >>> la.lu_solve(la.lu_factor([[2.0, 1.0], [1.0, 3.0]]), [4.0, 7.0]).round(12)
    array([1., 2.])
    """
    need(isinstance(lu_and_piv, LUPair) and trans == 0)
    (B,) = lapack_arrays(b)
    need(B.ndim in (1, 2) and len(B) == len(lu_and_piv[0]))
    if (once := _solved_once(lu_and_piv, B)) is not None:
        return once
    factors = lu_and_piv.factors
    need(factors is not None)
    measured = factors._solvers.measured
    if measured is not None and (soon := measured(B)) is not None:
        return soon
    try:
        x: np.ndarray = neula.lu_solve(factors, B, strict=True)
    except neula.AccuracyError as error:
        warn(str(error), AccuracyLinAlgWarning)
        x = error.result
    return x


@drop_in(linalg)
def cholesky(a: Any, lower: bool = False, overwrite_a: bool = False, check_finite: bool = True) -> np.ndarray:
    """Cholesky factor by :func:`scipy.linalg.cholesky`, and by :func:`neula.cholesky` if A is badly scaled.

    >>> la.cholesky([[4.0, 2.0], [2.0, 5.0]])
    array([[2., 1.],
           [0., 2.]])
    """
    return _factor(a, lower=lower)


@drop_in(linalg)
def cho_factor(
    a: Any, lower: bool = False, overwrite_a: bool = False, check_finite: bool = True
) -> tuple[np.ndarray, bool | np.ndarray]:
    """Cholesky factor as by :func:`cholesky`, for :func:`cho_solve` to refine with.

    The pair remembers a, by reference, unless ``overwrite_a`` says that it will not last.

    >>> la.cho_solve(la.cho_factor([[4.0, 2.0], [2.0, 5.0]]), [8.0, 12.0]).round(12)
    array([1., 2.])
    """
    (A,) = lapack_arrays(a)
    need(A.size > 0)
    if has_safe_diagonal(A):
        found = linalg.cho_factor(a, lower, check_finite=check_finite)
    else:
        factor = _factor(a, lower=lower)
        found = factor, lower if factor.ndim == 2 else np.full(factor.shape[:-2], lower)
    if overwrite_a or A.ndim != 2:
        return found
    pair = CholeskyPair(found)
    pair.matrix = A
    return pair


class CholeskyPair(_Pair):
    """``c, lower`` as SciPy has them, with their matrix, one triangle of which counts."""

    @cached_property
    def methods(self) -> CholeskyMethods:
        c, lower = self
        factor = np.tril(c) if lower else np.triu(c)
        bound = cholesky_bound(format_of(torch.from_numpy(c).dtype), len(c))
        return CholeskyMethods(self.matrix, factor, not lower, bound)

    @cached_property
    def is_well_conditioned(self) -> bool:
        """Whether substitution leaves half of the digits: the backward error is below ``4 n (3 n + 1) u``
        (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, theorem 10.4), and n u in practice.
        The 1-norm of a positive definite A is bounded from its diagonal: ``|a_ij| <= sqrt(a_ii a_jj)``.
        """
        c, lower = self
        roots = np.sqrt(self.matrix.diagonal().real)
        norm = float(roots.max() * roots.sum())
        estimate = getattr(scipy_linalg.lapack, f"{LAPACKS[c.dtype.char]}pocon")
        reciprocal, _ = estimate(c, norm, uplo="L" if lower else "U")
        return bool(reciprocal >= len(c) * np.finfo(c.dtype).eps ** 0.5)


@drop_in(linalg)
def cho_solve(
    c_and_lower: tuple[Any, bool], b: Any, overwrite_b: bool = False, check_finite: bool = True
) -> np.ndarray:
    """Solve with a Cholesky factor by :func:`scipy.linalg.cho_solve`, refined if A is ill-conditioned.

    The pair as :func:`cho_factor` returned it knows its matrix. Where its condition number leaves
    substitution fewer than half of the digits, solutions are refined as by :meth:`CholeskyResult.solve
    <neula.CholeskyResult.solve>`. With any other pair SciPy substitutes.

    >>> la.cho_solve(la.cho_factor([[4.0, 2.0], [2.0, 5.0]]), [8.0, 12.0]).round(12)
    array([1., 2.])
    """
    need(isinstance(c_and_lower, CholeskyPair))
    pair = cast(CholeskyPair, c_and_lower)
    (B,) = lapack_arrays(b)
    need(B.ndim in (1, 2) and B.size > 0)
    need(not pair.is_well_conditioned)
    found: np.ndarray = pair.methods.solve(B).x
    return found


def _factor(a: Any, *, lower: bool) -> np.ndarray:
    (A,) = lapack_arrays(a)
    need(A.size > 0 and not has_safe_diagonal(A) and bool(np.isfinite(A).all()))
    factor: np.ndarray = neula.cholesky(A, upper=not lower).factor
    return factor
