"""Optimality by definition, and solutions by trying every set of variables at bounds."""

from __future__ import annotations

import itertools

import numpy as np

U = 2.0**-53


def violation(A, b, x, lower, upper) -> float:
    """Largest component of the gradient that no bound blocks, relative to columns of norm 1 and to the sum of
    all magnitudes.

    Rounding errors of a solution that is backward stable are of the order of u.
    """
    n = A.shape[1]
    lower, upper = np.broadcast_to(lower, n), np.broadcast_to(upper, n)
    assert np.all((lower <= x) & (x <= upper))
    norms = np.linalg.norm(A, axis=0)
    norms[norms == 0] = 1.0
    gradient = A.T @ (b - A @ x) / norms
    gradient = np.where(x == lower, np.maximum(gradient, 0), gradient)
    gradient = np.where(x == upper, np.minimum(gradient, 0), gradient)
    size = np.linalg.norm(b) + np.abs(norms * x).sum()
    return float(np.abs(gradient).max(initial=0.0) / (size or 1.0))


def by_enumeration(A, b, lower, upper) -> np.ndarray:
    """The best point of all faces of the box, for a few unknowns with independent columns."""
    n = A.shape[1]
    best, least = None, np.inf
    for sides in itertools.product((-1, 0, 1), repeat=n):
        sides = np.array(sides)
        x = np.where(sides < 0, lower, np.where(sides > 0, upper, 0.0))
        free = sides == 0
        if not np.isfinite(x).all():
            continue
        if free.any():
            x[free] = np.linalg.lstsq(A[:, free], b - A[:, ~free] @ x[~free], rcond=None)[0]
        if np.all((x >= lower) & (x <= upper)):
            length = np.linalg.norm(A @ x - b)
            if length < least:
                best, least = x, length
    assert best is not None
    return best
