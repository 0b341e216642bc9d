"""The shortest solutions in NumPy and LAPACK: of dependent columns, and of fewer rows than columns."""

from __future__ import annotations

import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import neula
from exact_solutions import error_of
from neula.algorithms.lapack import independent
from neula.algorithms.lapack.dependent import Dependent, Precise
from neula.algorithms.lapack.independent import Independent
from neula.algorithms.lapack.refinement import RefinedVectorSolution, refine, refine_rows
from neula.algorithms.lapack.wide import Wide
from neula.engines import FP64
from neula.kernels import seminormal_host
from shortest_solutions import UNITS, integers, scaled, shortest

U = FP64.u


def refined(system: Any, b: np.ndarray) -> tuple[np.ndarray, RefinedVectorSolution]:
    steps = refine_rows if isinstance(system, Precise | Wide) else refine
    found = steps(system, b, U)
    assert found is not None
    return found.x if system.scales is None else found.x * system.scales, found


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("doubled", [True, False])
@pytest.mark.parametrize(
    ("m", "n", "rank"), [(3, 2, 1), (10, 3, 2), (9, 6, 4), (12, 12, 7), (5, 9, 3), (4, 7, 4), (20, 8, 7)]
)
def test_dependent_columns(
    m: int, n: int, rank: int, doubled: bool, units: str, rng: np.random.Generator
) -> None:
    """Errors are bounded; with products in twice the precision nothing but rounding x is left."""
    for _ in range(5):
        factors, b = scaled(rng, integers(rng, m, n, rank), UNITS[units]), rng.standard_normal(m)
        a = factors[0] @ factors[1]
        system = Dependent.factorize(a, max(m, n) * 2 * U, doubled=doubled)
        assert system is not None
        assert system.rank == rank
        x, found = refined(system, b)
        backward_error, _, forward_error = system.errors(b, found)
        error = error_of(a, x, shortest(factors, b))
        assert error <= forward_error
        assert backward_error <= 8 * max(m, n) * U
        # The spread of the columns comes twice, by rows and by columns: what it multiplies is U^2, or U.
        grows = 100 * ((m + n) * UNITS[units]) ** 2 * system.condition**3
        assert forward_error <= 2 * U + (U**2 if doubled else U) * grows


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize(("m", "n"), [(1, 2), (2, 3), (4, 7), (6, 20), (9, 10)])
def test_fewer_rows_than_columns(m: int, n: int, units: str, rng: np.random.Generator) -> None:
    for _ in range(5):
        left, right = scaled(rng, integers(rng, m, n, m), UNITS[units])
        a, b = left @ right, rng.standard_normal(m)
        a[:, -1] = 0.0
        right[:, -1] = 0.0
        system = Wide.factorize(a)
        assert system is not None
        x, found = refined(system, b)
        assert error_of(a, x, shortest((left, right), b)) <= system.errors(b, found)[2] <= 2 * U
        assert system.errors(b, found)[0] <= U


@pytest.mark.parametrize("spread", [0, 2, 10, 30])
def test_rows_of_all_sizes(spread: int, rng: np.random.Generator) -> None:
    left, right = integers(rng, 5, 9, 5)
    left *= np.exp2(rng.integers(-spread, spread + 1, (5, 1)))
    a, b = left @ right, rng.standard_normal(5)
    system = Wide.factorize(a)
    assert system is not None
    x, found = refined(system, b)
    assert error_of(a, x, shortest((left, right), b)) <= system.errors(b, found)[2] <= 2 * U
    assert np.linalg.norm(found.residual) <= U * np.linalg.norm(b)
    condition = np.linalg.cond(a / np.linalg.norm(a, axis=0))
    if condition <= 1e6:  # beyond, a Gram matrix does not tell
        assert condition / 3 <= system.condition <= 1.01 * condition
    assert system.condition <= 1.01 * system.condition_bound


def test_rows_that_are_too_small_do_not_count(rng: np.random.Generator) -> None:
    """The rank is that of the weighted matrix, whose rows are not scaled."""
    a, b = rng.standard_normal((2, 5)), rng.standard_normal(2)
    result = neula.lstsq(a, b, weights=np.array([1.0, 1e-20]))
    assert result.rank == 1
    expected = a[0] * b[0] / (a[0] @ a[0])
    assert np.linalg.norm(result.x - expected) <= 8 * U * np.linalg.norm(expected)


@pytest.mark.parametrize("large", [True, False])
@pytest.mark.parametrize(
    ("m", "n", "rank"), [(300, 40, 30), (150, 120, 119), (400, 130, 60), (200, 200, 150)]
)
def test_larger_ones_by_either_library(
    m: int, n: int, rank: int, large: bool, rng: np.random.Generator
) -> None:
    """Against an SVD: singular values that are dropped are rounding errors."""
    a, b = rng.standard_normal((m, rank)) @ rng.standard_normal((rank, n)), rng.standard_normal(m)
    u, s, vh = np.linalg.svd(a)
    expected = (vh[:rank].T / s[:rank]) @ (u[:, :rank].T @ b)
    for doubled in (True, False):
        system = Dependent.factorize(a, m * 2 * U, doubled=doubled, large=large)
        assert system is not None
        assert system.rank == rank
        x, found = refined(system, b)
        error = np.linalg.norm(x - expected) / np.linalg.norm(expected)
        # That of the reference: Wedin's bound of the SVD.
        assert error <= 8 * (m + n) ** 0.5 * U * (s[0] / s[rank - 1]) ** 2
        bounds = system.errors(b, found)
        assert bounds[0] <= 8 * n**0.5 * U
        assert bounds[2] <= (1e-6 if not doubled else 1e-10)


