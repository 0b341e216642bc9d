"""neula.curve_fit beside SciPy's."""

import inspect
import pickle
import warnings

import numpy as np
import pytest
import scipy.optimize
import torch

import neula

RNG = np.random.default_rng(5)
X = np.linspace(0, 4, 50)
Y = 2.5 * np.exp(-1.3 * X) + 0.5 + 0.05 * RNG.standard_normal(50)
SIGMA = np.linspace(0.5, 1.0, 50)
TIGHT = {"ftol": 1e-15, "xtol": 1e-15}


def decay(x, a, b, c):
    return a * np.exp(-b * x) + c


def torch_decay(x, a, b, c):
    return a * torch.exp(-b * x) + c


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"p0": [1, 2, 3]},
        {"sigma": SIGMA},
        {"sigma": SIGMA, "absolute_sigma": True},
        {"sigma": 0.3},
        {"sigma": np.diag(SIGMA**2) + 0.1, "absolute_sigma": True},
        {"bounds": (0, [3.0, 1.2, 1.0])},
        {"bounds": ([0, 0, -1], np.inf), "method": "trf"},
        {"method": "trf", "loss": "soft_l1", "f_scale": 0.05},
    ],
)
def test_as_scipy(options):
    popt, pcov = neula.curve_fit(decay, X, Y, **options)
    theirs, covariance = scipy.optimize.curve_fit(decay, X, Y, **options, **TIGHT)
    np.testing.assert_allclose(popt, theirs, rtol=1e-6)
    # Theirs is of a Jacobian by one-sided differences.
    np.testing.assert_allclose(pcov, covariance, rtol=1e-5, atol=1e-6 * np.abs(covariance).max())


def test_full_output():
    popt, pcov, info, message, ier = neula.curve_fit(decay, X, Y, full_output=True)
    assert popt.shape == (3,)
    assert pcov.shape == (3, 3)
    np.testing.assert_allclose(info["fvec"], decay(X, *popt) - Y)
    assert info["nfev"] > 3
    assert "termination condition" in message
    assert ier in (1, 2, 3, 4)
    assert len(neula.curve_fit(decay, X, Y)) == 2


