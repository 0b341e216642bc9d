"""Exact eigenvalues, invariant subspaces and powers, and how far computed ones are off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flint import acb, acb_mat, arb, arb_mat, ctx

from .exact import Balls, adjoint, identity, norm, rounded
from .spectrum import BITS, UndecidedError, eigen

NEARLY = 2.0**-150
"""Errors of orthonormal vectors and of eigenvalues that do not matter, relative to the norm."""


@dataclass(frozen=True)
class Spectrum:
    """Of a Hermitian matrix: enclosures of its eigenvalues, ascending, and eigenvectors that are
    orthonormal and exact to many more digits than there are in double precision.
    """

    values: list[arb]
    vectors: Balls

    @classmethod
    def of(cls, a: Balls) -> Spectrum:
        """Spectrum of a matrix whose largest element is near one."""
        with ctx.workprec(BITS):
            if not any(a.entries()):
                return cls([arb()] * a.nrows(), _like(a, identity(a.nrows()).tolist()))
            found = eigen(a)
            columns = [[x / norm(c) for x in c] for c in found.vectors.transpose().tolist()][::-1]
            v = _like(a, columns).transpose()
            if not norm((adjoint(v) * v - identity(a.nrows())).entries()) < NEARLY:
                raise UndecidedError("eigenvectors are not orthonormal")
            return cls(found.values[::-1], v)

    def distance(self, i: int, value: arb) -> arb:
        """Of a computed eigenvalue to the i-th one."""
        with ctx.workprec(BITS):
            return abs(value - self.values[i])

    def sine(self, cluster: Sequence[int], vectors: Balls) -> float:
        """Of the largest angle between the span of vectors and that of some eigenvectors; 1 if these are not
        separated from the others.
        """
        with ctx.workprec(BITS):
            inside = set(cluster)
            others = [i for i in range(len(self.values)) if i not in inside]
            if not others:
                return 0.0
            if any(not abs(self.values[i] - self.values[j]) > NEARLY for i in inside for j in others):
                return 1.0
            outside = [row for i, row in enumerate(self.vectors.transpose().tolist()) if i in set(others)]
            found = rounded(adjoint(_like(self.vectors, outside).transpose()) * vectors)
            r = np.linalg.qr(rounded(vectors))[1]
            return float(np.linalg.norm(found @ np.linalg.inv(r), 2))

    def power(self, p: float) -> Balls:
        """Of a matrix that is positive semidefinite."""
        with ctx.workprec(BITS):
            powers = [_power(x, p) for x in self.values]
            scaled = [[x * w for x, w in zip(row, powers, strict=True)] for row in self.vectors.tolist()]
            return _like(self.vectors, scaled) * adjoint(self.vectors)


def _power(x: arb, p: float) -> arb:
    x = x.nonnegative_part()
    if p == 0:
        return arb(1)
    if p > 0 and x.contains(0):  # monotone
        return (x.upper() ** arb(p)).union(arb())
    return x ** arb(p)


def _like(a: Balls, rows: list[list[Any]]) -> Balls:
    if isinstance(a, arb_mat):
        return arb_mat(rows)
    return acb_mat([[acb(x) for x in row] for row in rows])


def scaled(a: Balls, exponent: int) -> Balls:
    """``a 2^exponent``."""
    return a * arb((1, exponent))


def residual(a: Balls, v: Balls, values: Sequence[arb], u: Balls) -> arb:
    """``||A V - U diag(values)||_F``."""
    with ctx.workprec(BITS):
        right = [[x * w for x, w in zip(row, values, strict=True)] for row in u.tolist()]
        return norm((a * v - type(u)(right)).entries())


def defect(v: Balls) -> float:
    """``||V^H V - I||_2``."""
    with ctx.workprec(BITS):
        return float(np.linalg.norm(rounded(adjoint(v) * v - identity(v.ncols())), 2))


def lower_factor(b: Balls) -> Balls:
    """L of ``B = L L^H``.

    Raises
    ------
    UndecidedError
        If B is not definite, or too nearly so.
    """
    with ctx.workprec(BITS):
        n, rows = b.nrows(), b.tolist()
        zero = arb() if isinstance(b, arb_mat) else acb()
        low: list[list[Any]] = [[zero] * n for _ in range(n)]
        for j in range(n):
            for i in range(j, n):
                total = rows[i][j] - sum((low[i][k] * _conjugate(low[j][k]) for k in range(j)), zero)
                if i > j:
                    low[i][j] = total / low[j][j]
                    continue
                pivot = total if isinstance(total, arb) else total.real
                if not pivot > 0:
                    raise UndecidedError("not definite")
                low[j][j] = _like(b, [[pivot.sqrt()]])[0, 0]
        return _like(b, low)


def _conjugate(x: Any) -> Any:
    return x if isinstance(x, arb) else x.conjugate()


def congruent(a: Balls, lower: Balls) -> Balls:
    """``L^-1 A L^-H``."""
    with ctx.workprec(BITS):
        half = lower.solve(a)
        return lower.solve(adjoint(half))
