"""Batches of least-squares problems on a CPU, by the compiled core and without it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import neula
from campaign.oracle import LeastSquares
from neula.engines import FP32
from neula.io.matrices import random_matrix
from neula.kernels.small_problems import seminormal_host

U64 = 2.0**-53


@pytest.fixture(params=["core", "chain"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "chain":
        monkeypatch.setattr(seminormal_host, "core", lambda: None)
    elif not seminormal_host.available():
        pytest.skip("no compiled core")
    return request.param


def batch(m: int, n: int, conditions: tuple[float, ...], k: int = 2) -> tuple[np.ndarray, np.ndarray]:
    a = [random_matrix("geometric", m, n, cond=cond, seed=seed) for seed, cond in enumerate(conditions)]
    return torch.stack(a).numpy(), np.random.default_rng(1).standard_normal((len(a), m, k))


@pytest.mark.parametrize(("m", "n"), [(1, 1), (5, 1), (9, 9), (16, 6), (33, 16), (120, 40), (200, 170)])
@pytest.mark.parametrize("certify", ["backward", "forward"])
def test_forward_errors_are_bounds(m: int, n: int, certify: str) -> None:
    a, b = batch(m, n, (1e0, 1e1, 1e2))
    found = neula.lstsq(a, b, certify=certify)
    assert found.converged
    norms = np.linalg.norm(b - a @ found.x, axis=1)
    scale = np.linalg.norm(b, axis=1)
    assert np.allclose(found.residual_norm, norms.ravel(), rtol=1e-12, atol=1e-14 * scale.max())
    for i in range(len(a) if n < 100 else 0):  # exact arithmetic takes its time
        errors = LeastSquares(a[i], b[i], rcond=1e-14).errors(found.x[i], n)
        assert (errors <= found.forward_errors[i]).all()
    if m * n <= 4096 or certify == "forward":
        assert (found.forward_errors <= 2 * U64).all()


@pytest.mark.parametrize("shape", [(16, 6), (100, 50)])
def test_float32_is_rounded_once(shape: tuple[int, int]) -> None:
    a, b = (x.astype(np.float32) for x in batch(*shape, (1.0, 30.0)))
    result = neula.lstsq(a, b)
    assert result.converged
    assert result.x.dtype == np.float32
    assert len(result.attempts) == 1
    for i in range(len(a)):
        exact = LeastSquares(a[i].astype(float), b[i].astype(float), rcond=1e-6)
        assert (exact.errors(result.x[i].astype(float), shape[1]) <= result.forward_errors[i]).all()
    assert (result.forward_errors <= 1.2 * FP32.u).all()


def test_hard_members_change_nothing_for_the_rest() -> None:
    m, n = 20, 7
    a, b = batch(m, n, (1e1,) * 7, 1)
    easy, hard = neula.lstsq(a, b), a.copy()
    hard[1] *= 10.0 ** np.linspace(-100, 100, n)
    hard[2, :, 3] = hard[2, :, 2]
    hard[3] = random_matrix("geometric", m, n, cond=1e9).numpy()
    hard[5, 0, 0] = np.nan
    with pytest.warns(neula.AccuracyWarning):
        result = neula.lstsq(hard, b)
    assert result.accepted.tolist() == [True, True, True, True, True, False, True]
    assert result.ranks.tolist()[2] == n - 1
    for i in (0, 1, 3, 4, 6):
        exact = LeastSquares(hard[i], b[i], rcond=1e-14)
        assert (exact.errors(result.x[i], n) <= result.forward_errors[i]).all()
        assert (result.forward_errors[i] <= 2 * U64).all()
    same = [0, 4, 6]
    assert np.allclose(result.x[same], easy.x[same], rtol=4 * U64, atol=0)
    assert np.allclose(result.forward_errors[same], easy.forward_errors[same], rtol=1e-2)


def test_exact_zeros() -> None:
    a, b = batch(8, 3, (1.0, 2.0, 3.0), 2)
    b[1, :, 0] = 0
    result = neula.lstsq(a, b)
    assert result.converged
    assert not result.x[1, :, 0].any()
    assert result.forward_errors[1, 0] == 0


@pytest.mark.parametrize("shape", [(10, 4), (60, 30)])
def test_conditions(shape: tuple[int, int]) -> None:
    a, b = batch(*shape, (1e0, 1e1, 1e3, 1e5), 1)
    found = neula.lstsq(a, b).conditions
    true = np.linalg.cond(a / np.linalg.norm(a, axis=1, keepdims=True))
    assert (found >= true / 10).all()
    assert (found <= 10 * true).all()
