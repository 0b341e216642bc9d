"""Functions that evidence is made of: of floats, arrays and tensors, beside exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from neula.certificates.forward_error import (
    COMPUTED,
    MAX_RATE,
    NOISE,
    enlarged,
    least_squares_error,
    left_by_update,
    measured_error,
    residual_ratio,
    rounded_error,
    wedin_factor,
)
from neula.certificates.kkt import KKTNorms
from neula.certificates.residuals import (
    FLOOR,
    STAGNATION,
    goes_on,
    improves,
    projection_noise,
    quotient,
    residual_noise,
    settled,
)
from neula.kernels.small_problems.refining import progress, relative_error

RECORDS = 100_000
SINGLE = 2_000
"""Records that are taken one by one, as Python's numbers and as fractions."""

U = Fraction(1, 2**53)
RISES, FALLS, NEITHER = 1, -1, 0


class Bound(NamedTuple):
    function: Callable[..., Any]
    exact: Callable[..., Fraction | None]  # of fractions; None where it is infinite
    directions: tuple[int, ...]  # whether it rises or falls with each argument
    roundings: int  # of the function, at most


def _part(a: Fraction, b: Fraction) -> Fraction | None:
    if not a:
        return Fraction(0)
    return a / b if b else None


def _enlarged(x: Fraction, rate: Fraction) -> Fraction | None:
    return x / (1 - rate) if rate < 1 else None


def _lifted(rate: Fraction) -> Fraction | None:
    left, digits = _enlarged(rate, rate), 1 << 400
    return None if left is None else left * Fraction(math.isqrt(int((1 + rate) * digits)), 1 << 200)


def _wedin(condition: Fraction, ratio: Fraction) -> Fraction:
    return 2 + (condition + 1) * ratio


def _least_squares(condition: Fraction, eta: Fraction, ratio: Fraction) -> Fraction | None:
    error = condition * (eta + Fraction(NOISE) * U) * _wedin(condition, ratio)
    return None if error >= 1 else error


def _measured(left: Fraction, size: Fraction, rounding: Fraction, rate: Fraction) -> Fraction | None:
    error = _part(left, size)
    if error is None or error >= 1 or rate > MAX_RATE:
        return None
    return (error + rounding) / (1 - error)


BOUNDS = {
    "quotient": Bound(quotient, _part, (RISES, FALLS), 1),
    "residual ratio": Bound(
        residual_ratio, lambda r, norm, size: _part(r, norm * size), (RISES, FALLS, FALLS), 2
    ),
    "enlarged": Bound(enlarged, _enlarged, (RISES, RISES), 2),
    "left by update": Bound(left_by_update, lambda rate: _enlarged(rate, rate), (RISES,), 2),
    "left by update, lifted": Bound(lambda rate: left_by_update(rate, lifted=True), _lifted, (RISES,), 5),
    "measured error": Bound(measured_error, _measured, (RISES, FALLS, RISES, RISES), 0),
    "Wedin's factor": Bound(wedin_factor, _wedin, (RISES, RISES), 3),
    "Wedin's bound": Bound(least_squares_error, _least_squares, (RISES, RISES, RISES), 6),
    "rounded error": Bound(rounded_error, lambda e, r: e * (1 + r) + r, (RISES, RISES), 3),
    "projection noise": Bound(
        lambda *sizes: projection_noise(2.0**-50, *sizes),
        lambda norm, condition, x, b, r: (norm * x + b + condition * r) / 2**50,
        (RISES,) * 5,
        4,
    ),
}

KKT = {
    "backward error within bounds": lambda of: of.backward_error,
    "moved gradients": lambda of: of.moved(2.0, 8.0),
    "noise of gradients": lambda of: of.noise((7, 5), of.image),
}
"""Of :class:`~neula.certificates.kkt.KKTNorms`."""


def _kkt(
    name: str, r: Fraction, wrong: Fraction, p: Fraction, rest: Fraction, x: Fraction, b: Fraction
) -> Fraction:
    digits = 1 << 600
    orthogonal = Fraction(math.isqrt(int(max(r * r - p * p, Fraction(0)) * digits)), 1 << 300)
    outside, inside = _part(rest, orthogonal), _part(p, x + b)
    both = None if outside is None or inside is None else inside + outside
    bounds: list[Fraction] = [y for y in (_part(wrong, r), _part(r, x + b), both) if y is not None]
    error = min([*bounds, Fraction(10**400)])
    return {
        "backward error within bounds": error,
        "moved gradients": (error + Fraction(NOISE) * U) * (2 * x + b + 8 * r),
        "noise of gradients": 16 * U * (r + b + x),
    }[name]


TESTS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "improves": (improves, (FALLS, RISES)),
    "goes on": (goes_on, (NEITHER, RISES, FALLS, FALLS)),
    "settled": (settled, (FALLS, RISES)),
}
"""Tests, and whether they hold more or less often if an argument is larger."""

FUNCTIONS = {name: (bound.function, bound.directions) for name, bound in BOUNDS.items()} | TESTS


