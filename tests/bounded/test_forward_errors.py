"""Forward errors of solutions within bounds, compared with exact solutions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.bounded.exact import error, solution
from tests.campaign.matrices import KINDS, RHS_KINDS, line_scales, right_hand_side

import neula
from neula.certificates.forward_error import least_squares_error

pytestmark = pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")


def checked(a: np.ndarray, b: np.ndarray, lower: np.ndarray, upper: np.ndarray):
    """The result of a problem, having compared it with the exact solution unless there was a warning."""
    result = neula.lsq_linear(a, b, (lower, upper))
    exact = solution(a.astype(float), b.astype(float), lower, upper)
    if result.converged and exact is not None:
        found = error(a.astype(float), np.asarray(result.x, float), exact)
        assert found <= result.forward_error * (1 + 1e-9), (a, b, lower, upper, result.x)
    if result.converged:
        assert (result.x == lower)[result.active_mask == -1].all()
        assert (result.x == upper)[result.active_mask == 1].all()
    return result


def not_negative(a: np.ndarray, b: np.ndarray):
    n = a.shape[1]
    return checked(a, b, np.zeros(n), np.full(n, np.inf))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "zero"])
def test_random_problems(kind: str) -> None:
    """Of every kind, in any units, with bounds from which nothing, little or much is to be gained."""
    rng = np.random.default_rng(list(KINDS).index(kind))
    for rhs in RHS_KINDS:
        n = int(rng.integers(1, 4))
        a = KINDS[kind](rng, n + int(rng.integers(0, 4)), n)
        b = right_hand_side(rng, rhs, a, 1)[:, 0]
        if rng.random() < 0.3:
            a = a * line_scales(rng, n, 12, binary=True)
        power = float(rng.choice([1.0, 1.0, 2.0**-200, 2.0**300]))  # with which x fits float64
        size = np.linalg.norm(b) / (np.linalg.norm(a, axis=0).max() or 1.0) / power
        unit = size if 0 < size < np.inf else 1.0
        lower, upper = rng.choice([-np.inf, -1.0, 0.0, 0.1], n), rng.choice([0.2, 1.0, np.inf], n)
        checked(a * power, b, lower * unit, upper * unit)
        not_negative(a * power, b)


@pytest.mark.parametrize("n", [1, 2])
def test_gradients_that_are_rounding_errors_hold_nothing_at_a_bound(n: int) -> None:
    """Whether b points away from the columns is anybody's guess where it is orthogonal to them."""
    rng = np.random.default_rng(n)
    for _ in range(20):
        a = rng.standard_normal((4, n))
        not_negative(a, right_hand_side(rng, "orthogonal", a, 1)[:, 0])


@pytest.mark.parametrize("seed", [38, 106, 114, 118, 127, 136])
def test_nearly_dependent_columns_and_a_long_residual(seed: int) -> None:
    """Where a Gram matrix has no Cholesky factor, the residual still counts."""
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((6, 1)) * rng.random(3) + 1e-11 * rng.standard_normal((6, 3))
    not_negative(a, right_hand_side(rng, "orthogonal", a, 1)[:, 0])


@pytest.mark.parametrize("b", [2.0**-1060, 3 * 2.0**-1074, 1.2345 * 2.0**-1030])
def test_solutions_that_underflow(b: float) -> None:
    result = not_negative(np.array([[2.0**40 / 3], [0.0]]), np.array([b, 0.0]))
    assert not result.converged


@pytest.mark.parametrize("unit", [1.0, 1e120])
def test_right_hand_sides_of_very_different_sizes(unit: float) -> None:
    """They share units with their bounds: what is tiny beside another one is not claimed to be known."""
    rng = np.random.default_rng(7)
    a, b = rng.standard_normal((5, 3)), rng.standard_normal((5, 4)) * unit * [1.0, 1e-60, 1e-170, 1e-310]
    with pytest.warns(neula.AccuracyWarning):
        result = neula.nnls(a, b)
    assert result.accepted.tolist() == [True, True, False, False]
    for column, x, claimed in zip(b.T[:2], result.x.T, result.forward_errors, strict=False):
        assert error(a, x, solution(a, column, np.zeros(3), np.full(3, np.inf))) <= claimed


@pytest.mark.parametrize("power", [-900, -600, 0, 600, 900])
@pytest.mark.parametrize("b_power", [-80, 0, 80])
def test_bounds_may_be_far_from_what_b_says(power: int, b_power: int) -> None:
    """Where they make x long b does not count, and where they keep it short the gradient is that of b."""
    rng = np.random.default_rng(abs(power) + b_power + 80)
    a, b = rng.standard_normal((6, 4)), rng.standard_normal(6) * 2.0**b_power
    unit = 2.0**power
    lower, upper = unit * np.array([0.7, -2.0, -np.inf, -1.0]), unit * np.array([1.3, -1.0, np.inf, 1.0])
    for some in ([0, 1, 2, 3], [0, 1], [0, 3], [3]):
        for right in (b, np.zeros(6)):
            assert checked(a[:, some], right, lower[some], upper[some]).converged


@pytest.mark.parametrize("power", [900, -900])
def test_bounds_that_are_out_of_range_in_units_of_the_problem(power: int) -> None:
    """There x is one bound or the other, or none, and nobody knows which."""
    a, b = np.array([[2.0**-power], [0.0]]), np.array([2.0**power, 0.0])
    checked(a, b, np.array([-1.0]), np.array([1.0]))
    checked(a, -b, np.array([-1.0]), np.array([1.0]))


def test_nothing_known_of_the_residual_is_nothing_known_of_the_error() -> None:
    zero = torch.zeros(1, dtype=torch.float64)
    assert math.isnan(least_squares_error(2.0, zero, zero / 0))
    assert float(least_squares_error(math.inf, zero, zero)) == math.inf


def test_more_free_columns_than_rows_are_dependent() -> None:
    """Also where rounding errors of the Gram matrix, times the condition number of three, hide it."""
    a = np.array(
        [
            [0.5336531421178784, -0.1107188659396468, 0.012310782873101065, 0.00021503203926753167],
            [0.0, 0.005495499007902436, 0.0150965335994523, -0.0020794393611566534],
            [0.0, 0.0, -0.00035736207463239885, -0.005008538494592308],
        ]
    )
    b = np.array([-2.8, -1.8, -3.6])
    with pytest.warns(neula.AccuracyWarning):
        result = neula.lsq_linear(a, b, (-1e4, np.inf))
    assert not result.active_mask.any()
    assert result.forward_error == np.inf
