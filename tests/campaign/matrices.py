"""Matrices, right-hand sides and scalings of every kind that breaks solvers, as arrays in double precision.

Complex ones are made by the same functions from complex random numbers (:class:`ComplexRandom`), and by
:func:`turned`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Rng = np.random.Generator
Kind = Callable[[Rng, int, int], np.ndarray]


class ComplexRandom:
    """A generator whose normal numbers are complex, and whose matrices of integers are Gaussian integers."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rng, name)

    def standard_normal(self, shape: Any) -> np.ndarray:
        return (self._rng.standard_normal(shape) + 1j * self._rng.standard_normal(shape)) / 2**0.5

    def integers(self, low: Any, high: Any = None, size: Any = None) -> Any:
        found = self._rng.integers(low, high, size)
        return found + 1j * self._rng.integers(low, high, size) if isinstance(size, tuple) else found


def random_numbers(seed: int, *, is_complex: bool) -> Any:
    """A generator of real or complex numbers."""
    rng = np.random.default_rng(seed)
    return ComplexRandom(rng) if is_complex else rng


def turned(rng: Rng, a: np.ndarray, b: np.ndarray, *, hermitian: bool) -> tuple[np.ndarray, np.ndarray]:
    """A and b with rows and columns multiplied by powers of i, which keep ranks and positive definiteness, by
    arbitrary phases, or without their imaginary parts; now and then one of A and b is real.
    """
    m, n = a.shape
    rows, columns = (np.array([1, 1j, -1, -1j])[rng.integers(0, 4, size)] for size in (m, n))
    columns = rows.conj() if hermitian else columns
    way = rng.integers(0, 8)
    if way == 0:
        return a.real.copy(), b + 0j
    if way == 1:
        return a + 0j, b.real.copy()
    if way == 2:
        return a.real + 0j, b * 1j
    if way == 3 and not hermitian:
        return a.real * 1j, b
    if way == 4 and not hermitian:
        rows, columns = (np.exp(2j * np.pi * rng.random(size)) for size in (m, n))
    return rows[:, None] * a * columns, rows[:, None] * b


def adjoint(a: np.ndarray) -> np.ndarray:
    return a.T.conj() if np.iscomplexobj(a) else a.T


def exponent_of(a: np.ndarray) -> int:
    """Binary exponent of the largest number, or of the largest part of a complex one."""
    largest = max(np.abs(a.real).max(initial=0.0), np.abs(a.imag).max(initial=0.0))
    return int(np.frexp(float(largest))[1])


def ldexp(a: np.ndarray, powers: Any) -> np.ndarray:
    """``a 2^powers`` of real or complex numbers."""
    if not np.iscomplexobj(a):
        return np.ldexp(a, powers)
    found = np.empty(np.broadcast_shapes(a.shape, np.shape(powers)), np.complex128)
    found.real, found.imag = np.ldexp(a.real, powers), np.ldexp(a.imag, powers)
    return found


def normal(rng: Rng, m: int, n: int) -> np.ndarray:
    return rng.standard_normal((m, n))


def uniform(rng: Rng, m: int, n: int) -> np.ndarray:
    """Positive entries: columns point the same way."""
    return rng.random((m, n))


def integer(rng: Rng, m: int, n: int) -> np.ndarray:
    return rng.integers(-9, 10, (m, n)) * 1.0


def counting(rng: Rng, m: int, n: int) -> np.ndarray:
    """[[1, 2, 3], [4, 5, 6], [7, 8, 9]]: of rank two, though elimination may not see it."""
    return np.arange(1.0, m * n + 1).reshape(m, n)


def dependent_integer(rng: Rng, m: int, n: int) -> np.ndarray:
    """Of lower rank exactly."""
    rank = int(rng.integers(1, max(2, min(m, n))))
    return (rng.integers(-5, 6, (m, rank)) @ rng.integers(-5, 6, (rank, n))) * 1.0