def test_parameters_of_scipy_are_there():
    ours = inspect.signature(neula.curve_fit).parameters
    theirs = inspect.signature(scipy.optimize.curve_fit).parameters
    assert [name for name in theirs if name != "kwargs" and name not in ours] == []
    positional = [name for name, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == positional


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_of_torch(dtype):
    fit = neula.curve_fit(torch_decay, torch.from_numpy(X).to(dtype), torch.from_numpy(Y).to(dtype))
    expected = neula.curve_fit(decay, X, Y)
    tolerance = 1e-8 if dtype == torch.float64 else 1e-3
    assert fit.popt.dtype == dtype
    np.testing.assert_allclose(fit.popt, expected.popt, rtol=tolerance)
    np.testing.assert_allclose(fit.pcov, expected.pcov, rtol=20 * tolerance, atol=1e-6)
    for one, other in zip(fit.band(torch.from_numpy(X).to(dtype)), expected.band(X), strict=True):
        np.testing.assert_allclose(one, other, rtol=20 * tolerance)


def test_the_band():
    fit = neula.curve_fit(decay, X, Y)
    a, b, c = fit.popt
    grid = np.linspace(-1, 6, 9)
    e = np.exp(-b * grid)
    slopes = np.column_stack([e, -a * grid * e, np.ones(9)])
    width = scipy.stats.t.ppf(0.95, 47) * np.sqrt(np.einsum("ij,jk,ik->i", slopes, fit.pcov, slopes))
    y, half = fit.band(grid, level=0.9)
    np.testing.assert_allclose(y, decay(grid, a, b, c), rtol=1e-12)
    np.testing.assert_allclose(half, width, rtol=1e-8)
    low, high = fit.confidence_intervals(0.999).T
    assert ((low < [2.5, 1.3, 0.5]) & (high > [2.5, 1.3, 0.5])).all()


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("own_x", [False, True])
def test_many_curves(library, own_x):
    rates = np.array([0.3, 1.0, 2.0, 5.0, 1.0])
    x = np.stack([X + 0.1 * k for k in range(5)]) if own_x else X
    y = 2.5 * np.exp(-rates[:, None] * x) + 0.5 + 0.05 * RNG.standard_normal((5, 50))
    sigma = 0.05 * (1 + RNG.random((5, 50)))
    if library == "numpy":
        fit = neula.curve_fit(decay, x, y, sigma=sigma, absolute_sigma=True)
    else:
        given = (torch.from_numpy(v) for v in (x, y))
        fit = neula.curve_fit(torch_decay, *given, sigma=sigma, absolute_sigma=True)
    assert fit.converged
    assert fit.result.accepted.shape == (5,)
    curve, half = fit.band(torch.from_numpy(x) if library == "torch" else x)
    assert curve.shape == half.shape == (5, 50)
    for k in range(5):
        own = x[k] if own_x else x
        popt, pcov = scipy.optimize.curve_fit(
            decay, own, y[k], p0=fit.popt[k], sigma=sigma[k], absolute_sigma=True, **TIGHT
        )
        np.testing.assert_allclose(fit.popt[k], popt, rtol=1e-6)
        np.testing.assert_allclose(fit.pcov[k], pcov, rtol=1e-4, atol=1e-5 * np.abs(pcov).max())
        np.testing.assert_allclose(curve[k], decay(own, *popt), rtol=1e-5)


def test_results_pickle():
    fit = neula.curve_fit(lambda x, a: a * x, X, 3 * X)
    again = pickle.loads(pickle.dumps(fit))
    np.testing.assert_array_equal(again.pcov, fit.pcov)
    with pytest.raises(ValueError, match="pickles do not keep"):
        again.band(X)


def test_predictors_of_any_kind():
    """A table of two predictors, as SciPy passes it on, and a dict."""
    x = RNG.random((2, 30))
    y = 1.5 * x[0] + np.exp(0.5 * x[1])
    table = neula.curve_fit(lambda x, a, b: a * x[0] + np.exp(b * x[1]), x, y)
    named = neula.curve_fit(lambda x, a, b: a * x["u"] + np.exp(b * x["v"]), {"u": x[0], "v": x[1]}, y)
    for fit in (table, named):
        np.testing.assert_allclose(fit.popt, [1.5, 0.5], rtol=1e-10)


def test_observations_that_are_nan():
    y = Y.copy()
    y[[3, 17]] = np.nan
    kept = ~np.isnan(y)
    with pytest.raises(ValueError, match="ydata holds NaN"):
        neula.curve_fit(decay, X, y)
    fit = neula.curve_fit(decay, X, y, sigma=SIGMA, nan_policy="omit")
    expected = neula.curve_fit(decay, X[kept], Y[kept], sigma=SIGMA[kept])
    np.testing.assert_array_equal(fit.popt, expected.popt)


def test_parameters_that_cannot_be_told_apart():
    with pytest.warns(neula.AccuracyWarning, match="rank 2"):
        popt, pcov = neula.curve_fit(lambda x, a, b, c: (a + b) * x + c, X, Y)
    assert np.isinf(pcov).all()
    np.testing.assert_allclose(popt[0] + popt[1], np.polyfit(X, Y, 1)[0], rtol=1e-8)


def test_as_many_parameters_as_observations():
    fit = neula.curve_fit(decay, X[:3], Y[:3], p0=[2.0, 1.0, 0.5])
    np.testing.assert_allclose(decay(X[:3], *fit.popt), Y[:3], rtol=1e-9)
    assert np.isinf(fit.pcov).all()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((lambda x, *p: p[0] * x, X, Y), {}, "pass p0"),
        ((decay, X, Y), {"sigma": np.ones(49)}, "incorrect shape"),
        ((decay, X, Y), {"sigma": -SIGMA}, "sigma must be positive"),
        ((decay, X, Y), {"sigma": np.ones((50, 50))}, "positive definite"),
        ((decay, X, []), {}, "must not be empty"),
        ((decay, X[:49], Y), {}, "one value for each observation"),
        ((decay, X, Y), {"nan_policy": "propagate"}, "unknown nan_policy"),
        ((decay, X, Y), {"p0": np.ones((2, 3))}, "does not fit curves"),
        ((decay, X, Y), {"bounds": (2, 1)}, "strictly less"),
        ((decay, X, Y), {"p0": [1, 1, 9], "bounds": (0, 5)}, "variable 2 is 9"),
    ],
)
def test_what_cannot_be(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        neula.curve_fit(*arguments, **options)


def test_a_fit_that_does_not_end():
    with pytest.warns(neula.AccuracyWarning, match="maximum number"):
        fit = neula.curve_fit(decay, X, Y, p0=[50, 9, -40], maxfev=2)
    assert not fit.converged
    assert fit.result.status == 0


@pytest.mark.parametrize("where", ["xdata", "ydata", "sigma", "p0"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda x: np.ma.masked_array(x, mask=x > x.mean()), "masked array"),
        (lambda x: x + 1j, "complex"),
        (lambda x: x.astype(str), "dtype <U"),
        (lambda x: x.astype(str).tolist(), "dtype <U"),
    ],
    ids=["masked", "complex", "text", "list of text"],
)
def test_nothing_is_lost_without_a_word(where, spoil, message):
    """A mask that is ignored, or an imaginary part, would make another fit."""
    x = np.linspace(0, 1, 20)
    given = {"xdata": x, "ydata": 2 * x + 1, "sigma": np.linspace(1, 2, 20), "p0": np.array([1.0, 2.0])}
    given[where] = spoil(given[where])
    if message == "complex" and where in ("xdata", "ydata"):  # it counts
        assert np.iscomplexobj(neula.curve_fit(lambda x, a, b: a * x + b, **given).result.fun)
        return
    with warnings.catch_warnings(action="error"), pytest.raises(TypeError, match=f"{where}.*{message}"):
        neula.curve_fit(lambda x, a, b: a * x + b, **given)


