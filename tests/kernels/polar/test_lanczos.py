"""Lanczos steps: the references by definition, and the kernels, interpreted or on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, normal, variants

from neula.kernels.polar import lanczos

advance = variants(lanczos.advance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 70])
def test_steps_make_a_tridiagonal_matrix(advance: Callable, dtype: torch.dtype, k: int) -> None:
    a = normal(2, k, k, dtype=dtype)
    a = a + a.mT
    steps = min(k, 5)
    basis = torch.zeros(2, steps, k, dtype=dtype, device=DEVICE)
    start = normal(2, k, dtype=dtype)
    basis[:, 0] = start / start.norm(dim=1, keepdim=True)
    t = torch.zeros(2, steps, steps, dtype=dtype, device=DEVICE)
    for j in range(steps):
        image = (a @ basis[:, j, :, None])[..., 0].contiguous()
        t[:, j, j], beside = advance(image, basis, j)
        if j + 1 < steps:
            t[:, j, j + 1] = t[:, j + 1, j] = beside
    noise = 30 * k**0.5 * torch.finfo(dtype).eps
    assert (basis @ basis.mT - torch.eye(steps, device=DEVICE)).abs().max() <= noise
    assert (basis @ a @ basis.mT - t).norm() <= noise * a.norm()


def test_an_invariant_subspace_ends_in_zeros(advance: Callable) -> None:
    basis = torch.zeros(3, 3, 40, device=DEVICE)
    basis[:, 0, 0] = 1.0
    image = torch.zeros(3, 40, device=DEVICE)
    image[0, 0], image[1, 0], image[1, 1], image[2, 3] = 2.0, 2.0, 1e-5, math.nan
    diagonal, beside = advance(image, basis, 0)
    assert diagonal[:2].tolist() == [2.0, 2.0]
    assert beside[:2].tolist() == [0.0, 0.0]
    assert not basis[:2, 1].any()
    assert not beside[2].isfinite()


@pytest.mark.parametrize("n", [1, 2, 10])
def test_extreme_values(n: int) -> None:
    scales = torch.tensor([1.0, 1e-8, 1e200, 0.0], dtype=torch.float64, device=DEVICE)[:, None]
    d, b = normal(4, n) * scales, normal(4, n + 1)[:, :n] * scales
    b[0, : n // 2] = 0.0
    b[:, -1] = math.nan
    if n == 1:
        b[:] = math.nan
    lower = torch.diag_embed(b[:, :-1], -1)
    values = torch.linalg.eigvalsh(torch.diag_embed(d) + lower + lower.mT)
    found = lanczos.extreme_values(d, b)
    bound = 1e-14 * values.abs().amax(1)
    for value, exact in zip(found, (values[:, 0], values[:, -1]), strict=True):
        assert ((value - exact).abs() <= n * bound).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_nan(bad: float) -> None:
    d, b = normal(3, 4), normal(3, 4)
    d[1, 2], b[2, 0] = bad, bad
    for value in lanczos.extreme_values(d, b):
        assert value.isfinite().tolist() == [True, False, False]
