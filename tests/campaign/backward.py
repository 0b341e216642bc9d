"""Backward errors of least squares, from exact residuals and gradients.

For ``B = A D^-1``, D the norms of the columns, y = D x and r = b - A x: the smallest perturbation of B that
makes x a solution, the smallest one of B and b (Walden, Karlson and Sun, 1995), or the one that makes the
residual vanish, ``||r|| / (||B|| ||y|| + ||b||)``. Below full rank B has its largest singular values only.

No claim may be below these. That neula's claims come from other perturbations does not make them larger:
what is the smallest of three for rounded products with weights need not be so for exact ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from flint import arb_mat, ctx

from .exact import columns, norm, rounded, scaled_rows
from .oracle import FIRST_BITS, LeastSquares
from .verdict import Finding

NOISE = 4 * 2.0**-53
"""Times the root of the rows and columns: rounding errors of measuring a residual in double precision, by
which a claim may be too small."""


def backward_errors(truth: LeastSquares, x: np.ndarray, rank: int) -> np.ndarray:
    """Of each column of x. That of the real problem of complex numbers: a singular value and its twin have
    the components of r that the complex one has.
    """
    x, rank = truth.solution_of(x), rank * truth.fold
    left, s, right = np.linalg.svd(rounded(truth._scaled(FIRST_BITS)), full_matrices=False)
    found = []
    with ctx.workprec(2 * FIRST_BITS):
        a, norms = arb_mat(truth._a), truth._norms(2 * FIRST_BITS)
        for given, b in zip(x.T, columns(arb_mat(truth._b)), strict=True):
            size = norm(b)
            if not np.isfinite(given).all() or size == 0 or s[0] == 0:
                found.append(math.inf if given.any() else 0.0)
                continue
            unknowns = truth._unknowns(given)
            residual = arb_mat([[p - q] for p, q in zip(b, (a * unknowns).entries(), strict=True)])
            gradient = scaled_rows(a.transpose() * residual, [1 / d for d in norms])
            of_y = scaled_rows(unknowns, norms)
            r, g, y = (rounded(part * (1 / size))[:, 0] for part in (residual, gradient, of_y))
            r = r + left[:, rank:] @ (s[rank:] * (right[rank:] @ y))
            found.append(_smallest(r, right[:rank] @ g, y, s[:rank] if rank else s[:1] * 0))
    return np.array(found)


def _smallest(r: np.ndarray, gradient: np.ndarray, y: np.ndarray, s: np.ndarray) -> float:
    """With b of norm 1, and the gradient in singular vectors."""
    residual, image = np.linalg.norm(r), s[:1].sum() * np.linalg.norm(y)
    if residual == 0 or not len(gradient):
        return 0.0
    if image == 0:  # any perturbation of B is as good
        return float(min(np.linalg.norm(gradient) / (s[0] * residual), residual))
    found = [residual / (image + 1)]
    for ratio in (residual / image, residual / math.hypot(1, image)):  # of B alone; of b as well
        found.append(min(ratio, _perturbation(gradient / residual, s / s[0], s[0], ratio)))
    return float(min(found))


def _perturbation(gradient: np.ndarray, s: np.ndarray, norm: float, ratio: float) -> float:
    """The smallest singular value of ``[B, ratio (I - r r^T)]`` for a residual r of norm 1, if B has norm 1.

    Its square is the root l of ``(1 - ||p||^2) l / (ratio^2 - l) = sum p^2 (s^2 - l) / (s^2 + ratio^2 - l)``,
    p being the components of r along the left singular vectors, below ``ratio^2``: the left side grows from
    zero, and the right side falls.
    """
    p = (gradient / norm / s) ** 2
    outside, squares = max(0.0, 1 - p.sum()), s**2

    def falls_short(part: float) -> bool:
        below, rest = part * ratio**2, ratio**2 * (1 - part)
        return bool(outside * part / (1 - part) < (p * (squares - below) / (squares + rest)).sum())

    # In logarithms: what is sought is often the square of a unit roundoff.
    exponents = -250.0, 0.0
    for _ in range(50):
        middle = sum(exponents) / 2
        exponents = (middle, exponents[1]) if falls_short(2.0**middle) else (exponents[0], middle)
    return ratio * 2.0 ** (exponents[1] / 2)


def judge_backward(
    truth: LeastSquares, x: np.ndarray, rank: int, claimed: float, tolerance: float, *, accepted: bool
) -> Iterator[Finding]:
    """Accepted solutions meet the tolerance, and no claim is smaller than the error."""
    if not accepted or rank not in truth.ranks:
        return
    error = float(backward_errors(truth, x, rank).max(initial=0.0))
    noise = NOISE * math.sqrt(sum(truth.shape))
    # Claims may be relative to x before it was rounded.
    if error > claimed * (1 + 1e-6 + tolerance) + noise:
        yield Finding("unsound", "backward", f"backward error {error:.2e}, and {claimed:.2e} claimed")
    if error > tolerance + noise or claimed > tolerance:
        text = f"accepted: backward error {error:.2e}, {claimed:.2e} claimed, {tolerance:.2e} asked for"
        yield Finding("unsound", "tolerance", text)
