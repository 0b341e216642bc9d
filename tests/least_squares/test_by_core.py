"""Small least-squares problems on a CPU, by the compiled core and by libraries without it."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from tests.matrices import normal_array

import neula
from campaign.oracle import LeastSquares
from exact_solutions import error_of
from neula.engines import FP64
from neula.io.matrices import random_matrix
from neula.kernels.small_problems import seminormal_host
from neula.problems.least_squares import by_core
from scaled_errors import scaled_errors
from shortest_solutions import UNITS, integers, scaled, shortest

noise = partial(normal_array, seed=1)

pytestmark = pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")
U = FP64.u
LABEL = "cholesky fp64 + seminormal"


@pytest.fixture(name="way", params=["core", "libraries"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the compiled core and without."""
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
    result = neula.lstsq(*given)
    x, bounds = (result.x, result.forward_errors) if single else (result.x[1], result.forward_errors[1])
    rank = int(result.ranks if single else result.ranks[1])
    errors = LeastSquares(a, b, rcond=0.0 if rank == n else 1e-13).errors(x, rank)
    assert ((errors <= bounds) | ~(bounds <= 0.1)).all()
    if kind in ("graded columns", "1e3"):
        assert result.converged
        assert (bounds <= 4 * U).all()


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
    if way == "core" and dtype is np.float64 and kind != "1e7":
        assert result.factorization in (by_core.SHIFTED, "lu fp64 with pivoting")
    errors = LeastSquares(a, b, rcond=0.0).errors(result.x, n)
    assert (errors <= result.forward_errors).all()
    # What rounding leaves of residuals in twice the working precision, and x.
    condition = np.linalg.cond(a / np.linalg.norm(a, axis=0))
    assert (result.forward_errors <= 4 * U + 64 * m * n * 2.0**-104 * condition**2).all()


@pytest.mark.parametrize(
    ("m", "n"), [(1, 1), (3, 1), (64, 32), (33, 33), (300, 40), (600, 100), (128, 128), (4096, 3), (2000, 20)]
)
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_all_sizes(way: str, m: int, n: int, dtype: type) -> None:
    a, b = noise(m, n).astype(dtype), noise(m, seed=2).astype(dtype)
    result = neula.lstsq(a, b)
    assert result.converged
    assert (result.x.dtype, result.x.shape, result.rank) == (dtype, (n,), n)
    if way == "core":
        assert [attempt.method for attempt in result.attempts] == [LABEL]
    expected = np.linalg.lstsq(a.astype(np.float64), b.astype(np.float64), rcond=None)[0]
    condition = np.linalg.cond(a.astype(np.float64) / np.linalg.norm(a.astype(np.float64), axis=0))
    # The error of LAPACK counts, too.
    assert scaled_errors(a, result.x, expected) <= result.forward_error + 10 * m**0.5 * U * condition**2
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
    assert result.attempts[0].method == (by_core.DEPENDENT if way == "core" else LABEL)
    for i in (0, 4, 5):
        alone = neula.lstsq(a[i], b[i])
        assert np.allclose(alone.x, result.x[i], rtol=1e-7)
    assert np.array_equal(result.x[[0, 5]], neula.lstsq(a[[0, 5]], b[[0, 5]]).x)


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


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("certify", ["backward", "forward"])
@pytest.mark.parametrize(
    ("m", "n", "rank"), [(3, 2, 1), (10, 3, 2), (9, 6, 4), (12, 12, 7), (5, 9, 3), (4, 7, 4), (20, 8, 7)]
)
def test_dependent_columns(
    m: int, n: int, rank: int, certify: str, units: str, rng: np.random.Generator
) -> None:
    for _ in range(2):
        factors, b = scaled(rng, integers(rng, m, n, rank), UNITS[units]), rng.standard_normal(m)
        a = factors[0] @ factors[1]
        result = neula.lstsq(a, b, certify=certify)
        error = error_of(a, result.x, shortest(factors, b))
        assert result.converged or UNITS[units] > 1 or certify == "forward"
        if result.converged:
            assert result.rank == rank
            assert error <= result.forward_error * (1 + 1e-9)
            assert result.backward_error <= result.tolerance


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize(("m", "n"), [(1, 2), (2, 3), (4, 7), (6, 20), (9, 10)])
def test_fewer_rows_than_columns(m: int, n: int, units: str, rng: np.random.Generator) -> None:
    for _ in range(3):
        left, right = scaled(rng, integers(rng, m, n, m), UNITS[units])
        a, b = left @ right, rng.standard_normal(m)
        a[:, -1] = 0.0
        right[:, -1] = 0.0
        result = neula.lstsq(a, b)
        assert result.converged
        assert error_of(a, result.x, shortest((left, right), b)) <= result.forward_error <= 2 * U
        assert result.backward_error <= 2 * U


