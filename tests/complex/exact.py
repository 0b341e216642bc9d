"""Exact solutions of complex least-squares problems: rational numbers, real and imaginary parts apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from flint import fmpq, fmpq_mat


def least_squares(
    a: Any,
    b: Any,
    *,
    covariance: Any = None,
    covariance_factor: Any = None,
    weights: Any = None,
    constraints: tuple[Any, Any] | None = None,
    damp: float = 0.0,
) -> np.ndarray:
    """``min (b - A x)^H V^-1 (b - A x) + damp^2 ||x||^2`` subject to ``C x = d``, rounded at the end.

    By the equations ``V y + A x = b``, ``A^H y - damp^2 x + C^H z = 0`` and ``C x = d``.
    """
    a, b = rational(a), rational(np.asarray(b)[:, None])[:, 0]
    rows, columns = a.shape
    v = np.eye(rows, dtype=int)
    if weights is not None:
        v = np.diag(rational(np.diag(weights)).diagonal() ** -2)
    if covariance is not None:
        v = rational(np.diag(covariance) if np.ndim(covariance) == 1 else covariance)
    if covariance_factor is not None:
        factor = rational(covariance_factor)
        v = factor @ factor.T
    c, d = (np.zeros((0, columns // 2)), np.zeros(0)) if constraints is None else constraints
    c, d = rational(c), rational(np.asarray(d)[:, None])[:, 0]
    damping = -(fmpq(*float(damp).as_integer_ratio()) ** 2) * np.eye(columns, dtype=int)
    corner, between = np.zeros((len(c), len(c)), int), np.zeros((rows, len(c)), int)
    whole = np.block([[v, a, between], [a.T, damping, c.T], [between.T, c, corner]])
    right = np.concatenate([b, np.zeros(columns, int), d])
    found = fmpq_mat(*whole.shape, whole.ravel().tolist()).solve(fmpq_mat(len(right), 1, right.tolist()))
    x = np.array([int(y.p) / int(y.q) for y in found.entries()[rows : rows + columns]])
    return x[: columns // 2] + 1j * x[columns // 2 :]


def rational(x: Any) -> np.ndarray:
    """``[[Re, -Im], [Im, Re]]``, of objects."""
    x = np.asarray(x, complex)
    real = np.block([[x.real, -x.imag], [x.imag, x.real]])
    return np.vectorize(lambda number: fmpq(*number.as_integer_ratio()), otypes=[object])(real)


def error_of(a: Any, x: Any, exact: np.ndarray) -> float:
    """``||D (x - x*)|| / ||D x*||``, D being the norms of the columns of A."""
    sizes = np.linalg.norm(np.asarray(a, complex), axis=0)
    sizes = sizes / sizes.max()
    scale = np.abs(sizes * exact).max()  # squares may be out of range
    difference, size = (np.linalg.norm(sizes * y / scale) for y in (np.asarray(x) - exact, exact))
    return float(difference / size)
