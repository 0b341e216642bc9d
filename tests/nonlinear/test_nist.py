"""The 27 problems of NIST from both starts: digits, standard deviations, certificates."""

import numpy as np
import pytest
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


CUDA = torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["misra1a", "hahn1", "rat43", "thurber"])
def test_on_a_gpu(name):
    problem = nist_nonlinear(name)
    result = neula.least_squares(problem.residuals, torch.tensor(problem.starts[1], device=CUDA))
    assert result.x.is_cuda
    assert result.jac.is_cuda
    assert result.converged
    assert log_relative_error(result.x.cpu(), problem.certified) >= 9
    errors = result.standard_errors()
    assert errors.is_cuda
    np.testing.assert_allclose(errors.cpu(), problem.standard_deviations, rtol=1e-7)


@pytest.mark.gpu
def test_many_curves_on_a_gpu():
    x = torch.linspace(0, 4, 60, dtype=torch.float64, device=CUDA)
    generator = torch.Generator(CUDA).manual_seed(0)
    rates = 0.3 + 3 * torch.rand(500, 1, dtype=torch.float64, device=CUDA, generator=generator)
    noise = torch.randn(500, 60, dtype=torch.float64, device=CUDA, generator=generator)
    y = 2 * torch.exp(-rates * x) + 0.5 + 0.01 * noise

    def model(x, a, b, c):
        return a * torch.exp(-b * x) + c

    fit = neula.curve_fit(model, x, y)
    here = neula.curve_fit(model, x.cpu(), y.cpu())
    assert fit.popt.is_cuda
    assert fit.pcov.is_cuda
    assert fit.converged
    np.testing.assert_allclose(fit.popt.cpu(), here.popt, rtol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [False, True])
def test_a_large_jacobian_on_a_gpu(blocks):
    generator = torch.Generator(CUDA).manual_seed(1)
    a = torch.randn(100_000, 50, dtype=torch.float64, device=CUDA, generator=generator) / 7
    truth = torch.randn(50, dtype=torch.float64, device=CUDA, generator=generator)
    y = torch.tanh(a @ truth)
    start = torch.zeros_like(truth)
    if blocks:
        parts = list(zip(a.split(30_000), y.split(30_000), strict=True))
        result = neula.least_squares(lambda x, part: torch.tanh(part[0] @ x) - part[1], start, blocks=parts)
    else:
        result = neula.least_squares(lambda x: torch.tanh(a @ x) - y, start)
    assert result.converged
    assert (result.x - truth).norm() < 1e-7 * truth.norm()
