"""Plain fits by MINPACK and NumPy: the same answers and evidence as in tensors, and when these take over."""

import re

import numpy as np
import pytest
import scipy.optimize
import torch

import neula
from neula.algorithms.nonlinear.losses import LOSSES, Loss
from neula.algorithms.nonlinear.one_function import EPS, OneFunction, Unusual
from neula.problems.nonlinear import curve_fit, least_squares

T = np.linspace(0, 4, 40)
TRUE = np.array([2.5, 1.3, 0.5])
ENDLESS = 10**6
"""A limit of calls that is named leaves a fit to the way for all."""


def decay(t, a, b, c):
    return a * np.exp(-b * t) + c


def slopes(t, a, b, c):
    e = np.exp(-b * t)
    return np.column_stack([e, -a * t * e, np.ones_like(t)])


def stationary(size):
    """Data whose best fit is known: their errors are orthogonal to the Jacobian there."""
    error = np.random.default_rng(11).standard_normal(40)
    q = np.linalg.qr(slopes(T, *TRUE))[0]
    return decay(T, *TRUE) + size * (error - q @ (q.T @ error))


@pytest.fixture
def alone(monkeypatch):
    """No fit by the way for all."""

    def refuse(*args, **kwargs):
        raise AssertionError("taken over")

    for module in (curve_fit, least_squares):
        monkeypatch.setattr(module, "run_fit", refuse)


def relative_error(result, x):
    scale = np.linalg.norm(result.jac, axis=0)
    return np.linalg.norm(scale * (result.x - x)) / np.linalg.norm(scale * x)


@pytest.mark.parametrize("size", [0.0, 1e-6, 0.1, 0.5])
@pytest.mark.parametrize("jac", [None, "3-point", "2-point", lambda p: slopes(T, *p)])
@pytest.mark.parametrize("bounds", [(-np.inf, np.inf), ([0, 0, -5], 9)])
def test_the_minimum_is_where_it_is_said_to_be(request, size, jac, bounds):
    if jac != "2-point":  # where errors of the Jacobian say which steps are the last, rounding errors do
        request.getfixturevalue("alone")
    y = stationary(size)
    result = neula.least_squares(lambda p: decay(T, *p) - y, [2.0, 1.0, 1.0], jac, bounds)
    assert result.converged
    # The data are rounded: their minimum is off by u times the condition number, once and with residuals.
    data = EPS * result.condition * np.linalg.norm(y) / np.linalg.norm(y - result.fun)
    assert relative_error(result, TRUE) <= 10**0.5 * result.forward_error + 10 * data
    assert result.stationarity <= result.tolerance
    assert result.forward_error < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sigma": 0.1 + 0.01 * T},
        {"sigma": 0.1 * np.eye(40) + 0.02, "absolute_sigma": True},
        {"jac": slopes, "sigma": 0.1 + 0.01 * T},
        {"jac": slopes, "sigma": 0.1 * np.eye(40) + 0.02},
        {"bounds": (0, 10)},
        {"bounds": scipy.optimize.Bounds([0, 0, -1], np.inf)},
        {"p0": [3, 1, 1]},
    ],
)
def test_as_in_tensors(options):
    y = stationary(0.1)
    ours, others = (
        neula.curve_fit(decay, T, y, **options),
        neula.curve_fit(decay, T, y, maxfev=ENDLESS, **options),
    )
    both = ours.result, others.result
    errors = both[0].forward_error + both[1].forward_error
    assert relative_error(both[0], both[1].x) <= 10**0.5 * errors
    assert ours.pcov == pytest.approx(others.pcov, rel=1e-8)
    for name, value in vars(both[0]).items():
        other = getattr(both[1], name)
        assert type(value) is type(other), name
        assert np.shape(value) == np.shape(other), name
        assert getattr(value, "dtype", None) == getattr(other, "dtype", None), name
    assert both[0].condition == pytest.approx(both[1].condition, rel=1e-8)
    assert both[0].R.tolist() == np.triu(both[0].R).tolist()
    for one, other in zip(ours.band(T), others.band(T), strict=True):
        assert one == pytest.approx(other, rel=1e-8)


