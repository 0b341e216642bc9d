"""Batches of small least-squares problems on a CPU: in a few passes, as far as that is certain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import neula
from campaign.oracle import LeastSquares
from least_squares_options import options_of
from neula.algorithms.lapack.seminormals import Seminormals
from neula.engines import FP32, CpuEngine
from neula.io.matrices import random_matrix
from neula.problems.least_squares.batch_by_lapack import batch_by_lapack
from neula.problems.least_squares.prepared import LeastSquaresProblems
from neula.problems.least_squares.problem import LeastSquaresSolutions

U64 = 2.0**-53

OPTIONS = options_of(CpuEngine("cpu"), rcond=1e-14)


def batch(m: int, n: int, conditions: tuple[float, ...], k: int = 2) -> tuple[np.ndarray, np.ndarray]:
    a = [random_matrix("geometric", m, n, cond=cond, seed=seed) for seed, cond in enumerate(conditions)]
    return torch.stack(a).numpy(), np.random.default_rng(1).standard_normal((len(a), m, k))


def accepted_of(a: np.ndarray, found: LeastSquaresSolutions) -> torch.Tensor:
    return OPTIONS.limits(a.shape[1:]).accept(found.evidence)


def solved(a: np.ndarray, b: np.ndarray, **asked: object) -> object:
    options = replace(OPTIONS, **asked)
    problems = LeastSquaresProblems(torch.from_numpy(a), torch.from_numpy(b), options)
    return batch_by_lapack(problems, None, label="", together=lambda *_: pytest.fail("not this way")).values


@pytest.mark.parametrize(("m", "n"), [(1, 1), (5, 1), (9, 9), (16, 6), (33, 16), (120, 40)])
@pytest.mark.parametrize("certify", [False, True])
def test_forward_errors_are_bounds(m: int, n: int, certify: bool) -> None:
    a, b = batch(m, n, (1e0, 1e1, 1e2))
    found = solved(a, b, forward=certify)
    assert accepted_of(a, found).all()
    for i in range(len(a)):
        errors = LeastSquares(a[i], b[i], rcond=1e-14).errors(found.x[i].numpy(), n)
        assert (torch.from_numpy(errors) <= found.forward_error[i]).all()
        residual = b[i] - a[i] @ found.x[i].numpy()
        norms = np.linalg.norm(residual, axis=0)
        assert np.allclose(found.residual_norm[i], norms, rtol=1e-12, atol=1e-14 * np.linalg.norm(b[i]))
    if m * n <= 4096 or certify:
        assert (found.forward_error <= 2 * U64).all()


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
    assert np.array_equal(result.x[same], easy.x[same])
    assert np.array_equal(result.forward_errors[same], easy.forward_errors[same])


def test_what_is_passed_on_is_not_known() -> None:
    a, b = batch(12, 5, (1e1, 1e12, 1e2), 1)
    found = solved(a, b)
    assert accepted_of(a, found).tolist() == [True, False, True]
    assert found.x[1].isnan().all()
    assert found.backward_error[1].isnan()


def test_what_two_slices_leave_is_refined_with_three() -> None:
    a, b = batch(12, 4, (1e0, 1e3, 1e1), 1)
    found = solved(a, b)
    assert accepted_of(a, found).all()
    for i in range(3):
        errors = torch.from_numpy(LeastSquares(a[i], b[i], rcond=1e-14).errors(found.x[i].numpy(), 4))
        assert (errors <= found.forward_error[i]).all()
        assert (found.forward_error[i] <= 2 * U64).all()


def test_exact_zeros() -> None:
    a, b = batch(8, 3, (1.0, 2.0, 3.0), 2)
    b[1, :, 0] = 0
    result = neula.lstsq(a, b)
    assert result.converged
    assert not result.x[1, :, 0].any()
    assert result.forward_errors[1, 0] == 0


@pytest.mark.parametrize("shape", [(10, 4), (60, 30)])
def test_conditions(shape: tuple[int, int]) -> None:
    a, _ = batch(*shape, (1e0, 1e1, 1e3, 1e5), 1)
    found = Seminormals(a, 3)
    true = np.linalg.cond(a / np.linalg.norm(a, axis=1, keepdims=True))
    assert (found.condition[:, 0] >= true / 10).all()
    assert (found.condition[:, 0] <= 10 * true).all()
    assert (found.condition_bound[:, 0] >= true * (1 - 1e-6)).all()


def test_more_than_fit_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = batch(9, 4, (1.0, 10.0, 100.0, 3.0, 4.0), 1)
    whole = neula.lstsq(a, b)
    monkeypatch.setattr("neula.problems.least_squares.batch_by_lapack.ELEMENTS", 2 * 36)
    parts = neula.lstsq(a, b)
    assert parts.converged
    assert np.allclose(parts.x, whole.x, rtol=U64, atol=0)
