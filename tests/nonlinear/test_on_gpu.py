"""Fits of tensors on a GPU."""

import numpy as np
import pytest
import torch

import neula
from neula.io.datasets import log_relative_error, nist_nonlinear

CUDA = torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["misra1a", "hahn1", "rat43", "thurber"])
def test_sets_of_nist(name):
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
def test_many_curves():
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
def test_a_large_jacobian(blocks):
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