@pytest.mark.parametrize("loss", ["linear", "soft_l1", "huber", "cauchy", "arctan"])
def test_residuals_whose_squares_are_losses(loss):
    rule = Loss(None if loss == "linear" else LOSSES[loss], torch.tensor(0.7, dtype=torch.float64))
    f = torch.tensor([-3.0, -0.5, 0.0, 1e-9, 0.3, 40.0], dtype=torch.float64, requires_grad=True)
    found, slope = rule.rooted(f)
    assert 0.5 * float(found.square().sum()) == pytest.approx(float(rule.cost(f)), rel=1e-14)
    assert (found.sign() == f.sign()).all()
    # The cost falls by each residual as by itself: slope and residual are the loss's derivative.
    (gradient,) = torch.autograd.grad(rule.cost(f), f)
    assert (found * slope).tolist() == pytest.approx(gradient.tolist(), rel=1e-14)


@pytest.mark.parametrize(
    ("fun", "start"),
    [
        (lambda p: np.array([p[0] + p[1] - 1, 2 * (p[0] + p[1]) - 1, 3.0]), [0.0, 0.5]),  # dependent
        (lambda p: np.array([p[0] - 1, p[0] + 2, 0 * p[1]]), [0.0, 0.5]),  # without influence
        (lambda p: np.array([p[0] - 1, p[1] ** 2, p[1]]) * 0, [0.0, 0.5]),  # all are zero
        (lambda p: np.array([p[0] ** 2 + p[1] - 1]), [0.0, 0.5]),  # too few residuals
    ],
)
def test_what_the_data_do_not_determine(fun, start):
    with pytest.warns(neula.AccuracyWarning):
        result = neula.least_squares(fun, start)
    with pytest.warns(neula.AccuracyWarning):
        expected = neula.least_squares(fun, start, max_nfev=ENDLESS)
    assert not result.converged
    assert result.rank == expected.rank < 2
    np.testing.assert_array_equal(result.x, expected.x)


@pytest.mark.parametrize(
    "kind",
    [lambda f: f.astype(np.float32), list, torch.from_numpy, lambda f: f.astype(">f8"), np.ma.masked_invalid],
)
def test_other_residuals_are_taken_as_before(kind):
    def fun(p):
        return kind(decay(T, *p) - stationary_y)

    stationary_y = stationary(0.0)
    try:
        expected = neula.least_squares(fun, TRUE + 0.1, max_nfev=ENDLESS)
    except TypeError as error:
        with pytest.raises(TypeError, match=re.escape(str(error))):
            neula.least_squares(fun, TRUE + 0.1)
        return
    np.testing.assert_array_equal(neula.least_squares(fun, TRUE + 0.1).x, expected.x)


def test_exceptions_come_as_they_are():
    calls = []

    def fun(p):
        calls.append(p)
        if len(calls) == 7:
            raise LookupError("seven")
        return decay(T, *p) - 1

    with pytest.raises(LookupError, match="seven"):
        neula.least_squares(fun, [2.0, 1.0, 1.0])
    assert len(calls) == 7


def test_what_is_given_may_be_kept_and_overwritten(alone):
    y, kept, room = stationary(0.1), [], np.empty(40)
    start = np.array([2.0, 1.0, 1.0])

    def fun(p):
        room[:] = decay(T, *p) - y
        kept.append(p)
        return room

    def spoiling(p):
        f = decay(T, *p) - y
        p[:] = np.nan
        return f

    plain = neula.least_squares(lambda p: decay(T, *p) - y, start)
    for other in (fun, spoiling):
        result = neula.least_squares(other, start)
        np.testing.assert_array_equal(result.x, plain.x)
        np.testing.assert_array_equal(result.fun, plain.fun)
    assert start.tolist() == [2.0, 1.0, 1.0]
    assert kept[0].tolist() == start.tolist()


@pytest.mark.parametrize("scale", [1e-120, 1e-30, 1e30, 1e120])
@pytest.mark.filterwarnings("error")
def test_units_do_not_matter(scale):
    y = stationary(0.1)
    plain = neula.least_squares(lambda p: decay(T, *p) - y, [2.0, 1.0, 1.0])
    sized = neula.least_squares(lambda p: decay(T, *(p / scale)) - y, np.array([2.0, 1.0, 1.0]) * scale)
    assert relative_error(plain, sized.x / scale) <= 10**0.5 * (plain.forward_error + sized.forward_error)


@pytest.mark.parametrize("spoiled", [np.nan, np.inf, 1e200])
def test_residuals_that_are_not_finite_are_unusual(spoiled):
    function = OneFunction(lambda p: np.array([p[0], spoiled, spoiled]), None, "2-point")
    with pytest.raises(Unusual):
        function.slopes(np.ones(1))
