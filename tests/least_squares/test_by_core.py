"""Small least-squares problems on a CPU: the compiled core, and libraries without it, agree."""

from __future__ import annotations

import warnings
from functools import partial

import numpy as np
import pytest
from tests.matrices import normal_array

import neula
from campaign.oracle import LeastSquares
from neula.engines import FP64
from neula.io.matrices import random_matrix
from neula.kernels.small_problems import seminormal_host
from neula.problems.least_squares import by_core

noise = partial(normal_array, seed=1)

LABEL = "cholesky fp64 + seminormal"


@pytest.fixture(name="way", params=["kernel", "libraries"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "libraries":
        monkeypatch.setattr(seminormal_host, "core", lambda: None)
    elif not seminormal_host.available():
        pytest.skip("no compiled core")
    return request.param


def hard(kind: str, m: int, n: int) -> np.ndarray:
    """Matrices that are hard, each in its way."""
    rng, a = np.random.default_rng(7), noise(m, n, seed=5)
    if kind == "graded rows":
        return a * 10.0 ** rng.uniform(-9, 9, (m, 1))
    if kind == "graded columns":
        return a * 10.0 ** rng.uniform(-40, 40, n)
    if kind == "nearly dependent":
        return np.column_stack([a[:, :-1], a[:, 0] + 1e-7 * a[:, -1]])
    if kind == "dependent":
        return np.column_stack([a[:, :-1], a[:, :-1].sum(1)])
    if kind == "tiny":
        return a * 1e-150
    if kind == "huge":
        return a * 1e150
    return random_matrix("geometric", m, n, cond=float(kind), seed=3).numpy()


KINDS = [
    *("graded rows", "graded columns", "nearly dependent", "dependent", "tiny", "huge"),
    *("1e3", "1e6", "1e9", "1e12", "1e15"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n"), [(9, 4), (40, 12)])
@pytest.mark.parametrize("single", [True, False])
def test_errors_are_bounded_whatever_the_matrix(kind: str, m: int, n: int, single: bool) -> None:
    """Alone, and in a batch with others that are easy: what is said of x holds, or nothing is."""
    a, b = hard(kind, m, n), noise(m, 2)
    given = (a, b) if single else (np.stack([noise(m, n), a]), np.stack([noise(m, 2), b]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", neula.AccuracyWarning)
        result = neula.lstsq(*given)
    x, bounds = (result.x, result.forward_errors) if single else (result.x[1], result.forward_errors[1])
    rank = int(result.ranks if single else result.ranks[1])
    errors = LeastSquares(a, b, rcond=0.0 if rank == n else 1e-13).errors(x, rank)
    assert ((errors <= bounds) | ~(bounds <= 0.1)).all()
    if kind in ("graded columns", "1e3"):
        assert result.converged
        assert (bounds <= 4 * FP64.u).all()


@pytest.mark.parametrize("kind", ["1e7", "1e9", "1e12"])
@pytest.mark.parametrize(("m", "n"), [(20, 20), (70, 30), (129, 17)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_dependent_columns_lose_no_digit(way: str, kind: str, m: int, n: int, dtype: type) -> None:
    """An R of columns that are made orthogonal again is good enough for refinement to the end."""
    a, b = hard(kind, m, n).astype(dtype).astype(np.float64), noise(m, 2).astype(dtype).astype(np.float64)
    result = neula.lstsq(a, b)
    labels = {LABEL, "lu fp64 with pivoting", by_core.SHIFTED, "householder fp64 + seminormal"}
    assert result.converged
    assert {attempt.method for attempt in result.attempts} <= labels
    if way == "kernel" and dtype is np.float64 and kind != "1e7":
        assert result.factorization in (by_core.SHIFTED, "lu fp64 with pivoting")
    errors = LeastSquares(a, b, rcond=0.0).errors(result.x, n)
    assert (errors <= result.forward_errors).all()
    # What rounding leaves of residuals in twice the working precision, and x.
    condition = np.linalg.cond(a / np.linalg.norm(a, axis=0))
    assert (result.forward_errors <= 4 * FP64.u + 64 * m * n * 2.0**-104 * condition**2).all()


@pytest.mark.parametrize(
    ("m", "n"), [(1, 1), (3, 1), (64, 32), (33, 33), (300, 40), (600, 100), (128, 128), (4096, 3), (2000, 20)]
)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_all_sizes(way: str, m: int, n: int, dtype: type) -> None:
    a, b = noise(m, n).astype(dtype), noise(m, seed=2).astype(dtype)
    result = neula.lstsq(a, b)
    assert result.converged
    assert (result.x.dtype, result.x.shape, result.rank) == (dtype, (n,), n)
    if way == "kernel":
        assert [attempt.method for attempt in result.attempts] == [LABEL]
    expected = np.linalg.lstsq(a.astype(np.float64), b.astype(np.float64), rcond=None)[0]
    columns = np.linalg.norm(a.astype(np.float64), axis=0)
    error = np.linalg.norm(columns * (result.x - expected)) / np.linalg.norm(columns * expected)
    # That of LAPACK counts, too.
    condition = np.linalg.cond(a.astype(np.float64) / columns)
    assert error <= result.forward_error + 10 * m**0.5 * FP64.u * condition**2
    residual = np.linalg.norm(b - a.astype(np.float64) @ result.x.astype(np.float64))
    assert result.residual_norm == pytest.approx(residual, rel=1e-6, abs=1e-7)


def test_a_batch_goes_on_with_what_is_left(way: str) -> None:
    """NaN, no full rank, a condition number that no Gram matrix holds, beside what is easy."""
    a, b = noise(6, 12, 4), noise(6, 12, 1)
    a[1, 2, 2], b[2, 3, 0] = np.nan, np.inf
    a[3, :, 3] = a[3, :, 0]
    a[4] = hard("1e9", 12, 4)
    with pytest.warns(neula.AccuracyWarning, match=r"A\[1\], A\[2\]"):
        result = neula.lstsq(a, b)
    assert result.accepted.tolist() == [True, False, False, True, True, True]
    assert result.ranks.tolist() == [4, 0, 0, 3, 4, 4]
    assert np.isnan(result.x[1:3]).all()
    assert result.attempts[0].method == (by_core.DEPENDENT if way == "kernel" else LABEL)
    for i in (0, 4, 5):
        alone = neula.lstsq(a[i], b[i])
        assert np.allclose(alone.x, result.x[i], rtol=1e-7)
    assert np.array_equal(result.x[[0, 5]], neula.lstsq(a[[0, 5]], b[[0, 5]]).x)


@pytest.mark.parametrize("shape", [(5, 3), (4, 5, 3)])
def test_exact_zeros(shape: tuple[int, ...]) -> None:
    """Zero is exact for b = 0, and nothing is warned of."""
    a = noise(*shape)
    b = noise(*shape[:-1], 2)
    b[..., 1] = 0.0
    result = neula.lstsq(a, b)
    assert result.converged
    assert (result.x[..., 1] == 0).all()
    assert (result.forward_errors[..., 1] == 0).all()
    assert (result.x[..., 0] != 0).any()


def test_accuracies_that_are_coarser() -> None:
    """Float64 to the accuracy of float32, and float32 to all digits."""
    a, b = noise(30, 6), noise(30)
    coarse = neula.lstsq(a, b, accuracy="fp32")
    assert (coarse.accuracy, coarse.converged, coarse.x.dtype) == ("fp32", True, np.float64)
    exact = LeastSquares(a, b[:, None], rcond=0.0)
    assert exact.errors(coarse.x[:, None], 6)[0] <= coarse.forward_error
    narrow = neula.lstsq(a.astype(np.float32), b.astype(np.float32), certify="forward")
    assert narrow.converged
    assert narrow.forward_error <= 2.0**-24 * 1.001


def test_what_is_made_later_is_that_of_the_problem() -> None:
    a, b = noise(20, 4), noise(20)
    result = neula.lstsq(a, b)
    (attempt,) = result.attempts
    assert attempt.accepted
    assert f"{result.backward_error:.1e}" in attempt.reason
    expected = np.linalg.inv(a.T @ a) * np.sum((b - a @ result.x) ** 2) / 16
    assert np.allclose(result.covariance(), expected, rtol=1e-10)


def test_too_little_memory_leaves_it_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_core, "_solved", lambda *_: None)
    assert neula.lstsq(noise(9, 3), noise(9)).converged
    assert neula.lstsq(noise(2, 9, 3), noise(2, 9, 1)).converged


@pytest.mark.parametrize("shape", [(10, 4), (60, 30)])
def test_conditions(shape: tuple[int, int]) -> None:
    a = np.stack([hard(cond, *shape) for cond in ("1e0", "1e1", "1e3", "1e5")])
    result = neula.lstsq(a, noise(4, shape[0], 1))
    true = np.linalg.cond(a / np.linalg.norm(a, axis=1, keepdims=True))
    assert ((result.conditions >= true / 10) & (result.conditions <= 10 * true)).all()


def test_float32_is_rounded_once() -> None:
    a, b = (x.astype(np.float32) for x in (noise(2, 100, 50), noise(2, 100, 2)))
    result = neula.lstsq(a, b)
    assert result.x.dtype == np.float32
    for i in range(2):
        exact = LeastSquares(a[i].astype(float), b[i].astype(float), rcond=1e-6)
        assert (exact.errors(result.x[i].astype(float), 50) <= result.forward_errors[i]).all()
    assert (result.forward_errors <= 1.2 * 2.0**-24).all()
