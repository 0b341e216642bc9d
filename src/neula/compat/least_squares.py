"""Accuracy of least squares and pseudoinverses of other libraries, and better ones of the same rank."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

import neula
from neula.certificates.orthogonality import PROBES
from neula.compat.drop_in import numbers_of, probes_of, squared
from neula.kernels import scipy_linalg
from neula.kernels.phases import adjoint

EPS = float(np.finfo(np.float64).eps)


def is_accurate_solution(a: np.ndarray, b: np.ndarray, x: np.ndarray, s: np.ndarray) -> bool:
    """Whether half of the digits, or more, of solutions of least squares of full rank are correct.

    The error is ``(A^H A)^-1 A^H (b - A x)``; its norm is at most that of the gradient, which is computed,
    and of the rounding errors of that over the square of the smallest singular value.
    The s are the singular values of A. There may be several right-hand sides.
    """
    if len(a) < a.shape[1]:  # wide matrices have other solutions: of these nothing is said
        return False
    with np.errstate(all="ignore"):  # NaN is not accepted
        residual = b - a @ x
        gradient, size, left = (np.sqrt(squared(y).sum(0)) for y in (adjoint(a) @ residual, x, residual))
        largest, smallest = (float(each) for each in (s[0], s[-1]))
        rounding = sum(a.shape) * np.finfo(x.dtype).eps * largest * (left + largest * size)
        return bool((gradient + rounding <= np.finfo(x.dtype).eps ** 0.5 * smallest**2 * size).all())


def is_accurate_minimum(a: np.ndarray, b: np.ndarray, x: np.ndarray) -> bool:
    """Whether half of the digits, or more, of the solution of a problem with ``x >= 0`` are correct.

    Let v be ``A^T (b - A x)`` where x is positive, and its positive part elsewhere. The minimum y has
    ``(x - y)^T A^T (b - A y) <= 0``, so that ``||A (x - y)||^2 <= v^T (y - x)``, and the error is at most
    ``||v||`` over the square of the smallest singular value of A. That is at least ``1 / ||R^-1||_F`` for the
    R of A. The x is not negative.
    """
    with np.errstate(all="ignore"):  # NaN is not accepted
        gram = a.T @ a
        r, dependent = scipy_linalg.lapack.dpotrf(gram)
        if dependent:
            return False
        inverse, _ = scipy_linalg.lapack.dtrtri(r, overwrite_c=1)
        square, norm = 1 / np.vdot(inverse, inverse), gram.trace() ** 0.5
        residual = b - a @ x
        gradient = residual @ a
        wrong = np.where(x > 0, gradient, np.maximum(gradient, 0.0))
        wrong, size, left = (math.sqrt(y @ y) for y in (wrong, x, residual))
        rounding = sum(a.shape) * EPS * norm
        return bool(
            2 * rounding * norm <= square
            and wrong + rounding * (left + norm * size) <= EPS**0.5 * square / 2 * size
        )


def refined_solution(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The solution of a problem of full rank by :func:`neula.lstsq`, and the squares of its residuals.

    neula's cutoff is for A with normalized columns. Full rank by another cutoff stays full rank here. There
    are no squares unless A is tall.
    """
    result = neula.lstsq(a, b, rcond=0.0)
    squares = np.square(np.atleast_1d(result.residual_norm)).astype(result.x.real.dtype)
    return result.x, squares if len(a) > a.shape[1] else squares[:0]


def is_accurate_inverse(a: Any, x: Any) -> bool:
    """Whether half of the digits, or more, of all rows of pseudoinverses by an SVD are correct.

    The SVD is that of A + E, with ``||E|| <= max(m, n) u ||A||``. Whatever counts as zero,
    ``X (A + E) X = X`` and ``(A + E) X`` is Hermitian: what :func:`is_pseudoinverse` measures is at most
    ``3 ||E|| ||X||``, and need not be measured where A is well-conditioned.
    """
    eps = numbers_of(x).eps
    with np.errstate(all="ignore"):
        # Norms of whole batches: each matrix has a smaller one. No BLAS: SciPy's threads still look for work.
        norms = _norm(a) * _norm(x)
    return 3 * max(a.shape[-2:]) * eps * norms <= eps**0.5 or is_pseudoinverse(a, x)


def _norm(x: Any) -> float:
    return float(torch.linalg.vector_norm(x) if isinstance(x, torch.Tensor) else squared(x).sum() ** 0.5)


def is_pseudoinverse(a: Any, x: Any) -> bool:
    """Whether half of the digits, or more, of all rows of pseudoinverses are measured to be correct.

    For a tall A of full rank and ``S = A X - (A X)^H``, the error ``X - A^+`` is
    ``(X A - I) A^+ + A^+ S (I - A A^+)``. Five products with random vectors estimate the norms of S and of
    ``D (X A X - X)``, where D divides rows of X by their norms. Below full rank, which the peer decides, both
    vanish if X is the pseudoinverse of the part of A that it has kept. Both are arrays, or both tensors.
    """
    if a.shape[-2] < a.shape[-1]:
        a, x = adjoint(a), adjoint(x)
    m, n = a.shape[-2:]
    vectors = probes_of(m, x).swapaxes(-1, -2)  # rows: torch multiplies columns in three times the time
    at, xt = adjoint(a), adjoint(x)
    with np.errstate(all="ignore"):  # NaN is not accepted
        norms = squared(x).sum(-1)[..., None, :] ** 0.5
        once = vectors @ xt
        image = once @ at
        twice, skew = (image @ xt - once) / norms, image - (vectors @ a) @ x
        errors = squared(twice).sum((-2, -1)) / n + squared(skew).sum((-2, -1))
        return bool((errors <= PROBES * numbers_of(x).eps).all())
