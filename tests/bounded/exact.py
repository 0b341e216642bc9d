"""Least squares with bounds in rational numbers: the one point that has all conditions of a solution."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
from flint import arb, fmpq, fmpq_mat


def rational(x: float) -> fmpq:
    part = Fraction(float(x))
    return fmpq(part.numerator, part.denominator)


def matrix(a: np.ndarray) -> fmpq_mat:
    return fmpq_mat(*a.shape, [rational(x) for x in a.ravel()])


def solution(a: np.ndarray, b: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> list[fmpq] | None:
    """For a few unknowns; None where columns are dependent."""
    columns, n = matrix(a), a.shape[1]
    gram = (columns.transpose() * columns).tolist()
    product = (columns.transpose() * matrix(b[:, None])).transpose().tolist()[0]
    if columns.rank() < n:
        return None
    for sides in itertools.product(*((0, *(s for s, x in ((-1, lo), (1, hi)) if np.isfinite(x)))
                                     for lo, hi in zip(lower, upper, strict=True))):  # fmt: skip
        x = [rational({-1: lo, 0: 0.0, 1: hi}[s]) for s, lo, hi in zip(sides, lower, upper, strict=True)]
        free = [i for i, s in enumerate(sides) if s == 0]
        if free:
            rest = [product[i] - sum((g * y for g, y in zip(gram[i], x, strict=True)), fmpq(0)) for i in free]
            part = fmpq_mat([[gram[i][j] for j in free] for i in free])
            for i, y in zip(free, part.solve(fmpq_mat([[r] for r in rest])).entries(), strict=True):
                x[i] = y
        if _is_solution(gram, product, x, sides, lower, upper):
            return x
    raise AssertionError("no point has all conditions of a solution")


def _is_solution(gram, product, x, sides, lower, upper) -> bool:
    for row, p, y, side, lo, hi in zip(gram, product, x, sides, lower, upper, strict=True):
        if (np.isfinite(lo) and y < rational(lo)) or (np.isfinite(hi) and y > rational(hi)):
            return False
        gradient = p - sum((g * z for g, z in zip(row, x, strict=True)), fmpq(0))
        if side and gradient * side < 0:
            return False
    return True


def error(a: np.ndarray, x: np.ndarray, exact: list[fmpq]) -> float:
    """``||D (x - x*)|| / ||D x*||``."""
    squares = [sum((rational(v) ** 2 for v in column), fmpq(0)) for column in a.T]
    wrong = sum((s * (rational(v) - y) ** 2 for s, v, y in zip(squares, x, exact, strict=True)), fmpq(0))
    size = sum((s * y**2 for s, y in zip(squares, exact, strict=True)), fmpq(0))
    if size == 0:
        return 0.0 if wrong == 0 else np.inf
    return float(arb(wrong / size).sqrt())