def dependent(rng: Rng, m: int, n: int) -> np.ndarray:
    """Of lower rank up to rounding."""
    rank = int(rng.integers(1, max(2, min(m, n))))
    return rng.standard_normal((m, rank)) @ rng.standard_normal((rank, n))


def almost_dependent(rng: Rng, m: int, n: int) -> np.ndarray:
    """A singular matrix and a tiny perturbation."""
    return dependent(rng, m, n) + 10.0 ** rng.uniform(-17, -4) * rng.standard_normal((m, n))


def near_rank_one(rng: Rng, m: int, n: int) -> np.ndarray:
    return rng.random((m, 1)) * rng.random(n) + 10.0 ** rng.uniform(-16, -2) * rng.standard_normal((m, n))


def duplicates(rng: Rng, m: int, n: int) -> np.ndarray:
    """Equal columns, or equal rows."""
    a = rng.standard_normal((m, n))
    if rng.random() < 0.5:
        return a[:, rng.integers(0, n, n)]
    return a[rng.integers(0, m, m)]


def sparse(rng: Rng, m: int, n: int) -> np.ndarray:
    """80% zeros."""
    return np.where(rng.random((m, n)) < 0.8, 0.0, rng.standard_normal((m, n)))


def zero_lines(rng: Rng, m: int, n: int) -> np.ndarray:
    """Zero rows and zero columns."""
    a = rng.standard_normal((m, n))
    a[:, rng.random(n) < 0.25] = 0.0
    a[rng.random(m) < 0.25] = 0.0
    return a


def zero(rng: Rng, m: int, n: int) -> np.ndarray:
    return np.zeros((m, n))


def vandermonde(rng: Rng, m: int, n: int) -> np.ndarray:
    points = np.linspace(0, 1, m) if rng.random() < 0.5 else rng.uniform(-2, 2, m)
    return points[:, None] ** np.arange(n)


def hilbert(rng: Rng, m: int, n: int) -> np.ndarray:
    return 1 / (np.arange(m)[:, None] + np.arange(n) + rng.integers(1, 4))


def kahan(rng: Rng, m: int, n: int) -> np.ndarray:
    """Triangular; its smallest singular value does not show on the diagonal."""
    angle = rng.uniform(0.3, 1.4)
    top = np.triu(np.full((n, n), -np.cos(angle)), 1) + np.eye(n)
    square = np.sin(angle) ** np.arange(n)[:, None] * top
    return np.vstack([square, np.zeros((max(0, m - n), n))])[:m]


def graded(rng: Rng, m: int, n: int) -> np.ndarray:
    """Triangular, the diagonal falling or growing."""
    power = rng.uniform(-3, 3)
    return np.triu(rng.standard_normal((m, n))) * 10.0 ** (power * np.arange(n))


def orthonormal(rng: Rng, m: int, n: int) -> np.ndarray:
    q = np.linalg.qr(rng.standard_normal((max(m, n), min(m, n))))[0]
    return q if m >= n else q.T


def geometric(rng: Rng, m: int, n: int) -> np.ndarray:
    """Singular values from 1 to 1e-16, or less far, with even logarithms."""
    k = min(m, n)
    s = 10.0 ** -np.linspace(0, rng.uniform(0, 16), k)
    return orthonormal(rng, m, k) * s @ orthonormal(rng, k, n)


def one_small(rng: Rng, m: int, n: int) -> np.ndarray:
    """All singular values 1 but one."""
    k = min(m, n)
    s = np.ones(k)
    s[-1] = 10.0 ** -rng.uniform(0, 18)
    return orthonormal(rng, m, k) * s @ orthonormal(rng, k, n)


def permutation(rng: Rng, m: int, n: int) -> np.ndarray:
    return np.eye(m, n)[rng.permutation(m)]


def diagonal(rng: Rng, m: int, n: int) -> np.ndarray:
    return np.eye(m, n) * 10.0 ** rng.uniform(-8, 8, n)


