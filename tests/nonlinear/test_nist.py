"""The 27 problems of NIST from both starts: digits, standard deviations, certificates."""

import numpy as np
import pytest
import scipy.optimize
import torch

import neula
from neula.io.datasets import log_relative_error, nist_nonlinear, nist_nonlinear_names

BOTH = [(name, start) for name in nist_nonlinear_names() for start in (0, 1)]

LONG = {("bennett5", 0), ("mgh10", 0), ("mgh17", 0)}
"""Hundreds of steps along curved valleys: tried with derivatives of torch alone."""

CERTIFIED_DIGITS = 10.2
"""NIST rounds to 11 significant digits: half a unit of the last one is up to 5e-11 of the value."""


def digits(x, problem):
    return log_relative_error(np.asarray(x), problem.certified)


def check_claim(result, problem):
    """The error is what the result says, in the norm in which it says so, or that of NIST's rounding."""
    columns = np.linalg.norm(np.asarray(result.jac), axis=0)
    size = np.linalg.norm(columns * problem.certified)
    error = np.linalg.norm(columns * (np.asarray(result.x) - problem.certified)) / size
    assert error <= 10**0.5 * result.forward_error + 10**-CERTIFIED_DIGITS


@pytest.mark.parametrize(("name", "start"), BOTH)
def test_with_derivatives_of_torch(name, start):
    problem = nist_nonlinear(name)
    result = neula.least_squares(problem.residuals, torch.tensor(problem.starts[start]))
    assert result.converged
    assert result.success
    assert result.rank == len(problem.certified)
    check_claim(result, problem)
    assert digits(result.x, problem) >= 9
    if name == "lanczos1":  # residuals are 1e-13 of the data: rounding errors of these
        return
    np.testing.assert_allclose(result.standard_errors().numpy(), problem.standard_deviations, rtol=1e-8)
    np.testing.assert_allclose(2 * result.cost, problem.residual_sum_of_squares, rtol=1e-8)
    np.testing.assert_allclose(result.residual_variance**0.5, problem.residual_std, rtol=1e-8)


@pytest.mark.parametrize(("name", "start"), [case for case in BOTH if case not in LONG])
def test_with_differences(name, start):
    """At least 8 digits, as SciPy's best method has of 36 of the 54, and 6 of 50."""
    problem = nist_nonlinear(name)
    result = neula.least_squares(problem.residuals, problem.starts[start])
    assert result.converged
    assert digits(result.x, problem) >= 8
    check_claim(result, problem)


@pytest.mark.parametrize("name", ["misra1a", "hahn1", "rat43", "thurber", "eckerle4"])
def test_at_least_as_near_as_scipy(name):
    problem = nist_nonlinear(name)
    theirs = max(
        digits(
            scipy.optimize.least_squares(
                problem.residuals, problem.starts[1], method=method, x_scale="jac", **tight
            ).x,
            problem,
        )
        for method in ("lm", "trf", "dogbox")
        for tight in ({}, {"ftol": 1e-15, "xtol": 1e-15, "gtol": 1e-15})
    )
    ours = digits(neula.least_squares(problem.residuals, problem.starts[1]).x, problem)
    assert ours >= min(theirs, CERTIFIED_DIGITS) - 0.5


def test_all_curves_of_a_model_at_once():
    """Each converges at its own pace, to what it comes to alone."""
    problems = [nist_nonlinear(name) for name in ("misra1a", "boxbod")]
    x = torch.zeros(2, 14, dtype=torch.float64)
    y, w = torch.zeros_like(x), torch.zeros_like(x)
    for row, problem in enumerate(problems):
        m = len(problem.y)
        x[row, :m], y[row, :m] = (torch.from_numpy(a) for a in (problem.predictors["x"], problem.y))
        w[row, :m] = 1

    def residuals(b):
        return w * (b[:, :1] * (1 - torch.exp(-b[:, 1:] * x)) - y)

    starts = torch.tensor(np.stack([problem.starts[0] for problem in problems]))
    result = neula.least_squares(residuals, starts)
    assert result.converged
    assert result.accepted.tolist() == [True, True]
    assert result.nit[0] != result.nit[1]
    for row, problem in enumerate(problems):
        assert digits(result.x[row], problem) >= CERTIFIED_DIGITS


@pytest.mark.parametrize("second", [50.0, 800.0])
def test_a_plateau_is_no_minimum(second):
    """Where the second parameter has no influence the gradient vanishes, at eight times the certified sum."""
    problem = nist_nonlinear("boxbod")
    with pytest.warns(neula.AccuracyWarning, match="rank 1"):
        result = neula.least_squares(problem.residuals, np.array([1.0, second]))
    assert result.success  # by SciPy's tests
    assert not result.converged
    assert result.digits == 0
    assert result.cost > 4 * problem.residual_sum_of_squares / 2
    assert np.isinf(result.standard_errors()).any()


def test_by_blocks_as_at_once():
    problem = nist_nonlinear("gauss1")
    x, y = (torch.from_numpy(a) for a in (problem.predictors["x"], problem.y))
    blocks = list(zip(x.split(60), y.split(60), strict=True))

    def some(b, block):
        names = dict(zip(problem.parameters, b, strict=True))
        return problem.formula({**names, "x": block[0]}) - block[1]

    start = torch.tensor(problem.starts[0])
    result = neula.least_squares(some, start, blocks=blocks)
    whole = neula.least_squares(problem.residuals, start)
    assert result.converged
    assert result.jac is None
    assert result.observations == 250
    assert digits(result.x, problem) >= CERTIFIED_DIGITS
    np.testing.assert_allclose(result.standard_errors(), whole.standard_errors(), rtol=1e-9)
