"""LAPACK's test ratios, TESTING/LIN, computed in high precision: below 30 a test has passed.

Each is an error relative to what rounding may cause; ``eps`` is the unit roundoff of the accuracy asked for.
Norms are 1-norms unless it is said otherwise. ``tiny`` is what storing an element as a subnormal number may
cost beside that: the spacing of those. Solutions are not tested by ratios, but compared with exact ones.

E. Anderson, J. Dongarra, S. Ostrouchov, "Installation Guide for LAPACK", LAPACK Working Note 41, 1999,
chapter 6 and appendix B.
"""

from __future__ import annotations

import math

import numpy as np
from flint import arb, ctx

from neula import QRCertificate
from neula.engines import FORMATS
from neula.pipeline.result import QRResult

from .exact import Ball, adjoint, balls, columns, identity, largest, one_norm, rounded
from .spectrum import singular_values

THRESHOLD = 30.0

BITS = 640


def qrt01(a: np.ndarray, q: np.ndarray, r: np.ndarray, eps: float, tiny: float = 0.0) -> tuple[float, float]:
    """``||R - Q^H A|| / (m ||A|| eps)`` and ``||I - Q^H Q|| / (m eps)``, Q square (m x m)."""
    with ctx.workprec(BITS):
        exact = balls(a)
        difference = balls(r) - adjoint(balls(q)) * exact
        first = _ratio(one_norm(difference), len(a) * one_norm(exact), eps, len(r) * tiny)
        return first, orthogonality_ratio(q, eps)


def qrt02(a: np.ndarray, q: np.ndarray, r: np.ndarray, eps: float, tiny: float = 0.0) -> tuple[float, float]:
    """The same for the first columns of Q, Q of shape (m, k) and R of shape (k, n).

    As ``Q^H A`` does not see what of A lies outside the range of Q, the first ratio is the larger one of
    DQRT02's and ``||A - Q R|| / (m ||A|| eps)``.
    """
    reconstruction = residual_ratio(a, q, r, eps, tiny)
    first, second = qrt01(a, q, r, eps, tiny)
    return max(first, reconstruction), second


def residual_ratio(
    a: np.ndarray, left: np.ndarray, right: np.ndarray, eps: float, tiny: float = 0.0
) -> float:
    """``||A - left right|| / (m ||A|| eps)``."""
    with ctx.workprec(BITS):
        exact = balls(a)
        error = one_norm(exact - balls(left) * balls(right))
        return _ratio(error, len(a) * one_norm(exact), eps, len(a) * len(right) * tiny)


def orthogonality_ratio(q: np.ndarray, eps: float) -> float:
    """``||I - Q^H Q|| / (m eps)``."""
    with ctx.workprec(BITS):
        exact = balls(q)
        return _ratio(one_norm(identity(q.shape[1]) - adjoint(exact) * exact), arb(len(q)), eps)


def orthogonality_2norm(q: np.ndarray) -> float:
    """``||I - Q^H Q||_2``, of a matrix that is known exactly."""
    with ctx.workprec(BITS):
        exact = balls(q)
        return float(np.linalg.norm(rounded(identity(q.shape[1]) - adjoint(exact) * exact), 2))


def _certified_2norm(q: np.ndarray, found: QRCertificate, rounding: float, measured_with: float) -> float:
    """Test ratio of the true ``||I - Q^H Q||_2`` to the number in the certificate.

    Rounding Q to its dtype and measuring it adds ``2 sqrt(n) u`` and ``2 sqrt(m) u``, each with its u.
    """
    m, n = q.shape
    added = 2 * (n**0.5 * rounding + m**0.5 * measured_with)
    return THRESHOLD * orthogonality_2norm(q) / (found.orthogonality_2norm + added)


def certified_2norms(result: QRResult, q: np.ndarray, u: float) -> float:
    """The test ratio of the certificates' ``||I - Q^H Q||_2``: of a batch the worst."""
    found = [result.certificate] if isinstance(result.certificate, QRCertificate) else result.certificate
    measured_with = 2.0**-53 if u < FORMATS["tf32"].u else FORMATS["fp32"].u
    rounding = float(np.finfo(str(result.Q.dtype).removeprefix("torch.")).eps) / 2
    return max(_certified_2norm(*each, rounding, measured_with) for each in zip(q, found, strict=True))


def pot01(a: np.ndarray, lower: np.ndarray, eps: float, tiny: float = 0.0) -> float:
    """``||L L^H - A|| / (n ||A|| eps)``."""
    return residual_ratio(a, lower, lower.T.conj(), eps, tiny)


def product_ratio(a: np.ndarray, b: np.ndarray, c: np.ndarray, eps: float, tiny: float = 0.0) -> float:
    """``|C - A B|_ij / (k^2 ||a_i|| ||b_j|| eps)`` of the worst element, with rows of A, columns of B and
    the infinity norm: a sum of k products, each of which is rounded k times at most.
    """
    with ctx.workprec(BITS):
        left, right = balls(a), balls(b)
        rows = [_top(r) for r in left.tolist()]
        cols = [_top(c) for c in columns(right)]
        errors = (balls(c) - left * right).tolist()
        k = a.shape[1]
        return max(
            (
                _ratio(abs(v), k * k * rows[i] * cols[j], eps, k * tiny)
                for i, row in enumerate(errors)
                for j, v in enumerate(row)
            ),
            default=0.0,
        )


def singular_value_ratio(a: np.ndarray, s: np.ndarray, eps: float, tiny: float = 0.0) -> float:
    """``max |s_i - sigma_i| / (max(m, n) sigma_1 eps)`` for the largest ones, s descending.

    The true ones are known in enclosures; the errors are the smallest that these leave open.
    """
    with ctx.workprec(BITS):
        sigma = singular_values(balls(a))
        errors = [abs(x - y).abs_lower() for x, y in zip(balls(s).entries(), sigma, strict=False)]
        return _ratio(largest(errors), max(a.shape) * sigma[0], eps, tiny)


def _top(vector: list[Ball]) -> arb:
    return largest(abs(v) for v in vector)


def _ratio(error: arb, size: arb, eps: float, tiny: float = 0.0) -> float:
    """0 / 0 is 0."""
    if error.mid() == 0:
        return 0.0
    allowed = size * arb(eps) + arb(tiny)
    return math.inf if allowed == 0 else float(error / allowed)
