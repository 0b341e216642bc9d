"""Exact solutions of small problems, in rational numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np


def exactly(a: np.ndarray) -> list[list[Fraction]]:
    return [[Fraction(x) for x in row] for row in a.tolist()]


def product(a: list[list[Fraction]], x: list[Fraction]) -> list[Fraction]:
    return [sum((p * q for p, q in zip(row, x, strict=True)), Fraction(0)) for row in a]


def solved(a: list[list[Fraction]], b: list[Fraction]) -> list[Fraction]:
    """By Gaussian elimination."""
    rows, n = [[*row, right] for row, right in zip(a, b, strict=True)], len(a)
    for k in range(n):
        pivot = next(i for i in range(k, n) if rows[i][k])
        rows[k], rows[pivot] = rows[pivot], rows[k]
        rows[k] = [x / rows[k][k] for x in rows[k]]
        for i in range(n):
            if i != k:
                rows[i] = [x - rows[i][k] * y for x, y in zip(rows[i], rows[k], strict=True)]
    return [row[-1] for row in rows]


def least_squares(a: np.ndarray, b: np.ndarray) -> list[Fraction]:
    """The exact solution, of the normal equations."""
    given = exactly(a)
    transposed = [list(column) for column in zip(*given, strict=True)]
    gram = [product(transposed, column) for column in transposed]
    return solved(gram, product(transposed, [Fraction(x) for x in b.tolist()]))


def error_of(a: np.ndarray, x: np.ndarray, exact: list[Fraction]) -> float:
    """``||D (x - x*)|| / ||D x*||``."""
    sizes = np.linalg.norm(a, axis=0)
    differences = [float(Fraction(found) - true) for found, true in zip(x.tolist(), exact, strict=True)]
    size = np.linalg.norm(sizes * np.array([float(x) for x in exact]))
    return float(np.linalg.norm(sizes * np.array(differences)) / size)
