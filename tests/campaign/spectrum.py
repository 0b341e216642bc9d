"""Singular values and eigenvalues in enclosures that are proven, and ranks by Sylvester's law of inertia.

Approximations come from LAPACK or, where singular values are far below the largest one, from Arb's
eigensolver with many bits. Neither is believed: what is returned is an enclosure that holds for any
approximation, or :class:`UndecidedError` is raised.

S. M. Rump, "Verified bounds for singular values, in particular for the spectral norm of a matrix and its
inverse", BIT 51, 2011.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from flint import acb, acb_mat, arb, arb_mat, ctx, fmpz, fmpz_mat

from .exact import Ball, Balls, balls, identity, norm, real_form, rounded

BITS = 768
"""For eigenvalues of Gram matrices."""

PERTURBED = 400
"""Arb's eigensolver finds wrong values where eigenvalues are multiple: a random symmetric matrix, smaller by
so many bits than the largest eigenvalue, separates them."""

RESOLVED = 1e-5
"""Relative error of enclosures that are narrow enough."""


class UndecidedError(ArithmeticError):
    """Even the largest precision does not tell."""


@dataclass(frozen=True)
class Eigen:
    """Enclosures of the eigenvalues of a symmetric matrix, descending, those of a cluster together; and
    approximate eigenvectors, a column each.
    """

    values: list[arb]
    vectors: Balls

    def dominant(self, count: int) -> arb_mat:
        """Eigenvectors of the ``count`` largest eigenvalues, which are separated from the others."""
        if count < len(self.values) and not self.values[count - 1] > self.values[count]:
            raise UndecidedError("the dominant space is not separated")
        return arb_mat([row[:count] for row in self.vectors.tolist()])


def eigen(gram: Balls) -> Eigen:
    """By Gershgorin's discs of ``V^-1 G V`` for a Hermitian G, V being approximate eigenvectors."""
    n = gram.nrows()
    with ctx.workprec(BITS):
        noise = np.random.default_rng(0).integers(-(2**20), 2**20, (n, n))
        size = norm(gram.mid().entries()).mid()
        small = balls((noise + noise.T).astype(float), -PERTURBED - 20) * size
        vectors = acb_mat((gram + small).mid()).eig(right=True, algorithm="approx")[1]
        columns = [_divided_by_the_largest(column) for column in vectors.transpose().mid().tolist()]
        if isinstance(gram, arb_mat):  # real up to a factor
            columns = [[z.real.mid() for z in column] for column in columns]
        v = type(gram)(columns).transpose()
        try:
            rows = v.solve(gram * v).tolist()
        except ZeroDivisionError:
            raise UndecidedError("approximate eigenvectors are dependent") from None
        return _in_order([_disc(row, i) for i, row in enumerate(rows)], columns)


def _divided_by_the_largest(column: list[acb]) -> list[acb]:
    largest = max(column, key=lambda z: float(abs(z).mid()))
    return [(z / largest).mid() for z in column]


def _disc(row: list[Ball], i: int) -> arb:
    radius = sum((abs(x) for j, x in enumerate(row) if j != i), arb())
    middle = row[i] if isinstance(row[i], arb) else row[i].real  # eigenvalues are real
    return middle + arb(0, radius)


def _in_order(discs: list[arb], columns: list[list[Ball]]) -> Eigen:
    """Of k discs that overlap, and no others, each contains all of k eigenvalues in their union."""
    order = sorted(range(len(discs)), key=lambda i: _Middle(discs[i]), reverse=True)
    groups: list[list[int]] = []
    unions: list[arb] = []
    for i in order:
        group, union = [i], discs[i]
        while unions and unions[-1].overlaps(union):  # wide ones reach beyond the discs before them
            group, union = groups.pop() + group, unions.pop().union(union)
        groups.append(group)
        unions.append(union)
    values = [union for group, union in zip(groups, unions, strict=True) for _ in group]
    real = not columns or isinstance(columns[0][0], (arb, float, int))
    vectors = (arb_mat if real else acb_mat)([columns[i] for i in order]).transpose()
    return Eigen(values, vectors)


