"""Floating-point numbers as what they are, integers times powers of two, and balls around real numbers.

Complex matrices have pairs of balls (``acb_mat``), or become the real matrices of their parts:
``[[Re, -Im], [Im, Re]]`` has the singular values of the complex matrix, each of them twice, and maps parts of
vectors to parts of vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from flint import acb, acb_mat, arb, arb_mat, fmpq, fmpz_mat

Ball = arb | acb
Balls = arb_mat | acb_mat

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


def embedded(a: np.ndarray) -> np.ndarray:
    """``[[Re, -Im], [Im, Re]]`` of the last two dimensions."""
    return np.concatenate([parts(a), parts(1j * a)], -1)


def parts(x: np.ndarray) -> np.ndarray:
    """``[Re; Im]``: right-hand sides and solutions of the real problem, columns as they are."""
    return np.concatenate([x.real, x.imag], -2)


def balls(a: np.ndarray, exponent: int = 0) -> Balls:
    """``a 2^exponent`` for a matrix, or a vector as a column, without an error."""
    if np.iscomplexobj(a):
        pairs = zip(balls(a.real, exponent).tolist(), balls(a.imag, exponent).tolist(), strict=True)
        return acb_mat([[acb(*z) for z in zip(*rows, strict=True)] for rows in pairs])
    mantissas, exponents = (part.ravel().tolist() for part in dyadic(a))
    entries = [arb((i, e + exponent)) if i else arb() for i, e in zip(mantissas, exponents, strict=True)]
    rows = len(a)
    return arb_mat(rows, len(entries) // rows if rows else 0, entries)


def identity(n: int) -> arb_mat:
    return arb_mat([[arb(int(i == j)) for j in range(n)] for i in range(n)])


def columns(a: Balls) -> list[list[Ball]]:
    return a.transpose().tolist()


def adjoint(a: Balls) -> Balls:
    """The conjugate transpose."""
    return (a.conjugate() if isinstance(a, acb_mat) else a).transpose()


def real_form(a: Balls) -> arb_mat:
    """``[[Re, -Im], [Im, Re]]`` of a complex matrix; a real one itself."""
    if isinstance(a, arb_mat):
        return a
    rows = a.tolist()
    top = [[*(z.real for z in row), *(-z.imag for z in row)] for row in rows]
    return arb_mat(top + [[*(z.imag for z in row), *(z.real for z in row)] for row in rows])


def scaled_rows(a: arb_mat, factors: Iterable[arb]) -> arb_mat:
    """``diag(factors) a``."""
    return arb_mat([[f * x for x in row] for f, row in zip(factors, a.tolist(), strict=True)])


def norm(x: Iterable[Ball]) -> arb:
    """Euclidean norm of a vector, Frobenius norm of a list of entries."""
    return sum((_square(v) for v in x), arb()).nonnegative_part().sqrt()


def _square(v: Ball) -> arb:
    return v * v if isinstance(v, arb) else v.real * v.real + v.imag * v.imag


def error_in_norm(squares: Iterable[fmpq], x: Iterable[fmpq], exact: Iterable[fmpq]) -> float:
    """``||D (x - x*)|| / ||D x*||`` for the squares of D; infinite where only x* vanishes."""
    terms = list(zip(squares, x, exact, strict=True))
    wrong = sum((s * (v - y) ** 2 for s, v, y in terms), fmpq(0))
    return root_of_quotient(wrong, sum((s * y**2 for s, _, y in terms), fmpq(0)))


def root_of_quotient(a: fmpq, b: fmpq) -> float:
    if a == 0:
        return 0.0
    return math.inf if b == 0 else float((arb(a) / arb(b)).sqrt().mid())


def one_norm(a: Balls) -> arb:
    """Largest sum of magnitudes of a column."""
    return largest(sum((abs(v) for v in column), arb()) for column in columns(a))


def largest(values: Iterable[arb]) -> arb:
    found = arb()
    for value in values:
        found = found.max(value)
    return found


def rounded(a: Balls) -> np.ndarray:
    """The middles of the balls in double precision."""
    number = float if isinstance(a, arb_mat) else complex
    return np.array([[number(v) for v in row] for row in a.tolist()], dtype=number).reshape(
        a.nrows(), a.ncols()
    )