@pytest.mark.parametrize("spread", [0, 2, 10, 30])
def test_rows_of_all_sizes(spread: int, rng: np.random.Generator) -> None:
    left, right = integers(rng, 5, 9, 5)
    left *= np.exp2(rng.integers(-spread, spread + 1, (5, 1)))
    a, b = left @ right, rng.standard_normal(5)
    result = neula.lstsq(a, b, rcond=1e-300)
    assert error_of(a, result.x, shortest((left, right), b)) <= result.forward_error
    if result.converged:
        assert result.forward_error <= 2 * U


def test_rows_that_are_too_small_do_not_count(rng: np.random.Generator) -> None:
    """The rank is that of the weighted matrix, whose rows are not scaled."""
    a, b = rng.standard_normal((2, 5)), rng.standard_normal(2)
    result = neula.lstsq(a, b, weights=np.array([1.0, 1e-20]))
    assert result.rank == 1
    expected = a[0] * b[0] / (a[0] @ a[0])
    assert np.linalg.norm(result.x - expected) <= 8 * U * np.linalg.norm(expected)


@pytest.mark.parametrize(("m", "n", "rank"), [(300, 40, 30), (150, 120, 119), (200, 200, 150)])
def test_larger_ones(m: int, n: int, rank: int, rng: np.random.Generator) -> None:
    """Against an SVD: singular values that are dropped are rounding errors."""
    a, b = rng.standard_normal((m, rank)) @ rng.standard_normal((rank, n)), rng.standard_normal(m)
    u, s, vh = np.linalg.svd(a)
    expected = (vh[:rank].T / s[:rank]) @ (u[:, :rank].T @ b)
    result = neula.lstsq(a, b)
    assert result.converged
    assert result.rank == rank
    error = np.linalg.norm(result.x - expected) / np.linalg.norm(expected)
    # That of the reference: Wedin's bound of the SVD.
    assert error <= 8 * (m + n) ** 0.5 * U * (s[0] / s[rank - 1]) ** 2
    assert result.backward_error <= 8 * n**0.5 * U
    assert result.forward_error <= 1e-6


def test_a_gap_is_needed(rng: np.random.Generator) -> None:
    """Singular values near the threshold leave the rank in doubt."""
    q, p = (np.linalg.qr(rng.standard_normal((m, 6)))[0] for m in (20, 6))
    graded, b = (q * [1.0, 0.5, 1e-4, 3e-12, 1e-12, 3e-13]) @ p.T, rng.standard_normal(20)
    with pytest.warns(neula.AccuracyWarning):
        assert not neula.lstsq(graded, b, rcond=1e-12).converged
    clear = neula.lstsq(graded, b, rcond=1e-8)
    assert clear.converged
    assert clear.rank == 3
    huge = neula.lstsq(1e200 * graded, b, rcond=1e-8)
    assert np.linalg.norm(1e200 * huge.x - clear.x) <= 1e-6 * np.linalg.norm(clear.x)


