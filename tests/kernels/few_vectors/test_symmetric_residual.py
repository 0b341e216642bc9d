"""Scales and residuals of Cholesky factors against definitions."""

from __future__ import annotations

import math

import pytest
import torch
from tests.devices import DEVICE

from neula.kernels.few_vectors import triangle
from neula.kernels.few_vectors.triangle import diagonal_scales, factor_residuals


def test_scales() -> None:
    numbers = [1.0, 2.0, 0.5, 3.0, 1e-45, 3e38, 0.0, -1.0, math.nan, 2.0**-126, 1e-20]
    a = torch.diag(torch.tensor(numbers, device=DEVICE)).repeat(2, 1, 1)
    scales = diagonal_scales(a)
    assert scales.shape == (2, len(numbers))
    assert scales.dtype == torch.float64
    assert torch.equal(torch.frexp(scales)[0], torch.full_like(scales, 0.5)), "powers of two"
    scaled = torch.tensor(numbers, device=DEVICE).double() * scales.square()
    positive = scaled > 0
    assert ((scaled >= 0.5) & (scaled < 2))[positive].all()
    assert (scales[~positive] == 1).all()


def test_scales_of_subnormal_numbers_in_double_precision() -> None:
    a = torch.full((1, 1, 1), 2.0**-1074, dtype=torch.float64)
    scale = diagonal_scales(a)
    assert 0.5 <= float(a * scale * scale) < 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("n", [1, 33, 64])
def test_residuals(dtype: torch.dtype, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    g = torch.randn(3, n, 2 * n, generator=generator, dtype=torch.float64)
    units = torch.ldexp(torch.ones(n, dtype=torch.float64), torch.arange(n) % 5 - 2)
    exact = g @ g.mT / n * units * units[:, None]
    lower, a = torch.linalg.cholesky(exact).to(dtype).to(DEVICE), exact.to(dtype).to(DEVICE)
    probes = torch.randn(n, triangle.VECTORS, generator=generator, dtype=torch.float64).to(DEVICE)
    d, wide = diagonal_scales(a)[..., None], lower.double()
    image = d * (a.double() @ (d * probes))
    difference = image - d * (wide @ (wide.mT @ (d * probes)))
    above = torch.ones(n, n, dtype=torch.bool, device=DEVICE).triu(1)
    order = torch.tensor([0, 0, 7], dtype=torch.int32, device=DEVICE)
    given = a.masked_fill(above, math.nan), lower.mT.contiguous().mT, order, probes
    residual, orders = factor_residuals(*given)
    assert orders.tolist() == [0, 0, 7]
    assert residual.isnan().tolist() == [False, False, True]
    expected = torch.linalg.matrix_norm(difference) / torch.linalg.matrix_norm(image)
    # Rounding errors of sums of n products, of both terms.
    assert ((residual - expected)[:2].abs() <= 16 * n * 2.0**-53).all()


@pytest.mark.parametrize("n", [5, 70])
def test_zero_and_what_is_not_a_number(n: int) -> None:
    a = torch.eye(n, device=DEVICE).repeat(3, 1, 1)
    a[2] = 0.0
    lower = a.clone()
    lower[1, 3, 3] = math.nan
    probes = torch.ones(n, triangle.VECTORS, dtype=torch.float64, device=DEVICE)
    residual = factor_residuals(a, lower, torch.zeros(3, dtype=torch.int32, device=DEVICE), probes)[0]
    assert residual.isnan().tolist() == [False, True, False]
    assert residual[::2].tolist() == [0.0, 0.0]
