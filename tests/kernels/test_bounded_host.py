"""Block pivoting by the compiled core, against its definition in NumPy and the conditions of a solution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.bounded.kkt import U, by_enumeration, violation

from capabilities import LEVELS, core_of
from neula.algorithms.lapack.bounded import Normal, block_pivoting, limits_of
from neula.kernels import bounded_host
from neula.kernels.bounded_host import BoundedMinimum, minimum

LIMITS = limits_of(100)


@pytest.fixture(params=LEVELS)
def _instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many lanes as a processor has, or fewer."""
    compiled = core_of(request.param)
    monkeypatch.setattr(bounded_host, "core", lambda: compiled)


def bounds_of(n: int, width: float = 0.1) -> np.ndarray:
    lower, upper = np.full(n, -width), np.full(n, 2 * width)
    lower[::3], upper[1::4] = 0.0, np.inf
    return np.array((lower, upper))


def both(
    a: np.ndarray, b: np.ndarray, bounds: np.ndarray
) -> tuple[BoundedMinimum | None, BoundedMinimum | None]:
    normal = Normal.factorize(a, b.astype(np.float64), bounds, large=False)
    known = None if normal is None else block_pivoting(normal, LIMITS, of_all=True)
    given = torch.from_numpy(a), torch.from_numpy(b)[:, None]
    return minimum(*given, bounds, LIMITS, of_all=True), known


@pytest.mark.usefixtures("_instructions")
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (9, 3), (30, 8), (33, 17), (50, 50), (200, 64), (5, 5)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("order", ["C", "F"])
def test_against_numpy(shape: tuple[int, int], dtype: type, order: str) -> None:
    rng = np.random.default_rng(shape[1])
    n = shape[1]
    a = np.asarray(rng.standard_normal(shape) + 2 * np.eye(*shape), dtype, order=order)
    b, bounds = rng.standard_normal(shape[0]).astype(dtype), bounds_of(n)
    found, known = both(a, b, bounds)
    assert found is not None
    assert known is not None
    assert np.array_equal(found.at, known.at)
    # Both are refined normal equations: u times the condition number, and its square where r counts.
    condition = found.numbers.norm_of_all * found.numbers.inverse_norm_of_all
    error = 8 * (n + shape[0]) * U * condition * (condition + 1)
    size = found.numbers.b + found.numbers.sum
    assert np.abs(found.sizes * (found.x - known.x)).max() <= error * size
    assert np.abs(found.sizes * (found.unbounded - known.unbounded)).max() <= error * size * condition
    assert np.allclose(found.sizes, np.linalg.norm(a.astype(float), axis=0), rtol=shape[0] * U)
    for name in ("sets", "width", "margin"):
        assert getattr(found.numbers, name) == getattr(known.numbers, name)
    for name in ("b", "residual", "image", "sum", "pushed"):
        ours, theirs = getattr(found.numbers, name), getattr(known.numbers, name)
        assert ours == theirs or abs(ours - theirs) <= error * size, name
    for name in ("norm", "inverse_norm", "norm_of_all", "inverse_norm_of_all"):
        assert getattr(found.numbers, name) == pytest.approx(getattr(known.numbers, name), rel=error), name
    for name in ("gradient", "projected", "rest"):
        assert 0 <= getattr(found.numbers, name) <= error * size, name


def test_norms_are_bounds() -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((40, 12)) * np.logspace(0, 9, 12)
    found = minimum(
        torch.from_numpy(a), torch.from_numpy(a[:, :1].copy()), bounds_of(12, np.inf), LIMITS, of_all=True
    )
    assert found is not None
    values = np.linalg.svd(a / np.linalg.norm(a, axis=0), compute_uv=False)
    numbers = found.numbers
    assert values[0] <= numbers.norm_of_all <= 12**0.25 * values[0] * (1 + 1e-12)
    assert 1 <= numbers.inverse_norm_of_all * values[-1] <= 12**0.25 * (1 + 1e-12)
    without = minimum(
        torch.from_numpy(a), torch.from_numpy(a[:, :1].copy()), bounds_of(12, 1.0), LIMITS, of_all=False
    )
    assert without is not None
    assert math.isnan(without.numbers.norm_of_all)


def test_the_best_of_all_faces() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        a, b = rng.standard_normal((7, 4)), rng.standard_normal((7, 1))
        lower, upper = bounds_of(4, 0.3)
        found = minimum(
            torch.from_numpy(a), torch.from_numpy(b), np.array((lower, upper)), LIMITS, of_all=False
        )
        assert found is not None
        assert np.allclose(found.x, by_enumeration(a, b[:, 0], lower, upper), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("way", ["kernel", "numpy"])
def test_exchanges_of_all_that_lead_nowhere(way: str) -> None:
    """Where they go round in circles single ones end it, or there is no end."""
    rng = np.random.default_rng(0)
    ended = 0
    for _ in range(200):
        a = rng.standard_normal((12, 1)) + 0.05 * rng.standard_normal((12, 10))
        b, bounds = rng.standard_normal(12), np.array((np.full(10, -0.1), np.full(10, 0.1)))
        found = both(a, b, bounds)[way == "numpy"]
        if found is not None:
            ended += 1
            assert violation(a, b, found.x.clip(*bounds), *bounds) < 20 * 10**0.5 * U
            assert ((found.x == bounds[0]) == (found.at < 0)).all()
            assert ((found.x == bounds[1]) == (found.at > 0)).all()
    assert ended > 150


NOTHING = {
    "zero column": lambda a, b, bounds: (a * (np.arange(5) != 2), b, bounds),
    "dependent": lambda a, b, bounds: (a[:, [0, 1, 2, 3, 0]], b, bounds),
    "nan": lambda a, b, bounds: (np.where(a == a[3, 2], np.nan, a), b, bounds),
    "inf": lambda a, b, bounds: (a, np.where(b == b[1], np.inf, b), bounds),
    "no right-hand side": lambda a, b, bounds: (a, 0 * b, bounds),
    "huge": lambda a, b, bounds: (a * 1e170, b, bounds),
    "tiny": lambda a, b, bounds: (a * 1e-170, b, bounds),
    "huge bound": lambda a, b, bounds: (a, b, bounds - np.array([[1e200], [0.0]])),
    "tiny bound": lambda a, b, bounds: (a, b, np.where(bounds == 0, 1e-200, bounds)),
}


@pytest.mark.parametrize("kind", NOTHING)
def test_nothing_is_found(kind: str) -> None:
    rng = np.random.default_rng(0)
    a, b, bounds = NOTHING[kind](rng.standard_normal((9, 5)), rng.standard_normal(9), bounds_of(5))
    with np.errstate(all="ignore"):
        assert both(a, b, bounds) == (None, None)


def test_too_few_sets() -> None:
    rng = np.random.default_rng(0)
    a, b = torch.from_numpy(rng.standard_normal((40, 30))), torch.from_numpy(rng.standard_normal((40, 1)))
    assert minimum(a, b, bounds_of(30), limits_of(1), of_all=False) is None
    assert minimum(a, b, bounds_of(30), LIMITS, of_all=False) is not None


def test_without_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_host, "core", lambda: None)
    one = torch.ones(1, 1)
    assert not bounded_host.available()
    assert minimum(one, one, bounds_of(1), LIMITS, of_all=False) is None