def test_objects_that_are_numbers_are_fitted():
    x = np.linspace(0, 1, 20)
    fit = neula.curve_fit(lambda x, a, b: a * x + b, x.astype(object), (2 * x + 1).astype(object))
    assert np.allclose(fit.popt, [2, 1])
    with pytest.raises(TypeError, match="ydata is None"):
        neula.curve_fit(lambda x, a: a * x, x, None)


@pytest.mark.parametrize("many", [False, True])
def test_a_bound_at_which_a_variable_does_nothing_is_left(many):
    """The first step ends at c = 0, where the derivative by c vanishes: the cost is largest there in c, not
    least.
    """

    def hyperbola(t, p):
        t, p = torch.as_tensor(t), p.movedim(-1, 0)[..., None]
        return (
            p[3]
            + (p[1] - p[0]) / 2 * (t - p[2])
            + (p[0] + p[1]) / 2 * ((t - p[2]) ** 2 + p[4] ** 2 / 4).sqrt()
        )

    t = torch.tensor([-32.0, -16, -8, 4, 4, 8, 16, 32], dtype=torch.float64)
    expected = torch.tensor([-2.0, 0.4, -1, -5, 9.5], dtype=torch.float64)
    begun = torch.tensor([-2.5 / 3, 4 / 3, 1, -4, 0.5], dtype=torch.float64)
    bounds = torch.tensor([-3.0, 0, -2, -10, 0]), torch.tensor([0.0, 3, 3, 0, 10])
    if many:  # one of them begins at its solution, and stays there
        begun = torch.stack([begun, expected, begun])
    observed = hyperbola(t, expected)
    found = neula.least_squares(
        lambda p: hyperbola(t, p) - observed, begun, bounds=tuple(x.double() for x in bounds)
    )
    assert bool(np.all(found.converged))
    assert torch.allclose(found.x, expected.expand_as(found.x), rtol=1e-9)
