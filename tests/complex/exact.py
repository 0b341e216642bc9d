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
    weights: Any = None,
    constraints: tuple[Any, Any] | None = None,
    damp: float = 0.0,
) -> np.ndarray:
    """``min (b - A x)^H V^-1 (b - A x) + damp^2 ||x||^2`` subject to ``C x = d``, rounded at the end.

    By the equations ``V y + A x = b``, ``A^H y - damp^2 x + C^H z = 0`` and ``C x = d``; W^-2 of weights is
    multiplied into the first ones.
    """
    a, b = np.asarray(a, complex), np.asarray(b, complex)
    (m, n), (c, d) = a.shape, (np.zeros((0, a.shape[1])), np.zeros(0)) if constraints is None else constraints
    c, d, p = np.asarray(c, complex), np.asarray(d, complex), len(c)
    v = np.eye(m) if covariance is None else np.asarray(covariance, complex)
    size = m + n + p
    whole = fmpq_mat(2 * size, 2 * size)
    put(whole, size, 0, 0, v)
    put(whole, size, 0, m, a)
    put(whole, size, m, 0, a.conj().T)
    put(whole, size, m, m + n, c.conj().T)
    put(whole, size, m + n, m, c)
    for j in range(n):
        for part in (0, size):
            whole[part + m + j, part + m + j] = -(rational(damp) ** 2)
    if weights is not None:  # W^2 A x + y = W^2 b
        for i, w in enumerate(np.asarray(weights, float)):
            square = rational(w) ** 2
            for row, parts in ((i, (a[i].real, -a[i].imag)), (size + i, (a[i].imag, a[i].real))):
                for j in range(n):
                    whole[row, m + j] = square * rational(parts[0][j])
                    whole[row, size + m + j] = square * rational(parts[1][j])
    right = fmpq_mat(2 * size, 1)
    for i, value in enumerate([*b, *np.zeros(n), *d]):
        factor = rational(weights[i]) ** 2 if weights is not None and i < m else fmpq(1)
        right[i, 0], right[size + i, 0] = factor * rational(value.real), factor * rational(value.imag)
    found = whole.solve(right)
    parts = [[found[base + m + j, 0] for j in range(n)] for base in (0, size)]
    real, imaginary = ([int(x.p) / int(x.q) for x in part] for part in parts)
    return np.array(real) + 1j * np.array(imaginary)


def put(whole: fmpq_mat, size: int, row: int, column: int, x: np.ndarray) -> None:
    """Write a complex block as real ones."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            real, imaginary = rational(x[i, j].real), rational(x[i, j].imag)
            whole[row + i, column + j] = whole[size + row + i, size + column + j] = real
            whole[row + i, size + column + j], whole[size + row + i, column + j] = -imaginary, imaginary


def rational(x: float) -> fmpq:
    return fmpq(*float(x).as_integer_ratio())


def error_of(a: Any, x: Any, exact: np.ndarray) -> float:
    """``||D (x - x*)|| / ||D x*||``, D being the norms of the columns of A."""
    sizes = np.linalg.norm(np.asarray(a, complex), axis=0)
    sizes = sizes / sizes.max()
    scale = np.abs(sizes * exact).max()  # squares may be out of range
    difference, size = (np.linalg.norm(sizes * y / scale) for y in (np.asarray(x) - exact, exact))
    return float(difference / size)
