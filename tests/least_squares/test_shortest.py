"""Shortest solutions on a CPU: of dependent columns, and of fewer rows than columns."""

from __future__ import annotations

import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch

import neula
from exact_solutions import error_of
from neula.engines import FP64
from neula.kernels.small_problems import seminormal_host
from shortest_solutions import UNITS, integers, scaled, shortest

U = FP64.u


@pytest.fixture(params=["core", "chain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the compiled core and without."""
    if request.param == "chain":
        monkeypatch.setattr(seminormal_host, "core", lambda: None)
    elif not seminormal_host.available():
        pytest.skip("no compiled core")
    return request.param


@pytest.mark.usefixtures("way")
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", neula.AccuracyWarning)
            result = neula.lstsq(a, b, certify=certify)
        error = error_of(a, result.x, shortest(factors, b))
        assert result.converged or UNITS[units] > 1 or certify == "forward"
        if result.converged:
            assert result.rank == rank
            assert error <= result.forward_error * (1 + 1e-9)
            assert result.backward_error <= result.tolerance


@pytest.mark.usefixtures("way")
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


@pytest.mark.usefixtures("way")
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


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("m", "n", "rank"), [(300, 40, 30), (150, 120, 119), (400, 130, 60), (200, 200, 150), (700, 300, 290)]
)
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


@pytest.mark.usefixtures("way")
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
    nothing = neula.lstsq(np.zeros((4, 2)), np.ones(4))
    assert (nothing.rank, nothing.x.tolist()) == (0, [0.0, 0.0])


@pytest.mark.usefixtures("way")
def test_updates_leave_the_space_of_the_rows() -> None:
    """R is so ill-conditioned that the first x is far too long: errors of what shortens it stay."""
    rows = [[-4200009, -1199933, 6000018, 600003], [1400044, 400001, -2000068, -200008]]
    a = np.array([*rows, [2799994, 799949, -3999994, -400000]], dtype=float)
    b = np.array([1200006.0, -400016.0, -800000.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", neula.AccuracyWarning)
        result = neula.lstsq(a, b, rcond=1e-15)
    exact = [Fraction(x) for x in np.linalg.lstsq(a, b, rcond=1e-15)[0].tolist()]
    assert not result.converged or error_of(a, result.x, exact) <= 1e-3


@pytest.mark.usefixtures("way")
def test_rows_that_depend_beyond_the_precision_of_a_gram_matrix() -> None:
    """Two rows in other units, and a column that the third one has not: singular values 1, 0.5, 7e-52."""
    tiny, large = 2.0**-106, 2.0**92
    rows = [[-45, 10, 30, -30, -40], [0, -30, -50, -40, 50], [-5, 10, -15, -40, 10]]
    a = np.array(rows, dtype=float) * np.array([[tiny], [large], [tiny]])
    for b in (np.array([-2e-5 * tiny, large, -1e-5 * tiny]), np.ones(3)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", neula.AccuracyWarning)
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


@pytest.mark.usefixtures("way")
def test_a_row_of_zeros_in_r() -> None:
    a = np.diag(np.arange(1.0, 121))
    a[:, 1], a[1] = a[:, 0], 0.0
    result = neula.lstsq(a, np.ones(120))
    assert result.rank == 119
    assert np.abs(a @ result.x - (np.arange(120) != 1)).max() <= 1e-12


@pytest.mark.usefixtures("way")
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", neula.AccuracyWarning)
        result = neula.lstsq(a, b, rcond=1e-4)
    assert result.rank == rank
    error = np.linalg.norm(norms * (result.x - expected)) / np.linalg.norm(norms * expected)
    assert error <= max(result.forward_error, 1e-13)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("shape", [(5, 2), (40, 6), (300, 40), (4, 9), (30, 70)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_user_gets_them(shape: tuple[int, int], dtype: torch.dtype, rng: np.random.Generator) -> None:
    """A column of zeros and a copy; several right-hand sides, and what a result says of them."""
    m, n = shape
    a = torch.from_numpy(rng.standard_normal(shape)).to(dtype)
    a[:, -1] = 0.0
    if n > 2:
        a[:, 1] = 2 * a[:, 0]
    b = torch.from_numpy(rng.standard_normal((m, 3))).to(dtype)
    result = neula.lstsq(a, b)
    assert result.converged
    assert result.rank == min(m, n - 1 if n == 2 else n - 2)
    expected = torch.linalg.pinv(a.double()) @ b.double()
    error = torch.linalg.vector_norm(result.x - expected) / torch.linalg.vector_norm(expected)
    assert error <= 8 * torch.finfo(dtype).eps * (1 if dtype == torch.float32 else 100 * result.condition**2)
    norms = torch.linalg.vector_norm(b.double() - a.double() @ result.x.double(), dim=0)
    assert np.allclose(result.residual_norm, norms, rtol=1e-5, atol=1e-12 if dtype == torch.float64 else 1e-5)
    assert not result.x[-1].any()


@pytest.mark.usefixtures("way")
def test_batches_with_dependent_columns(rng: np.random.Generator) -> None:
    a = torch.from_numpy(rng.standard_normal((7, 20, 5)))
    a[2, :, 4] = a[2, :, 0] - a[2, :, 1]
    a[5, :, 3] = 0.0
    b = torch.from_numpy(rng.standard_normal((7, 20, 1)))
    result = neula.lstsq(a, b)
    assert result.converged
    assert result.ranks.tolist() == [5, 5, 4, 5, 5, 4, 5]
    for i in range(7):
        one = neula.lstsq(a[i], b[i])
        assert torch.linalg.vector_norm(one.x - result.x[i]) <= 1e-13 * torch.linalg.vector_norm(one.x)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("dtype", [np.float64, np.complex64])
@pytest.mark.parametrize("damp", [1e-11, 1e-15, 1e-30, 1e-300])
def test_damping_of_a_zero_column(damp: float, dtype: type, engine: str) -> None:
    """Of rank one without its unknown, which is zero: ``x1 = x2 = b / (2 + damp^2)``."""
    a = np.array([[3.0, 3.0, 0.0]]).astype(dtype)
    result = neula.lstsq(a, a[:, 0], damp=damp, weights=[7.0], rcond=1e-8, engine=engine)
    assert (result.rank, result.converged) == (2, True)
    assert np.abs(result.x - [0.5, 0.5, 0.0]).max() <= 0.5 * result.forward_error <= 100 * U
