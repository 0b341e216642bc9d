"""Floating-point numbers as what they are, integers times powers of two, and balls around real numbers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from flint import arb, arb_mat, fmpz_mat

Dyadic = tuple[np.ndarray, np.ndarray]
"""Integers and the exponents of two that they are multiplied by, as arrays of Python's integers."""


def dyadic(a: np.ndarray) -> Dyadic:
    """Every element of a finite array as an integer times a power of two."""
    fraction, exponent = np.frexp(np.asarray(a, dtype=np.float64))
    return np.ldexp(fraction, 53).astype(np.int64).astype(object), exponent.astype(object) - 53


def times(x: Dyadic, y: Dyadic) -> Dyadic:
    """Elementwise product, broadcast as by NumPy."""
    return x[0] * y[0], x[1] + y[1]


def stacked(x: Dyadic, y: Dyadic) -> Dyadic:
    """Rows of y below those of x."""
    return np.concatenate([x[0], y[0]]), np.concatenate([x[1], y[1]])


def integers(x: Dyadic) -> tuple[fmpz_mat, int]:
    """The matrix as one of integers, and the exponent of two that all of it is multiplied by."""
    mantissas, exponents = (part.ravel().tolist() for part in x)
    lowest = min((e for i, e in zip(mantissas, exponents, strict=True) if i), default=0)
    shifted = [i << (e - lowest) if i else 0 for i, e in zip(mantissas, exponents, strict=True)]
    return fmpz_mat(*x[0].shape, shifted), lowest


def balls(a: np.ndarray, exponent: int = 0) -> arb_mat:
    """``a 2^exponent`` for a matrix, or a vector as a column, without an error."""
    mantissas, exponents = (part.ravel().tolist() for part in dyadic(a))
    entries = [arb((i, e + exponent)) if i else arb() for i, e in zip(mantissas, exponents, strict=True)]
    rows = len(a)
    return arb_mat(rows, len(entries) // rows if rows else 0, entries)


def identity(n: int) -> arb_mat:
    return arb_mat([[arb(int(i == j)) for j in range(n)] for i in range(n)])


def columns(a: arb_mat) -> list[list[arb]]:
    return a.transpose().tolist()


def scaled_rows(a: arb_mat, factors: Iterable[arb]) -> arb_mat:
    """``diag(factors) a``."""
    return arb_mat([[f * x for x in row] for f, row in zip(factors, a.tolist(), strict=True)])


def norm(x: Iterable[arb]) -> arb:
    """Euclidean norm of a vector, Frobenius norm of a list of entries."""
    return sum((v * v for v in x), arb()).nonnegative_part().sqrt()


def one_norm(a: arb_mat) -> arb:
    """Largest sum of magnitudes of a column."""
    return largest(sum((abs(v) for v in column), arb()) for column in columns(a))


def max_norm(a: arb_mat) -> arb:
    """Largest magnitude of an element."""
    return largest(abs(v) for v in a.entries())


def largest(values: Iterable[arb]) -> arb:
    found = arb()
    for value in values:
        found = found.max(value)
    return found


def rounded(a: arb_mat) -> np.ndarray:
    """The middles of the balls in float64."""
    return np.array([[float(v) for v in row] for row in a.tolist()], dtype=np.float64).reshape(
        a.nrows(), a.ncols()
    )
