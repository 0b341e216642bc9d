"""How the shortest of all minimizers depends on the rows' space: what a condition number leaves out.

Below full rank x is in the range of ``M = D V``, V being an orthonormal basis of the space of B's rows, D the
norms of A's columns: ``x = M (M^T M)^-1 c`` with the coefficients c of ``D x`` in V. Where V turns by dV, to
first order ``dx = (M^T)^+ (dc - dM^T x) + (I - M M^+) dM (M^T M)^-1 c`` with ``dM = D dV``. If columns differ
in size, x may change by many times the angle, also relative to ``||D x||``.
"""

from __future__ import annotations

from dataclasses import dataclass

from flint import arb, arb_mat

from .exact import columns, norm, scaled_rows


@dataclass(frozen=True)
class Sensitivity:
    """Of ``D x``, relative to its norm, for each right-hand side: to relative errors of the coefficients,
    and to angles by which V turns.
    """

    coefficients: list[arb]
    angle: list[arb]


def sensitivity(basis: arb_mat, norms: list[arb], solutions: arb_mat) -> Sensitivity:
    """By the formula above, from independent columns that span the space, the diagonal of D, and ``D x``."""
    v = arb_mat(_orthonormal(columns(basis))).transpose()
    m = scaled_rows(v, norms)
    square = m.transpose() * m
    try:
        inverse = m * square.inv()
    except ZeroDivisionError:  # which more bits would say
        return Sensitivity([arb("inf")] * solutions.ncols(), [arb("inf")] * solutions.ncols())
    along = norm(scaled_rows(inverse, norms).entries())
    identity = arb_mat([[arb(int(i == j)) for j in range(len(norms))] for i in range(len(norms))])
    rest = scaled_rows(identity - inverse * m.transpose(), norms)
    across = norm(scaled_rows(rest.transpose(), norms).entries())
    coefficients = v.transpose() * solutions
    weights = square.solve(coefficients)
    known, turned = [], []
    for y, c, w in zip(columns(solutions), columns(coefficients), columns(weights), strict=True):
        size = norm(y)
        zero = size == 0  # exactly: b is orthogonal to the range, or zero
        known.append(arb() if zero else along * norm(c) / size)
        turned.append(arb() if zero else along + across * norm(w) / size)
    return Sensitivity(known, turned)


def _orthonormal(vectors: list[list[arb]]) -> list[list[arb]]:
    """Gram and Schmidt's."""
    found: list[list[arb]] = []
    for vector in vectors:
        left = vector
        for _ in range(2):
            for q in found:
                along = sum((p * x for p, x in zip(q, left, strict=True)), arb())
                left = [x - along * p for p, x in zip(q, left, strict=True)]
        size = norm(left)
        found.append([x / size for x in left])
    return found
