"""``neula.compat.scipy.optimize`` returns and raises what SciPy does."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize

import neula
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


T = np.linspace(0, 4, 30)
Y = 2.5 * np.exp(-1.3 * T) + 0.5 + 0.05 * RNG.standard_normal(30)


def decay(p, t=T):
    return p[0] * np.exp(-p[1] * t) + p[2] - Y


@pytest.mark.parametrize("method", ["trf", "dogbox", "lm"])
def test_least_squares(method) -> None:
    found, expected = (
        module.least_squares(decay, [1, 1, 1], method=method, x_scale="jac")
        for module in (ours, scipy.optimize)
    )
    assert isinstance(found, scipy.optimize.OptimizeResult)
    assert sorted(found) == sorted(expected)
    for name in ("x", "fun", "cost", "active_mask"):
        assert np.allclose(found[name], expected[name], atol=1e-6)
    assert found.success
    assert np.abs(found.grad).max() < 1e-10  # refined, where SciPy's is 1e-6


@pytest.mark.parametrize(
    "solve",
    [
        lambda: ours.least_squares(decay, [1, 1, 1]),
        lambda: ours.lsq_linear(A, B, (-1, 1)),
    ],
)
def test_an_accuracy_that_is_missed_is_a_warning(solve, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = ours.fitted
    monkeypatch.setattr(ours, "fitted", lambda *args, **how: (fitted(*args, **how)[0], "missed"))
    with pytest.warns(neula.AccuracyWarning, match="missed"):
        solve()


def test_curve_fit() -> None:
    def model(t, a, b, c):
        return a * np.exp(-b * t) + c

    for keywords in ({}, {"p0": [2, 1, 0]}, {"sigma": 0.1 + T, "absolute_sigma": True}, {"bounds": (0, 9)}):
        popt, pcov = ours.curve_fit(model, T, Y, **keywords)
        expected = scipy.optimize.curve_fit(model, T, Y, **keywords)
        assert np.allclose(popt, expected[0], rtol=1e-5)
        assert np.allclose(pcov, expected[1], rtol=1e-3)
    # Two are SciPy's: all that it says of a fit, and one that does not end.
    assert sorted(ours.curve_fit(model, T, Y, full_output=True)[2]) == ["fjac", "fvec", "ipvt", "nfev", "qtf"]
    with pytest.raises(RuntimeError, match="Optimal parameters not found"):
        ours.curve_fit(model, T, Y, maxfev=3)


@pytest.mark.parametrize("noise", [0.0, 1e-2, 0.3])
def test_half_of_the_digits_of_a_curve(noise: float) -> None:
    """Beside Newton's method, whose second derivatives are exact, in wider numbers."""
    t = np.linspace(0, 4, 40)
    y = 2.5 * np.exp(-1.3 * t) + noise * np.random.default_rng(1).standard_normal(40)
    popt, pcov = ours.curve_fit(lambda t, a, b: a * np.exp(-b * t), t, y)
    exact, t, y = popt.astype(np.longdouble), t.astype(np.longdouble), y.astype(np.longdouble)
    for _ in range(20):
        e = np.exp(-exact[1] * t)
        rest, J = exact[0] * e - y, np.stack([e, -exact[0] * t * e])
        mixed, second = (rest * -t * e).sum(), (rest * exact[0] * t * t * e).sum()
        hessian = J @ J.T + np.array([[0, mixed], [mixed, second]])
        exact = exact - np.linalg.solve(hessian.astype(float), (J @ rest).astype(float))
    assert np.linalg.norm(popt - exact) <= 1e-8 * np.linalg.norm(exact)
    expected = np.linalg.inv((J @ J.T).astype(float)) * float(rest @ rest) / 38
    assert np.allclose(pcov, expected, rtol=1e-4, atol=1e-25)


def test_fits_that_are_left_to_scipy() -> None:
    for bad in (
        {"bounds": ([0.0], [3.0, 4.0, 5.0])},
        {"method": "lm", "bounds": (0, 3)},
        {"method": "lm", "loss": "huber"},
        {"method": "newton"},
        {"jac": "4-point"},
        {"loss": "cubic"},
    ):
        told = []
        for module in (ours, scipy.optimize):
            with pytest.raises(ValueError) as caught:  # noqa: PT011
                module.least_squares(decay, [1.0, 1.0, 1.0], **bad)
            told.append(str(caught.value))
        assert told[0] == told[1]
    assert ours.least_squares(decay, [1, 1, 1], max_nfev=2).status == 0
