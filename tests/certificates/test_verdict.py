"""The verdict: the same for numbers, arrays and tensors, as in exact arithmetic, and monotone."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from neula.certificates.polar import PolarBounds, PolarNumbers
from neula.certificates.verdict import Evidence, Limits, within

COUNT = 20_000

SHAPE, RCOND = (50, 20), 2.0**-40

LIMITS = Limits.for_shape(SHAPE, backward_error=1e-14, forward_error=0.1, rcond=RCOND)

RANGES = {
    "residual": LIMITS.residual,
    "refined_error": LIMITS.backward_error,
    "backward_error": LIMITS.backward_error,
    "forward_error": LIMITS.forward_error,
    "condition_bound": LIMITS.condition,
}


@pytest.fixture(scope="module")
def records() -> np.ndarray:
    """Numbers near, at and far from their limits, zero, infinite and NaN: half of the records are sound."""
    rng = np.random.default_rng(0)
    found = [(rng.random(COUNT) < 0.1).astype(float)]
    for limit in RANGES.values():
        number = limit * rng.choice([0, 2.0**-60, 0.5, 1 - 2.0**-50, 1, 1 + 2.0**-50, 2, 1e290], COUNT, p=P)
        number[rng.random(COUNT) < 0.01] = np.inf
        number[rng.random(COUNT) < 0.01] = np.nan
        found.append(number)
    return np.array(found)


P = (0.2, 0.2, 0.3, 0.2, 0.02, 0.02, 0.03, 0.03)


def accept(*numbers: Any) -> Any:
    return LIMITS.accept(Evidence(*numbers))


def accurate(*numbers: Any) -> Any:
    return LIMITS.accurate(Evidence(*numbers))


def full_rank(*numbers: Any) -> Any:
    return LIMITS.full_rank(numbers[-1])


def from_errors(doubtful: Any, *numbers: Any) -> Any:
    return LIMITS.accept(Evidence.from_errors(numbers[2], numbers[3], doubtful))


def below_limits(_: Any, *numbers: Any) -> Any:
    return within(*zip(numbers, RANGES.values(), strict=True))


@pytest.mark.parametrize("verdict", [accept, accurate, full_rank, from_errors, below_limits])
def test_arrays_tensors_and_numbers(verdict: Callable[..., Any], records: np.ndarray) -> None:
    accepted = verdict(*records)
    assert 0.1 < accepted.mean() < 0.95
    assert np.array_equal(verdict(*torch.from_numpy(records)).numpy(), accepted)
    for record, expected in zip(records.T[:1000].tolist(), accepted[:1000].tolist(), strict=True):
        assert verdict(*record) is expected
    doubtful, _, refined, backward, forward, condition = records
    small = backward <= LIMITS.backward_error
    by_hand = {
        accurate: (refined <= LIMITS.backward_error) & small,
        full_rank: condition <= LIMITS.condition,
        from_errors: (doubtful == 0) & small & (forward <= LIMITS.forward_error),
        below_limits: (records[1:] <= np.array(list(RANGES.values()))[:, None]).all(0),
        accept: accepted & accurate(*records),
    }
    assert np.array_equal(accepted, by_hand[verdict])


def test_exact_arithmetic(records: np.ndarray) -> None:
    """The limits are those of the formulas, rounded once or twice."""
    (m, n), u = SHAPE, Fraction(1, 2**53)
    exact = [Fraction(0), 1 + (m + n) * u, Fraction(1e-14), Fraction(1e-14), Fraction(0.1)]
    condition = 1 / (Fraction(6, 5) * (Fraction(RCOND) + max(m, n) * u))
    for record, accepted in zip(records.T.tolist(), LIMITS.accept(Evidence(*records)).tolist(), strict=True):
        if not all(map(math.isfinite, record)):
            assert not accepted
            continue
        numbers = [Fraction(x) for x in record]
        right = all(x <= limit for x, limit in zip(numbers[:-1], exact, strict=True))
        near = abs(numbers[-1] / condition - 1) < 4 * u
        assert near or accepted == (right and numbers[-1] < condition)


def test_monotone(records: np.ndarray) -> None:
    """Worse evidence is not accepted where better evidence is not: so the worst of a batch speaks for all."""
    rng = np.random.default_rng(1)
    with np.errstate(invalid="ignore"):
        worse = records + np.abs(records) * rng.choice([0, 2.0**-52, 1, np.inf], records.shape)
    worse[0] = np.maximum(records[0], rng.random(COUNT) < 0.5)
    batches = records.reshape(len(records), -1, 4)
    for verdict in (accept, below_limits):
        assert not (verdict(*worse) & ~verdict(*records)).any()
        assert np.array_equal(verdict(*batches.max(2)), verdict(*batches).all(1))


@pytest.mark.parametrize("name", Evidence._fields)
def test_each_number_counts(name: str) -> None:
    sound = dict.fromkeys(Evidence._fields, 0.0)
    assert LIMITS.accept(Evidence(**sound))
    for bad in (2 * RANGES.get(name, 0.5), math.inf, math.nan):
        assert not LIMITS.accept(Evidence(**{**sound, name: bad}))


def test_ranks_of_polar_factors(records: np.ndarray) -> None:
    """All singular values are 1 where none is far from it; otherwise as many as were counted."""
    bounds, full = PolarBounds(1e-14, 1e-14), 20
    rng = np.random.default_rng(2)
    counts = rng.choice([-1.0, 0.2, 7.6, 20.0, 25.0, math.nan], COUNT)
    measured = np.array([records[1], records[2], records[3], np.ones(COUNT), counts])
    expected = np.where(
        records[3] <= 1e-14, full, np.select([counts == 7.6, counts >= 20], [8, full], default=0)
    )
    assert np.array_equal(PolarNumbers(*measured).ranks(bounds, full), expected)
    assert np.array_equal(PolarNumbers(*torch.from_numpy(measured)).ranks(bounds, full).numpy(), expected)


def test_full_rank_is_asked_for_where_there_is_an_rcond() -> None:
    limits = Limits.for_shape((3, 3), 1e-15, 0.1)
    assert limits.accept(Evidence(0.0, 1.0, 0.0, 0.0, 0.1, 1e300))
