"""Errors of factorizations and products against NumPy, in one block of rows and in many."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from neula.io.matrices import random_matrix
from neula.papers import errors


@pytest.fixture(params=[errors.BLOCK_ELEMENTS, 100, 1], ids=lambda elements: f"blocks of {elements}")
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 rows, and of a few: 8 or 1 that are 12 columns wide."""
    monkeypatch.setattr(errors, "BLOCK_ELEMENTS", request.param)


@pytest.mark.usefixtures("blocks")
def test_backward_error_is_that_of_numpy() -> None:
    a = random_matrix("geometric", 40, 12, cond=1e4, seed=1)
    q, r = torch.linalg.qr(a.float())
    r = r * 1.01
    expected = np.linalg.norm(a.numpy() - q.double().numpy() @ r.double().numpy()) / np.linalg.norm(a.numpy())
    assert errors.backward_error(a, q, r) == pytest.approx(expected, rel=1e-12)
    assert 0.009 < expected < 0.011
    assert math.isnan(errors.backward_error(a, q * math.nan, r))


@pytest.mark.usefixtures("blocks")
def test_orthogonality_defect_is_that_of_numpy() -> None:
    q = 1.01 * torch.linalg.qr(random_matrix("normal", 40, 12, dtype=torch.float32, seed=3))[0]
    exact = q.double().numpy()
    # Sums of 40 products, which are smaller than 1, in any order.
    expected = pytest.approx(exact.T @ exact - np.eye(12), abs=40 * 2.0**-53)
    assert errors.orthogonality_defect(q).numpy() == expected


def test_product_error_is_that_of_numpy() -> None:
    a, b = (random_matrix("uniform", 20, 20, dtype=torch.float32, seed=seed) for seed in (1, 2))
    exact = a.double().numpy() @ b.double().numpy()
    expected = np.linalg.norm((a @ b).numpy() * 1.01 - exact) / np.linalg.norm(exact)
    assert errors.product_error(1.01 * (a @ b), a, b) == pytest.approx(expected, rel=1e-5)
    assert errors.product_error(a.double() @ b.double(), a, b) == 0.0


def test_growth_is_the_exponent() -> None:
    for power in (-0.5, 0.0, 1.0, 2.0):
        rows = [{"cond": 10.0**k, "e": 3e-4 * 10 ** (power * k)} for k in range(1, 6)]
        assert errors.growth(rows, "e", "cond") == pytest.approx(power, abs=1e-12)
