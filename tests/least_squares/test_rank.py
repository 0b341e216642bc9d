"""Ranks below full: which are doubtful, and what results say of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

import neula
from campaign.doubt import Dropped
from campaign.oracle import LeastSquares
from neula.certificates.rank import rank_doubt, rounding_of
from neula.io.sources import row_blocks

U = 2.0**-53


def held(a: np.ndarray, b: np.ndarray, **options: Any) -> Any:
    fit = neula.LeastSquares(a.shape[1])
    for rows in np.array_split(np.arange(len(a)), 3):
        fit.update(a[rows], b[rows])
    return fit.solve(**options)


def batch(a: np.ndarray, b: np.ndarray, **options: Any) -> Any:
    """Beside a problem of full rank."""
    regular = np.random.default_rng(7).standard_normal(a.shape).astype(a.dtype)
    return neula.lstsq(np.stack([regular, a]), np.stack([b, b])[..., None], **options)


WAYS: dict[str, Callable[..., Any]] = {
    "alone": neula.lstsq,
    "weights": lambda a, b, **options: neula.lstsq(a, b, weights=np.linspace(0.5, 2, len(a)), **options),
    "masked": lambda a, b, **options: neula.lstsq(
        np.vstack([a, a[:9]]), np.append(b, b[:9] + 1), weights=np.repeat([1.0, 0.0], [len(a), 9]), **options
    ),
    "two sides": lambda a, b, **options: neula.lstsq(
        a, np.column_stack([np.cos(np.arange(len(a)) ** 2), b]), **options
    ),
    "torch": lambda a, b, **options: neula.lstsq(torch.from_numpy(a), torch.from_numpy(b), **options),
    "emulated": lambda a, b, **options: neula.lstsq(a, b, engine="emulated", **options),
    "svd": lambda a, b, **options: neula.lstsq(a, b, algorithm="svd", **options),
    "scaled": lambda a, b, **options: neula.lstsq(a * 2.0 ** np.arange(a.shape[1]), b, **options),
    "covariance": lambda a, b, **options: neula.lstsq(a, b, covariance=np.ones(len(a)), **options),
    "batch": batch,
    "streamed": lambda a, b, **options: neula.lstsq(row_blocks(a), b, **options),
    "held": held,
}


def doubted(way: Callable[..., Any], a: np.ndarray, b: np.ndarray, **options: Any) -> tuple[Any, list[str]]:
    """The result, and what was said of it: nothing, or an IllConditionedWarning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = way(a, b, **options)
    assert all(warning.category is neula.IllConditionedWarning for warning in caught), caught[0].message
    assert result.converged == (not caught)
    return result, [str(warning.message) for warning in caught]


