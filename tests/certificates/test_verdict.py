"""The verdict: the same for numbers, arrays and tensors, as in exact arithmetic, and monotone."""

from __future__ import annotations

import math
from fractions import Fraction

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


def test_arrays_tensors_and_numbers(records: np.ndarray) -> None:
    accepted = LIMITS.accept(Evidence(*records))
    assert 0.1 < accepted.mean() < 0.9
    assert np.array_equal(LIMITS.accept(Evidence(*torch.from_numpy(records))).numpy(), accepted)
    for record, expected in zip(records.T[:1000].tolist(), accepted[:1000].tolist(), strict=True):
        assert LIMITS.accept(Evidence(*record)) is expected


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
    before = LIMITS.accept(Evidence(*records))
    with np.errstate(invalid="ignore"):
        worse = records + np.abs(records) * rng.choice([0, 2.0**-52, 1, np.inf], records.shape)
    worse[0] = np.maximum(records[0], rng.random(COUNT) < 0.5)
    assert not (LIMITS.accept(Evidence(*worse)) & ~before).any()
    batches = records.reshape(len(records), -1, 4)
    assert np.array_equal(LIMITS.accept(Evidence(*batches.max(2))), LIMITS.accept(Evidence(*batches)).all(1))


@pytest.mark.parametrize("name", Evidence._fields)
def test_each_number_counts(name: str) -> None:
    sound = dict.fromkeys(Evidence._fields, 0.0)
    assert LIMITS.accept(Evidence(**sound))
    for bad in (2 * RANGES.get(name, 0.5), math.inf, math.nan):
        assert not LIMITS.accept(Evidence(**{**sound, name: bad}))


def test_measures_of_factors(records: np.ndarray) -> None:
    """The same of any number of measures: for arrays, tensors and numbers, in exact arithmetic, monotone."""
    limits = list(RANGES.values())
    accepted = within(*zip(records[1:], limits, strict=True))
    assert 0.1 < accepted.mean() < 0.9
    assert np.array_equal(within(*zip(torch.from_numpy(records[1:]), limits, strict=True)).numpy(), accepted)
    for record, expected in zip(records[1:].T.tolist(), accepted.tolist(), strict=True):
        assert within(*zip(record, limits, strict=True)) is expected
        right = not any(map(math.isnan, record)) and all(
            x < math.inf and Fraction(x) <= Fraction(limit) for x, limit in zip(record, limits, strict=True)
        )
        assert right is expected
    worst = records[1:].reshape(len(limits), -1, 4).max(2)
    assert np.array_equal(within(*zip(worst, limits, strict=True)), accepted.reshape(-1, 4).all(1))


def test_solutions_that_only_their_errors_speak_for(records: np.ndarray) -> None:
    doubtful, _, _, backward, forward, _ = records
    expected = (doubtful == 0) & (backward <= LIMITS.backward_error) & (forward <= LIMITS.forward_error)
    assert np.array_equal(LIMITS.accept(Evidence.from_errors(backward, forward, doubtful)), expected)


def test_backward_errors_alone(records: np.ndarray) -> None:
    expected = (records[2] <= LIMITS.backward_error) & (records[3] <= LIMITS.backward_error)
    assert np.array_equal(LIMITS.accurate(Evidence(*records)), expected)
    assert np.array_equal(LIMITS.accurate(Evidence(*torch.from_numpy(records))).numpy(), expected)
    assert not (LIMITS.accept(Evidence(*records)) & ~expected).any()


def test_full_rank_alone(records: np.ndarray) -> None:
    expected = records[5] <= LIMITS.condition
    assert np.array_equal(LIMITS.full_rank(records[5]), expected)
    assert np.array_equal(LIMITS.full_rank(torch.from_numpy(records[5])).numpy(), expected)
    assert [LIMITS.full_rank(x) for x in records[5, :1000].tolist()] == expected[:1000].tolist()


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