def _drawn(arguments: int, most: float, special: tuple[float, ...]) -> np.ndarray:
    """Records, shape (arguments, RECORDS), of magnitudes up to ``10^most``, half of them near 1."""
    random = np.random.default_rng(arguments)
    sizes = np.where(random.random(RECORDS) < 0.5, most, 1.0)
    found = 10.0 ** (sizes * random.uniform(-1, 1, (arguments, RECORDS)))
    chosen = random.choice(np.array([0.0, 0.25, 1.0, 1 - 2.0**-53, *special]), found.shape)
    return np.where(random.random(found.shape) < 0.1, chosen, found)


def _any_records(arguments: int) -> np.ndarray:
    return _drawn(arguments, 300.0, (math.inf, math.nan))


def _of(function: Callable[..., Any], records: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(function(*records))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_arrays_and_tensors_give_the_same(name: str) -> None:
    """And nothing follows from NaN: no test holds, and no bound is finite, except those of what vanishes,
    whatever it is relative to.
    """
    function, directions = FUNCTIONS[name]
    records = _any_records(len(directions))
    found = _of(function, records)
    of_tensors = function(*map(torch.from_numpy, records)).numpy()
    single = [function(*record) for record in records[:, :SINGLE].T.tolist()]
    assert {type(x) for x in single} == {bool if name in TESTS else float}
    # Libraries may round a root otherwise.
    exact = 2.0**-51 if "lifted" in name else 0.0
    np.testing.assert_allclose(of_tensors, found, rtol=exact, atol=0)
    np.testing.assert_allclose(single, found[:SINGLE], rtol=exact, atol=0)
    records = np.where(records == 0, 1.0, records)
    for place in range(len(directions)):
        found = _of(function, np.insert(np.delete(records, place, 0), place, np.nan, 0))
        assert not (found if name in TESTS else np.isfinite(found)).any()


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_are_those_of_exact_arithmetic(name: str) -> None:
    """No less where COMPUTED is part of them, else by some roundings at most; nothing over- or underflows."""
    function, exact, directions, roundings = BOUNDS[name]
    records = _drawn(len(directions), 30.0, ())[:, :SINGLE]
    for record, found in zip(records.T.tolist(), _of(function, records).tolist(), strict=True):
        expected = exact(*map(Fraction, record))
        if expected is None:
            assert found == math.inf
        elif roundings:
            assert abs(Fraction(found) - expected) <= roundings * U * expected
        else:
            assert expected <= Fraction(found) <= Fraction(COMPUTED) ** 2 * expected


@pytest.mark.parametrize("name", FUNCTIONS)
def test_larger_arguments_change_bounds_and_tests_in_one_direction(name: str) -> None:
    """NaN is the largest bound."""
    function, directions = FUNCTIONS[name]
    records, random = _any_records(len(directions)), np.random.default_rng(len(name))
    before = _of(function, records)
    for place, direction in enumerate(directions):
        larger = records.copy()
        with np.errstate(over="ignore"):
            larger[place] *= 1 + random.choice([2.0**-52, 0.5, 1e10, 1e300], RECORDS)
        after = _of(function, larger)
        low, high = (before, after) if direction == RISES else (after, before)
        if name in BOUNDS:
            low, high = (np.where(np.isnan(x), np.inf, x) for x in (low, high))
        assert direction == NEITHER or (low <= high).all()


@pytest.mark.parametrize("name", KKT)
def test_within_bounds(name: str) -> None:
    """The same of numbers, arrays and tensors, and in exact arithmetic."""
    records, measure = _drawn(6, 30.0, ()), KKT[name]
    found = measure(KKTNorms(*records))
    of_tensors = measure(KKTNorms(*map(torch.from_numpy, records))).numpy()
    np.testing.assert_allclose(of_tensors, found, rtol=2.0**-51, atol=0)
    for record, expected in zip(records[:, :SINGLE].T.tolist(), found[:SINGLE].tolist(), strict=True):
        single = measure(KKTNorms(*record))
        assert single == pytest.approx(expected, rel=2.0**-51, abs=0)
        exact = _kkt(name, *map(Fraction, record))
        assert single == math.inf if exact >= 10**390 else abs(Fraction(single) - exact) <= 12 * U * exact


def test_kernels_bound_and_stop_in_the_same_way() -> None:
    left, size, before, floor, rate = map(torch.from_numpy, _any_records(5)[..., None])
    found = relative_error(left, size, torch.zeros_like(left), rate, MAX_RATE, COMPUTED)
    torch.testing.assert_close(found, measured_error(left, size, rate=rate), rtol=2.0**-50, atol=0)
    active = progress(torch.ones_like(left).bool(), left, before, floor, size, 1e-3, STAGNATION, FLOOR)[1]
    assert torch.equal(active, goes_on(left, before, 1e-3 * size, floor))


def test_rounding_errors_of_residuals() -> None:
    assert residual_noise(9, doubled=False) == residual_noise(9, doubled=False, random=True) == 6 * 2.0**-53
    assert residual_noise(9, doubled=True) == 9 * 2.0**-104
    assert residual_noise(9, doubled=True, random=True) == 3 * 2.0**-104