def clustered_nodes(rng: Rng, m: int, n: int) -> np.ndarray:
    """Vandermonde's, its nodes close together far from zero: years, or time stamps."""
    power = min(rng.integers(0, 9), 300 // n)  # whose powers are finite
    nodes = 10.0**power + rng.integers(0, 2 * m, m)
    return nodes[:, None] ** np.arange(n)


def pascal(rng: Rng, m: int, n: int) -> np.ndarray:
    """Binomial coefficients: of determinant one, and of condition ``16^n``."""
    a = np.ones((m, n))
    for i in range(1, m):
        a[i, 1:] = a[i, 0] + np.cumsum(a[i - 1, 1:])
    return a


def frank(rng: Rng, m: int, n: int) -> np.ndarray:
    """Upper Hessenberg, its eigenvalues ill-conditioned."""
    rows, cols = np.indices((m, n))
    return np.where(cols >= rows - 1, max(m, n) - np.maximum(rows, cols), 0).astype(float)


def wilkinson(rng: Rng, m: int, n: int) -> np.ndarray:
    """Elements of LU with partial pivoting grow to ``2^(n-1)``."""
    a = np.tril(-np.ones((m, n)), -1) + np.eye(m, n)
    a[:, -1] = 1.0
    return a


def foster(rng: Rng, m: int, n: int) -> np.ndarray:
    """A Volterra equation by the trapezoidal rule: growth that comes up in practice (Foster 1994)."""
    step = rng.uniform(0.5, 2)
    a = np.tril(np.full((m, n), -step), -1) + (1 - step / 2) * np.eye(m, n)
    a[:, 0] = -step / 2
    a[0, 0], a[:, -1] = 1.0, -1.0
    return a


def lauchli(rng: Rng, m: int, n: int) -> np.ndarray:
    """A row of ones above a small multiple of the identity: the Gram matrix loses it."""
    a = 2.0 ** -float(rng.integers(5, 55)) * np.eye(m, n, -1)
    a[0] = 1.0
    return a


def arrowhead(rng: Rng, m: int, n: int) -> np.ndarray:
    a, row = np.eye(m, n) * 2.0 ** rng.integers(-30, 1, n), rng.standard_normal(n)
    a = a.astype(row.dtype)
    a[0], a[:, 0] = row, rng.standard_normal(m)
    return a


def saddle_point(rng: Rng, m: int, n: int) -> np.ndarray:
    """A block of zeros on the diagonal, rows of constraints beside it."""
    half = (min(m, n) + 1) // 2
    a = rng.standard_normal((m, n))
    a[half:, half:] = 0.0
    return a


def one_line(rng: Rng, m: int, n: int) -> np.ndarray:
    """A row or a column is ``2^40`` times as large as the others, or as small."""
    a = rng.standard_normal((m, n))
    factor = 2.0 ** rng.choice([-40.0, 40.0])
    if rng.random() < 0.5:
        a[rng.integers(m)] *= factor
    else:
        a[:, rng.integers(n)] *= factor
    return a


def one_ulp(rng: Rng, m: int, n: int) -> np.ndarray:
    """Of lower rank but for the last bit of an element."""
    a = dependent_integer(rng, m, n)
    i, j = rng.integers(m), rng.integers(n)
    a[i, j] += np.nextafter(a[i, j].real, np.inf) - a[i, j].real
    return a


def dummies(rng: Rng, m: int, n: int) -> np.ndarray:
    """A constant beside a column for each group: dependent where there are all groups."""
    a = np.eye(n)[rng.integers(0, n, m)]
    a[:, 0] = 1.0
    return a


def sums(rng: Rng, m: int, n: int) -> np.ndarray:
    """A column is the rounded sum of two others."""
    a = rng.standard_normal((m, n))
    i, j, k = rng.integers(0, n, 3)
    a[:, i] = a[:, j] + a[:, k]
    return a


def positive_definite(rng: Rng, m: int, n: int) -> np.ndarray:
    """Hermitian exactly; eigenvalues from 1 to 1e-17, or less far. Square: of order n."""
    q = orthonormal(rng, n, n)
    a = q * 10.0 ** -np.linspace(0, rng.uniform(0, 17), n) @ adjoint(q)
    return (a + adjoint(a)) / 2


def gram(rng: Rng, m: int, n: int) -> np.ndarray:
    """Covariances of few samples: positive semidefinite."""
    c = rng.standard_normal((int(rng.integers(max(1, n // 2), 2 * n + 1)), n))
    a = adjoint(c) @ c
    return (a + adjoint(a)) / 2


def integer_gram(rng: Rng, m: int, n: int) -> np.ndarray:
    c = rng.integers(-4, 5, (int(rng.integers(n, 2 * n + 1)), n))
    return (adjoint(c) @ c) * 1.0


KINDS: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        *(normal, integer, uniform, counting, dependent_integer, dependent),
        *(almost_dependent, near_rank_one, duplicates, sparse, zero_lines, zero),
        *(vandermonde, hilbert, kahan, graded, orthonormal, geometric),
        *(one_small, permutation, diagonal, clustered_nodes, pascal, frank),
        *(wilkinson, foster, lauchli, arrowhead, saddle_point, one_line),
        *(one_ulp, dummies, sums),
    )
}
DEFINITE_KINDS: dict[str, Kind] = {
    kind.__name__: kind for kind in (positive_definite, gram, integer_gram, hilbert, diagonal)
}

RHS_KINDS = ("random", "range", "nearly orthogonal", "orthogonal", "integer", "unit", "zero", "mixed")


def right_hand_side(rng: Rng, kind: str, a: np.ndarray, k: int) -> np.ndarray:
    """Make b for a matrix with elements near one."""
    m, n = a.shape
    random = rng.standard_normal((m, k))
    if kind == "range":
        return a @ rng.standard_normal((n, k))
    if kind == "integer":
        return a @ (rng.integers(-9, 10, (n, k)) * 1.0)
    if kind in ("orthogonal", "nearly orthogonal"):
        outside = random - a @ np.linalg.lstsq(a, random)[0]
        inside = a @ rng.standard_normal((n, k))
        return outside + (10.0 ** -rng.uniform(2, 14) * inside if kind == "nearly orthogonal" else 0.0)
    if kind == "unit":
        return np.eye(m, k)
    if kind == "zero":
        return np.zeros((m, k))
    if kind == "mixed":
        return random * 10.0 ** rng.choice([-200.0, -30.0, 0.0, 30.0, 200.0], k)
    return random


def line_scales(rng: Rng, count: int, power: int, *, binary: bool) -> np.ndarray:
    """Factors from ``10^-power`` to ``10^power``, of two for exact scaling."""
    exponents = (
        rng.uniform(-power, power, count) if rng.random() < 0.5 else rng.choice([-power, power], count)
    )
    if binary:
        return np.exp2(np.rint(exponents * np.log2(10)))
    return 10.0 ** np.rint(exponents)


RANGES = {"float64": (-1070, 1023), "float32": (-145, 127), "float16": (-22, 15), "int64": (0, 20)}
"""Binary exponents that the largest element may have: down to subnormal numbers, up to near overflow."""

REAL = {"complex128": "float64", "complex64": "float32"}
"""Dtypes of parts."""


def stored(a: np.ndarray, power: int, dtype: str) -> np.ndarray:
    """``10^power a`` to the nearest power of two, as far as the dtype has room, rounded to it, or to that of
    its parts if a is real.
    """
    dtype = dtype if np.iscomplexobj(a) else REAL.get(dtype, dtype)
    if not a.any():
        return np.zeros(a.shape, dtype)
    lowest, highest = RANGES[REAL.get(dtype, dtype)]
    exponent = exponent_of(a)
    wanted = exponent + round(power * np.log2(10))
    shift = int(np.clip(wanted, lowest, highest)) - exponent
    a = ldexp(a, shift)
    return np.rint(a).astype(dtype) if dtype == "int64" else a.astype(dtype)