class _Middle:
    """Compares balls by their middles."""

    def __init__(self, ball: arb) -> None:
        self.middle = ball.mid()

    def __lt__(self, other: _Middle) -> bool:
        return bool(self.middle < other.middle)


def singular_values(b: Balls) -> list[arb]:
    """All ``min(m, n)``, descending, in enclosures: five digits of the smallest one, or ``2^-195`` of the
    largest one.
    """
    if isinstance(b, acb_mat):
        return singular_values(real_form(b))[::2]
    found = _by_lapack(b)
    if found is not None:
        return found
    if not any(b.entries()):
        return [arb()] * min(b.nrows(), b.ncols())
    with ctx.workprec(BITS):
        transposed = b.transpose()
        gram = b * transposed if b.nrows() < b.ncols() else transposed * b
        return [value.nonnegative_part().sqrt() for value in eigen(gram).values]


def values_of(a: np.ndarray) -> np.ndarray:
    """Singular values of a matrix of numbers, from their enclosures."""
    return np.array([float(value.mid()) for value in singular_values(balls(a))])


def resolved(value: arb) -> bool:
    """Whether five digits are known."""
    return bool(value.rad() < value.mid() * RESOLVED)


def _by_lapack(b: arb_mat) -> list[arb] | None:
    """LAPACK's singular values with Rump's bound, ``||B - U S V^T|| + s_1 (||I - U^T U|| + ||I - V^T V||)``;
    None where that does not resolve the smallest one.
    """
    u, s, vt = np.linalg.svd(rounded(b), full_matrices=False)
    left, right = balls(u), balls(vt)
    scaled = arb_mat([[x * arb(float(t)) for x, t in zip(row, s, strict=True)] for row in left.tolist()])
    one = identity(len(s))
    turned = norm((one - left.transpose() * left).entries()) + norm(
        (one - right * right.transpose()).entries()
    )
    radius = (norm((b - scaled * right).entries()) + arb(float(s[0])) * turned).upper()
    found = [arb(float(value), radius) for value in s]
    return found if turned < 0.5 and resolved(found[-1]) else None


def count_above(a: fmpz_mat, square: tuple[int, int]) -> int:
    """How many singular values of ``A D^-1`` exceed t, exactly, from numerator and denominator of ``t^2``;
    D is the norms of A's nonzero columns. That is the number of positive eigenvalues of ``A^T A - t^2
    D^2``.
    """
    gram = (a.transpose() * a).tolist()
    top, bottom = fmpz(square[0]), fmpz(square[1])
    for row in gram:
        row[:] = [bottom * x for x in row]
    for i, row in enumerate(gram):
        row[i] -= top * (row[i] // bottom)
    return positive_eigenvalues(gram)


def positive_eigenvalues(a: list[list[fmpz]]) -> int:
    """Of a symmetric matrix of integers, by LDL^T without fractions (Bareiss): Sylvester's law of inertia."""
    count, before = 0, fmpz(1)
    while a:
        size = range(len(a))
        pivot = next((i for i in size if a[i][i] != 0), None)
        if pivot is None:
            pair = next(((i, j) for i in size for j in range(i) if a[i][j] != 0), None)
            if pair is None:
                break
            pivot, j = pair  # rows and columns are added: a congruence
            a[pivot] = [x + y for x, y in zip(a[pivot], a[j], strict=True)]
            for row in a:
                row[pivot] += row[j]
        p = a[pivot][pivot]
        count += (p > 0) == (before > 0)
        rest = [i for i in size if i != pivot]
        a = [[(p * a[i][j] - a[i][pivot] * a[pivot][j]) // before for j in rest] for i in rest]
        before = p
    return count
