"""``neula.compat.scipy.optimize`` returns and raises what SciPy does."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize

import neula.compat.scipy.optimize as ours

RNG = np.random.default_rng(0)
A, B = RNG.standard_normal((20, 5)), RNG.standard_normal(20)


def message(solve, a) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        solve(a, B)
    return str(caught.value)


def test_nnls() -> None:
    for b in (B, B[:, None]):
        found, expected = ours.nnls(A, b), scipy.optimize.nnls(A, b)
        assert np.allclose(found[0], expected[0])
        assert found[1] == pytest.approx(expected[1])
    for bad in (A * np.nan, A[0], A[:3]):
        assert message(ours.nnls, bad) == message(scipy.optimize.nnls, bad)


BOUNDS = [(0, 0.1), (-np.inf, np.inf), scipy.optimize.Bounds(-0.1 * np.ones(5), np.ones(5))]


@pytest.mark.parametrize("bounds", BOUNDS)
def test_lsq_linear(bounds) -> None:
    found = ours.lsq_linear(A, B, bounds)
    expected = scipy.optimize.lsq_linear(A, B, bounds, method="bvls")
    assert isinstance(found, scipy.optimize.OptimizeResult)
    assert sorted(found) == sorted(expected)
    for name in ("x", "fun", "cost", "active_mask"):
        assert np.allclose(found[name], expected[name], atol=1e-10)
    assert found.success
    assert found.status in (1, 3)


def test_what_is_left_to_scipy() -> None:
    with pytest.raises(ValueError, match="strictly less"):
        ours.lsq_linear(A, B, (1, 0))
    assert ours.lsq_linear(A, B, (0, 1), lsq_solver="exact", max_iter=3).nit <= 3
    with pytest.raises(RuntimeError, match="Maximum number"):
        ours.nnls(A, B, maxiter=1)
    assert ours.minimize is scipy.optimize.minimize
    assert "curve_fit" in dir(ours)