def trend(m: int, offset: float, noise: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """A quadratic in ``offset + k``: the curvature is in a singular value that rounding errors may hide."""
    k = np.arange(float(m))
    x = offset + k
    b = 2 + 3 * k + 0.5 * k**2 + noise * np.random.default_rng(0).standard_normal(m)
    return np.column_stack([np.ones(m), x, x * x]), b


@pytest.mark.parametrize("way", WAYS)
def test_a_dropped_direction_that_carries_the_data_is_a_doubt(way: str) -> None:
    result, said = doubted(WAYS[way], *trend(50, 1e8))
    assert result.rank == 2
    assert len(said) == 1
    assert not result.digits > 0


@pytest.mark.parametrize("way", [name for name in WAYS if name not in ("streamed", "held")])
def test_noise_along_a_dropped_direction_is_no_doubt(way: str) -> None:
    """The direction is real, and b knows nothing of it. R alone does not tell it from rounding errors."""
    a, b = trend(50, 1e8)[0], np.random.default_rng(3).standard_normal(50)
    result, said = doubted(WAYS[way], a, b)
    assert (result.rank, said) == (2, [])


def test_masked_rows_are_no_degrees_of_freedom() -> None:
    """Of five rows two are left for a test, which needs three."""
    a, b = trend(40, 1e4)
    for used in (5, 6):
        result, said = doubted(
            neula.lstsq, a, b, weights=np.repeat([1.0, 0.0], [used, 40 - used]), rcond=1e-6
        )
        assert result.rank == 2
        assert bool(said) == (used == 6)


def spectrum(values: list[float], m: int = 30) -> tuple[np.ndarray, np.ndarray]:
    """A matrix with about these singular values, and those that it has with columns of norm 1."""
    rng, n = np.random.default_rng(5), len(values)
    left, right = (np.linalg.qr(rng.standard_normal((k, n)))[0] for k in (m, n))
    a = left * values @ right.T
    return a, np.linalg.svd(a / np.linalg.norm(a, axis=0), compute_uv=False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ratio", [5.0, 200.0])
def test_singular_values_close_to_the_cut_are_a_doubt(way: str, ratio: float) -> None:
    a, s = spectrum([1.0, 0.5, 1e-4, 1e-4 / ratio])
    b = np.random.default_rng(1).standard_normal(len(a))
    result, said = doubted(WAYS[way], a, b, rcond=float((s[2] * s[3]) ** 0.5 / s[0]))
    assert result.rank == 3
    assert bool(said) == (s[2] < 10 * s[3])


@pytest.mark.parametrize("ratio", [5.0, 200.0])
def test_pseudoinverses_ask_for_a_gap(ratio: float) -> None:
    a, s = spectrum([1.0, 0.5, 1e-4, 1e-4 / ratio], m=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        neula.pinv(a, rcond=float((s[2] * s[3]) ** 0.5 / s[0]))
    assert [w.category for w in caught] == [neula.IllConditionedWarning] * int(s[2] < 10 * s[3])


def clear() -> Iterator[tuple[str, np.ndarray, int]]:
    """Matrices whose dependent columns nobody doubts, and their ranks."""
    rng = np.random.default_rng(11)
    a = rng.standard_normal((24, 6))
    two = np.column_stack([a, a[:, 0] + a[:, 1]])
    groups = np.eye(3)[np.arange(24) % 3]
    shares = np.abs(a) / np.abs(a).sum(1, keepdims=True)
    yield "copy", a[:, [0, 1, 2, 1]], 3
    yield "sum", two, 6
    yield "few rows", two[:8], 6
    yield "scaled", two * 2.0 ** np.array([3, 0, -2, 7, 0, 3, 1]), 6
    yield "combination", np.column_stack([a, a @ rng.standard_normal(6)]), 6
    yield "product", rng.standard_normal((24, 2)) @ rng.standard_normal((2, 5)), 2
    yield "dummies", np.column_stack([np.ones(24), groups, a]), 9
    yield "shares", np.column_stack([np.ones(24), shares]), 6
    yield "integers", rng.integers(-5, 6, (24, 3)) @ rng.integers(-3, 4, (3, 5)), 3
    yield "zeros", np.column_stack([a, np.zeros(24)]), 6
    yield "zero rows", np.vstack([two, np.zeros((9, 7))]), 6
    yield "wide", np.vstack([a[:4, :], a[:4, :].sum(0)]), 4
    yield "single", two.astype(np.float32), 6


@pytest.mark.parametrize(("a", "rank"), [pytest.param(a, rank, id=name) for name, a, rank in clear()])
@pytest.mark.parametrize("exact", [False, True])
def test_dependent_columns_are_no_doubt(a: np.ndarray, rank: int, exact: bool) -> None:
    m, n = a.shape
    b = a @ np.arange(1, n + 1) if exact else np.random.default_rng(2).standard_normal(m)
    b = b.astype(a.dtype if a.dtype.kind == "f" else float)
    for way in (neula.lstsq, WAYS["batch"], WAYS["svd"]):
        result, said = doubted(way, a, b)
        assert (result.rank, said) == (rank, [])
        assert f"rank {rank} of {min(m, n)}: minimum-norm solution" in " ".join(repr(result).split())


def test_a_large_problem_drops_noise_but_no_data() -> None:
    """By a complete orthogonal decomposition: small directions are noise of A, and b may be in them."""
    rng = np.random.default_rng(4)
    left, right = (np.linalg.qr(rng.standard_normal((k, 120)))[0] for k in (900, 120))
    a = left * np.where(np.arange(120) < 80, 1.0, 1e-6) @ right.T
    b = left[:, :80].sum(1) + 0.01 * rng.standard_normal(900)
    result, said = doubted(neula.lstsq, a, b, rcond=1e-3)
    assert (result.rank, said) == (80, [])
    result, said = doubted(neula.lstsq, a, b + left[:, 100], rcond=1e-3)
    assert (result.rank, len(said)) == (80, 1)


def test_the_test_is_that_of_fisher() -> None:
    """The level is met at the same residual as by ``scipy.stats.f``."""
    rows, rank, count = 40, 3, 2
    freedom = rows - rank - count
    critical = scipy.stats.f.isf(1e-6, count, freedom) * count / freedom  # explained, relative to the rest
    kept, dropped = 1.0, torch.full((count,), 1e-9, dtype=torch.float64)
    for factor, doubt in ((1.001, True), (0.999, False)):
        along = torch.tensor([[math.sqrt(factor * critical)], [0.0]], dtype=torch.float64)
        length = torch.tensor([math.sqrt(1 + factor * critical)], dtype=torch.float64)
        asked = kept, dropped, along, length, rank, rows
        assert bool(rank_doubt(*asked, rounding_of(5, U))) == doubt
        assert not rank_doubt(*asked, 1e-8)
        assert not rank_doubt(*asked[:-1], rank + count + 2, rounding_of(5, U))
    assert rank_doubt(9.9, dropped / 1e-9, along, length, rank, rows, 1.0)
    assert not rank_doubt(10.1, dropped / 1e-9, along, length, rank, rows, 1.0)


@pytest.mark.parametrize(("m", "offset"), [(20, 1e8), (50, 3e8), (200, 1e9)])
@pytest.mark.parametrize("noise", [0.0, 10.0])
def test_curvature_far_from_the_origin_is_missed(m: int, offset: float, noise: float) -> None:
    result, said = doubted(neula.lstsq, *trend(m, offset, noise))
    assert result.rank == 2
    assert "rank 2 is ambiguous: directions that count as zero explain" in said[0]


@pytest.mark.parametrize("offset", [1e7, 1e8, 1e9])
def test_the_campaign_has_the_same_doubts(offset: float) -> None:
    for noise in (0.0, 1e3):
        a, b = trend(40, offset, noise)
        result, said = doubted(neula.lstsq, a, b)
        exact = Dropped.of(LeastSquares(a, b[:, None], rcond=40 * 2 * U), result.rank, U)
        assert bool(said) == (exact is not None and exact.surely)


@pytest.mark.parametrize(("rows", "doubt"), [(4, False), (5, True)])
def test_the_parts_of_b_are_tested_one_by_one_with_a_real_matrix(rows: int, doubt: bool) -> None:
    """Rank one and one dropped direction leave rows - 2 degrees of freedom, and three are needed."""
    e = np.eye(rows)
    a = np.column_stack([e[0], e[0] + 1e-9 * e[1]])
    b = (1j * (e[0] + e[1]) + 1e-9 * (1 - 2j) * e[2:].sum(0))[:, None]
    result, said = doubted(neula.lstsq, a, b, rcond=1e-3)
    exact = Dropped.of(LeastSquares(a, b, rcond=1e-3), result.rank, U)
    assert (bool(said), exact is not None and exact.surely) == (doubt, doubt)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_no_result_has_more_digits_than_its_dtype(dtype: type) -> None:
    a = np.array([[2.0, 0], [0, 4], [0, 0]], dtype)
    square, b = a[:2], np.array([2.0, 4, 0], dtype)
    results = (
        neula.lstsq(a, b),
        neula.lstsq(np.stack([a, a]), b[:, None]),
        neula.lstsq(a, b, certify="forward"),
        neula.lstsq(a, b, constraints=(a[:1], b[:1])),
        neula.lstsq(a, 0 * b),
        neula.solve(square, b[:2]),
        neula.solve(np.stack([square, square]), b[:2, None]),
        neula.solve(square, b[:2], certify="forward"),
        neula.nnls(a, b),
        neula.lsq_linear(a, b, bounds=(0, 1)),
    )
    most = -math.log10(np.finfo(dtype).eps / 2)
    for result in results:
        assert 6 < result.digits <= most
    assert "correct digits (rounding only" in " ".join(repr(results[0]).split())