def test_a_gap_is_needed(rng: np.random.Generator) -> None:
    """Singular values near the threshold leave the rank to the SVD, and so do numbers out of range."""
    q, p = (np.linalg.qr(rng.standard_normal((m, 6)))[0] for m in (20, 6))
    graded = (q * [1.0, 0.5, 1e-4, 3e-12, 1e-12, 3e-13]) @ p.T
    with np.errstate(all="ignore"):
        for doubled in (True, False):
            assert Dependent.factorize(graded, 1e-12, doubled=doubled) is None
            assert Dependent.factorize(1e200 * graded, 1e-8, doubled=doubled) is None
            assert Dependent.factorize(np.zeros((4, 2)), 1e-12, doubled=doubled) is None
            assert Dependent.factorize(np.full((4, 2), np.nan), 1e-12, doubled=doubled) is None
        clear = Dependent.factorize(graded, 1e-8, doubled=True)
        assert clear is not None
        assert clear.rank == 3
        dependent_rows = graded[:3].copy()
        dependent_rows[2] = dependent_rows[1]
        assert Wide.factorize(dependent_rows) is None
        assert Wide.factorize(np.full((2, 4), np.nan)) is None


def test_updates_leave_the_space_of_the_rows() -> None:
    """R is so ill-conditioned that the first x is far too long: errors of what shortens it stay."""
    rows = [[-4200009, -1199933, 6000018, 600003], [1400044, 400001, -2000068, -200008]]
    a = np.array([*rows, [2799994, 799949, -3999994, -400000]], dtype=float)
    system = Dependent.factorize(a, 1e-15, doubled=False)
    if system is not None:
        _, found = refined(system, np.array([1200006.0, -400016.0, -800000.0]))
        assert system.errors(np.array([1200006.0, -400016.0, -800000.0]), found)[2] > 1


@pytest.mark.parametrize("way", ["kernel", "libraries"])
def test_rows_that_depend_beyond_the_precision_of_a_gram_matrix(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows in other units, and a column that the third one has not: singular values 1, 0.5, 7e-52."""
    if way == "libraries":
        monkeypatch.setattr(seminormal_host, "core", lambda: None)
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


def test_a_row_of_zeros_in_r(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
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
    for doubled in (True, False):
        system = Dependent.factorize(a, 1e-4, doubled=doubled)
        assert system is not None
        assert system.rank == rank
        x, found = refined(system, b)
        error = np.linalg.norm(norms * (x - expected)) / np.linalg.norm(norms * expected)
        assert error <= system.errors(b, found)[2] <= 1e-6


@pytest.mark.parametrize("pivoted", [0, 1000])
def test_columns_that_count(pivoted: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies, sums and zeros between others; the first of them alone would be nearly dependent."""
    monkeypatch.setattr(independent, "PIVOTED", pivoted)
    first, n = rng.standard_normal((60, 20)), 60
    columns = np.concatenate([first, first[:, ::-1], first @ rng.standard_normal((20, 20))], 1)
    columns[:, 1] = columns[:, 0] + 1e-7 * columns[:, 1]
    columns = columns / np.linalg.norm(columns, axis=0)
    core = independent.reflected(columns[:, rng.permutation(n)], large=True)
    found = Independent.factorize(core, (60, n), 60 * 2 * U, large=True)
    assert found is not None
    assert found.rank == 20
    assert sorted(found.order.tolist()) == list(range(n))
    assert found.dropped <= 200 * U * found.norm_bound
    assert np.abs(found.rest).max() <= 100
    assert found.norm <= np.linalg.norm(core, 2) * (1 + 1e-12) <= found.norm_bound * (1 + 2e-12)


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
    assert "svd" not in [x.method for x in result.attempts][-1]
    expected = torch.linalg.pinv(a.double()) @ b.double()
    error = torch.linalg.vector_norm(result.x - expected) / torch.linalg.vector_norm(expected)
    assert error <= 8 * torch.finfo(dtype).eps * (1 if dtype == torch.float32 else 100 * result.condition**2)
    norms = torch.linalg.vector_norm(b.double() - a.double() @ result.x.double(), dim=0)
    assert np.allclose(result.residual_norm, norms, rtol=1e-5, atol=1e-12 if dtype == torch.float64 else 1e-5)
    assert not result.x[-1].any()


def test_batches_with_dependent_columns(rng: np.random.Generator) -> None:
    a = torch.from_numpy(rng.standard_normal((7, 20, 5)))
    a[2, :, 4] = a[2, :, 0] - a[2, :, 1]
    a[5, :, 3] = 0.0
    b = torch.from_numpy(rng.standard_normal((7, 20, 1)))
    result = neula.lstsq(a, b)
    assert result.converged
    assert result.ranks.tolist() == [5, 5, 4, 5, 5, 4, 5]
    assert [x.method for x in result.attempts][-1].endswith("fp64 + seminormal")
    for i in range(7):
        one = neula.lstsq(a[i], b[i])
        assert torch.linalg.vector_norm(one.x - result.x[i]) <= 1e-13 * torch.linalg.vector_norm(one.x)
