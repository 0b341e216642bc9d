"""Matrices with dependent columns, or rows, that are exact, and shortest solutions in rational numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from exact_solutions import exactly, product, solved

Integers = tuple[np.ndarray, np.ndarray]
"""Factors of a matrix with dependent columns, or rows, that is exact."""


def integers(rng: np.random.Generator, m: int, n: int, rank: int) -> Integers:
    """Factors of full rank, so that their product has it, too."""
    left, right = (rng.integers(-3, 4, shape).astype(float) for shape in ((m, rank), (rank, n)))
    left[:rank] += 9 * np.eye(rank)
    right[:, :rank] += 9 * np.eye(rank)
    return left, right


def shortest(factors: Integers, b: np.ndarray) -> list[Fraction]:
    """``R^T (R R^T)^-1 (L^T L)^-1 L^T b`` for ``A = L R``, exactly."""
    left, right = (exactly(x) for x in factors)
    left_t, right_t = ([list(x) for x in zip(*y, strict=True)] for y in (left, right))
    of_columns = [product(left_t, column) for column in left_t]
    of_rows = [product(right, row) for row in right]
    c = solved(of_columns, product(left_t, [Fraction(x) for x in b.tolist()]))
    return product(right_t, solved(of_rows, c))


UNITS = {"alike": 1.0, "of several sizes": 2.0**4, "of all sizes": 2.0**10}


def scaled(rng: np.random.Generator, factors: Integers, largest: float) -> Integers:
    """Columns in other units, by powers of two: still exact."""
    left, right = factors
    return left, right * np.exp2(np.floor(rng.uniform(0, np.log2(2 * largest), right.shape[1])))
