"""Cholesky factors with the signatures of SciPy."""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from scipy import linalg

import neula
from neula.certificates.cholesky import cholesky_bound
from neula.compat.determinants import LAPACKS
from neula.compat.drop_in import drop_in, has_safe_diagonal, need
from neula.compat.scipy.inputs import lapack_arrays
from neula.engines import format_of
from neula.kernels import scipy_linalg
from neula.pipeline.factors import CholeskyMethods


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


class CholeskyPair(tuple[np.ndarray, bool]):
    """``c, lower`` as SciPy has them, which remember what they are the factor of."""

    matrix: np.ndarray  # in the memory of the user; one triangle counts

    @cached_property
    def methods(self) -> CholeskyMethods:
        """Methods of the factor, with which solutions are refined."""
        c, lower = self
        factor = np.tril(c) if lower else np.triu(c)
        bound = cholesky_bound(format_of(torch.from_numpy(c).dtype), len(c))
        return CholeskyMethods(self.matrix, factor, not lower, bound)

    @cached_property
    def is_well_conditioned(self) -> bool:
        """Whether substitution leaves half of the digits: the backward error is below ``4 n (3 n + 1) u``
        (Higham, "Accuracy and Stability of Numerical Algorithms", 2002, theorem 10.4), and n u in practice.
        """
        c, lower = self
        part = abs(np.tril(self.matrix) if lower else np.triu(self.matrix))
        norm = float((part.sum(0) + part.sum(1) - part.diagonal()).max())
        estimate = getattr(scipy_linalg.lapack, f"{LAPACKS[c.dtype.char]}pocon")
        reciprocal, _ = estimate(c, norm, uplo="L" if lower else "U")
        return bool(reciprocal >= len(c) * np.finfo(c.dtype).eps ** 0.5)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, and what travels between processes, are plain tuples: a is left behind."""
        return tuple, (tuple(self),)


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
