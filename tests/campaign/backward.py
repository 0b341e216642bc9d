"""Backward errors of least squares as the design page defines them, from exact residuals and gradients.

For ``B = A D^-1``, D the norms of the columns, y = D x and r = b - A x the smallest of three perturbations
that make x a solution: ``||B^T r|| / (||B|| ||r||)``, ``||r|| / (||B|| ||y|| + ||b||)`` and
``||P r|| / (||B|| ||y||)``, P the projector on the range. Below full rank B has its largest singular values
only.
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
    """Of each column of x."""
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
    optimality = np.linalg.norm(gradient) / (s[0] * residual)
    projected = np.linalg.norm(gradient / s)
    found = min(optimality, residual / (image + 1), projected / image if image > 0 else math.inf)
    return float(found)


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
