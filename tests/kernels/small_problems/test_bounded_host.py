"""Block pivoting by the compiled core: the conditions of a solution, and definitions of its numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.bounded.kkt import U, by_enumeration, violation

from neula.algorithms.bounded.active_set import PATIENCE
from neula.kernels.magnitudes import MODERATE
from neula.kernels.small_problems.bounded_host import BoundedLimits, BoundedMinimum, minimum
from neula.problems.bounded.run import ROUGH, SETTLED, STEPS

LIMITS = BoundedLimits(MODERATE, ROUGH, SETTLED, STEPS, PATIENCE, 100)


def bounds_of(n: int, width: float = 0.1) -> np.ndarray:
    lower, upper = np.full(n, -width), np.full(n, 2 * width)
    lower[::3], upper[1::4] = 0.0, np.inf
    return np.array((lower, upper))


def found_by(
    a: np.ndarray, b: np.ndarray, bounds: np.ndarray, limits: BoundedLimits = LIMITS, *, of_all: bool = True
) -> BoundedMinimum | None:
    given = torch.from_numpy(a), torch.from_numpy(b.copy())[:, None]
    return minimum(*given, bounds, limits, of_all=of_all)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (9, 3), (30, 8), (33, 17), (50, 50), (200, 64), (5, 5)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("order", ["C", "F"])
def test_numbers_are_what_they_stand_for(shape: tuple[int, int], dtype: type, order: str) -> None:
    rng = np.random.default_rng(shape[1])
    (m, n), (lower, upper) = shape, bounds_of(shape[1])
    a = np.asarray(rng.standard_normal(shape) + 2 * np.eye(*shape), dtype, order=order)
    b = rng.standard_normal(m).astype(dtype)
    found = found_by(a, b, np.array((lower, upper)))
    assert found is not None
    a, b, numbers = a.astype(np.float64), b.astype(np.float64), found.numbers
    sizes, at, free = np.linalg.norm(a, axis=0), found.at, found.at == 0
    assert np.allclose(found.sizes, sizes, rtol=m * U)
    scaled, z = a / sizes, sizes * found.x
    values = np.linalg.svd(scaled, compute_uv=False)
    condition = values[0] / values[-1]
    size = np.linalg.norm(b) + np.abs(z).sum()
    # Refined normal equations: u times the condition number, and its square where r counts.
    error = 8 * (n + m) * U * condition * (condition + 1) * size
    assert ((found.x == lower) == (at < 0)).all()
    assert ((found.x == upper) == (at > 0)).all()
    assert (found.x >= lower - error / sizes).all()
    assert (found.x <= upper + error / sizes).all()
    best = np.where(free, 0.0, z)
    best[free] = np.linalg.lstsq(scaled[:, free], b - scaled @ best, rcond=None)[0]
    assert np.abs(z - best).max() <= error
    whole = np.linalg.lstsq(scaled, b, rcond=None)[0]
    assert np.abs(sizes * found.unbounded - whole).max() <= error * condition
    residual = b - a @ found.x
    q = np.linalg.qr(scaled[:, free])[0]
    push = at * (scaled.T @ (residual - q @ (q.T @ residual)))
    expected = {
        "width": free.sum(),
        "b": np.linalg.norm(b),
        "residual": np.linalg.norm(residual),
        "image": np.linalg.norm(z),
        "sum": np.abs(z).sum(),
        "pushed": push[~free].min(initial=math.inf),
        "gradient": 0.0,
        "projected": 0.0,
        "rest": 0.0,
    }
    for name, value in expected.items():
        known = getattr(numbers, name)
        assert known == value or abs(known - value) <= error, name
    assert numbers.optimality <= error * sizes.max()
    of_free = np.linalg.svd(scaled[:, free], compute_uv=False)
    for norm, inverse, known in [
        (numbers.norm, numbers.inverse_norm, of_free),
        (numbers.norm_of_all, numbers.inverse_norm_of_all, values),
    ]:
        if len(known):
            room = len(known) ** 0.25 * (1 + error)
            assert known[0] * (1 - error) <= norm <= room * known[0]
            assert 1 - error <= inverse * known[-1] <= numbers.margin * room


def test_norms_are_bounds() -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((40, 12)) * np.logspace(0, 9, 12)
    found = found_by(a, a[:, 0], bounds_of(12, np.inf))
    assert found is not None
    values = np.linalg.svd(a / np.linalg.norm(a, axis=0), compute_uv=False)
    numbers = found.numbers
    assert values[0] <= numbers.norm_of_all <= 12**0.25 * values[0] * (1 + 1e-12)
    assert 1 <= numbers.inverse_norm_of_all * values[-1] <= 12**0.25 * (1 + 1e-12)
    without = found_by(a, a[:, 0], bounds_of(12, 1.0), of_all=False)
    assert without is not None
    assert math.isnan(without.numbers.norm_of_all)


def test_the_best_of_all_faces() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        a, b, bounds = rng.standard_normal((7, 4)), rng.standard_normal(7), bounds_of(4, 0.3)
        found = found_by(a, b, bounds, of_all=False)
        assert found is not None
        assert np.allclose(found.x, by_enumeration(a, b, *bounds), rtol=1e-11, atol=1e-12)


def test_exchanges_of_all_that_lead_nowhere() -> None:
    """Where they go round in circles single ones end it, or there is no end."""
    rng = np.random.default_rng(0)
    ended = 0
    for _ in range(200):
        a = rng.standard_normal((12, 1)) + 0.05 * rng.standard_normal((12, 10))
        b, bounds = rng.standard_normal(12), np.array((np.full(10, -0.1), np.full(10, 0.1)))
        found = found_by(a, b, bounds)
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
    assert found_by(a, b, bounds) is None


def test_too_few_sets() -> None:
    rng = np.random.default_rng(0)
    given = rng.standard_normal((40, 30)), rng.standard_normal(40), bounds_of(30)
    assert found_by(*given, LIMITS._replace(sets=1), of_all=False) is None
    assert found_by(*given, of_all=False) is not None