def test_updates_leave_the_space_of_the_rows() -> None:
    """R is so ill-conditioned that the first x is far too long: errors of what shortens it stay."""
    rows = [[-4200009, -1199933, 6000018, 600003], [1400044, 400001, -2000068, -200008]]
    a = np.array([*rows, [2799994, 799949, -3999994, -400000]], dtype=float)
    b = np.array([1200006.0, -400016.0, -800000.0])
    result = neula.lstsq(a, b, rcond=1e-15)
    exact = [Fraction(x) for x in np.linalg.lstsq(a, b, rcond=1e-15)[0].tolist()]
    assert not result.converged or error_of(a, result.x, exact) <= 1e-3


def test_rows_that_depend_beyond_the_precision_of_a_gram_matrix() -> None:
    """Two rows in other units, and a column that the third one has not: singular values 1, 0.5, 7e-52."""
    tiny, large = 2.0**-106, 2.0**92
    rows = [[-45, 10, 30, -30, -40], [0, -30, -50, -40, 50], [-5, 10, -15, -40, 10]]
    a = np.array(rows, dtype=float) * np.array([[tiny], [large], [tiny]])
    for b in (np.array([-2e-5 * tiny, large, -1e-5 * tiny]), np.ones(3)):
        assert neula.lstsq(a, b).rank == 2


def test_rounded_weights_turn_the_rows(rng: np.random.Generator) -> None:
    """The shortest solution is one of the rows as they are, without rounding."""
    a = np.array([[2e7, 6e7, 3.0], [5e7, 1.5e8, 3.0]])
    for weights in rng.uniform(0.5, 1.5, (20, 2)):
        result = neula.lstsq(a, np.array([3.0, 3.0]), weights=weights)
        error = error_of(a, result.x, [Fraction(0), Fraction(0), Fraction(1)])
        assert error <= result.forward_error * (1 + 1e-9) or not result.converged
    g, s = rng.standard_normal((2, 12, 1))
    tall = np.concatenate([1e6 * g, 3e6 * g, s], 1)
    assert neula.lstsq(tall, s[:, 0], weights=rng.random(12) + 0.5).factorization == "svd fp64"


def test_a_row_of_zeros_in_r() -> None:
    a = np.diag(np.arange(1.0, 121))
    a[:, 1], a[1] = a[:, 0], 0.0
    result = neula.lstsq(a, np.ones(120))
    assert result.rank == 119
    assert np.abs(a @ result.x - (np.arange(120) != 1)).max() <= 1e-12


def test_what_is_dropped_counts(rng: np.random.Generator) -> None:
    """Singular values of 1e-6 below a threshold of 1e-4: their square times the condition number."""
    m, n, rank = 30, 8, 5
    q, p = (np.linalg.qr(rng.standard_normal((k, n)))[0] for k in (m, n))
    s = np.array([1.0, 0.9, 0.8, 0.7, 0.6, 1e-6, 5e-7, 1e-7])
    a, b = (q * s) @ p.T, rng.standard_normal(m)
    norms = np.linalg.norm(a, axis=0)
    u, t, vh = np.linalg.svd(a / norms)
    rows = norms[:, None] * vh[:rank].T
    expected = rows @ np.linalg.solve(rows.T @ rows, u[:, :rank].T @ b / t[:rank])
    result = neula.lstsq(a, b, rcond=1e-4)
    assert result.rank == rank
    assert scaled_errors(a, result.x, expected) <= max(result.forward_error, 1e-13)


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("dtype", [np.float64, np.complex64])
@pytest.mark.parametrize("damp", [1e-11, 1e-15, 1e-30, 1e-300])
def test_damping_of_a_zero_column(damp: float, dtype: type, engine: str) -> None:
    """Of rank one without its unknown, which is zero: ``x1 = x2 = b / (2 + damp^2)``."""
    a = np.array([[3.0, 3.0, 0.0]]).astype(dtype)
    result = neula.lstsq(a, a[:, 0], damp=damp, weights=[7.0], rcond=1e-8, engine=engine)
    assert (result.rank, result.converged) == (2, True)
    assert np.abs(result.x - [0.5, 0.5, 0.0]).max() <= 0.5 * result.forward_error <= 100 * U
