"""Bounds are promises: a change of one is a change of what the documentation says."""

from __future__ import annotations

import pytest

from neula.certificates.bounds import (
    lstsq_bound,
    orthogonality_2norm_bound,
    orthogonality_bound,
    residual_bound,
    solve_bound,
)
from neula.certificates.cholesky import cholesky_bound
from neula.certificates.lu import gamma
from neula.certificates.polar import PolarBounds
from neula.certificates.verdict import Limits
from neula.engines import BF16, FP16, FP32, FP64

U64 = 2.0**-53

PROMISES = {
    "3 u (2 + log2 n)": (residual_bound(FP32, 64), 24 * 2.0**-24),
    "twice that of a residual": (orthogonality_bound(FP16, 256), 60 * 2.0**-11),
    "30 n u": (orthogonality_2norm_bound(FP32, 64), 1920 * 2.0**-24),
    "a tenth at most": (orthogonality_2norm_bound(BF16, 64), 0.1),
    "8 u and 8 sqrt(n) u64": (lstsq_bound(FP64, 16), 40 * U64),
    "of single precision": (lstsq_bound(FP32, 16), 8 * 2.0**-24 + 32 * U64),
    "4 u and sqrt(n) u64": (solve_bound(FP64, 16), 8 * U64),
    "the residual of R^T R": (cholesky_bound(FP64, 64), 24 * U64 + 8 * U64),
    "twice that of a QR": (PolarBounds.for_shape(FP64, 64, 64).residual, 48 * U64 + 8 * U64),
    "k u / (1 - k u)": (gamma(1000, 1e-4), 0.1 / 0.9),
    "condition and rcond": (
        Limits.for_shape((50, 20), 1e-15, 0.1, rcond=1e-10).condition,
        1 / (1.2 * (1e-10 + 50 * U64)),
    ),
    "residuals of systems": (Limits.for_shape((20, 20), 1e-15, 0.1).residual, 1 + 20 * U64),
}


@pytest.mark.parametrize("promise", PROMISES)
def test_bounds_are_those_that_are_promised(promise: str) -> None:
    found, expected = PROMISES[promise]
    assert found == pytest.approx(expected, rel=1e-14, abs=0)
