"""Errata: algorithms as printed fail, as meant they agree with theory; formulas as meant are right."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from measured import figures_by_name, stored

from neula.io.matrices import random_matrix
from neula.papers.data import Measurements
from neula.papers.figure import ExperimentScale, Setting
from neula.papers.qr import QR_PAPER
from neula.papers.qr import iterations as errata
from neula.papers.qr.least_squares import right_hand_side

OF_PAPER = figures_by_name(QR_PAPER)


@pytest.fixture(scope="module")
def rows() -> Measurements:
    return stored(errata.measure_errata(Setting(ExperimentScale.small), (256, 64)))


def test_claims_hold(rows: Measurements) -> None:
    for claim in OF_PAPER["errata"].claims:
        verdict = claim.judge(rows)
        assert verdict.holds, f"{claim.text}: {verdict.measured}"


def test_as_meant_is_conjugate_gradients_of_the_preconditioned_problem() -> None:
    """One step along ``R^-1 R^-T A^T b`` to the minimum on that line, by NumPy."""
    a = random_matrix("normal", 30, 5, seed=1)
    b, r = right_hand_side(a), torch.linalg.qr(random_matrix("normal", 30, 5, seed=2))[1]
    direction = np.linalg.solve(r.numpy(), np.linalg.solve(r.numpy().T, a.numpy().T @ b.numpy()))
    image = a.numpy() @ direction
    x = direction * float((image.T @ b.numpy()).item() / (image.T @ image).item())
    expected = np.linalg.norm(a.numpy().T @ (a.numpy() @ x - b.numpy()))
    updated, returned = next(errata.MEANT.run(a, b, r))
    assert updated == pytest.approx(expected, rel=1e-10)
    assert returned == pytest.approx(expected, rel=1e-10)


def test_with_the_exact_factor_one_step_is_enough_as_meant_only() -> None:
    a = random_matrix("normal", 40, 6, seed=1)
    b, r = right_hand_side(a), torch.linalg.qr(a)[1]
    start = float((a.T @ b).norm())
    found = {version.name: next(version.run(a, b, r))[1] / start for version in (errata.HPDC, errata.MEANT)}
    assert found[errata.MEANT.name] < 1e-12
    assert found[errata.HPDC.name] > 0.1
    assert math.isnan(next(errata.ARXIV.run(a, b, r))[0])


@pytest.mark.parametrize("r", [4, 32])
def test_formula_4_5_needs_the_square_of_the_block(r: int) -> None:
    q = 400
    n = q * r
    printed = 2 * sum((q - k) * (k - 1) * 2 for k in range(1, q + 1))
    assert printed * r * r == pytest.approx(2 / 3 * q * n * n, rel=0.01)
