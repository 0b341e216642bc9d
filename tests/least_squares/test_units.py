"""Columns in different units and right-hand sides near the ends of the range, beside exact arithmetic."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import numpy as np
import pytest

import neula
from campaign.backward import NOISE, backward_errors
from campaign.oracle import LeastSquares

SIZES = {
    "one large": [2.0**40, 1, 1, 1, 1, 1],
    "one small": [1, 2.0**-40, 1, 1, 1, 1],
    "two kinds": [1e12, 1e-12, 1e12, 1e-12, 1e12, 1e-12],
    "far apart": [1e100, 1, 1e-100, 1e50, 1e-50, 1],
}


def check(a: np.ndarray, b: np.ndarray, **options: object) -> None:
    """Certified, and what is claimed is true."""
    result = neula.lstsq(a, b, **options)
    truth = LeastSquares(a, b[:, None], rcond=max(a.shape) * 2.0**-52)
    (error,) = backward_errors(truth, np.asarray(result.x)[:, None], result.rank)
    noise = NOISE * sum(a.shape) ** 0.5
    assert result.converged
    assert result.rank in truth.ranks
    assert error <= min(result.tolerance, result.backward_error) + noise
    assert result.backward_error <= result.tolerance
    assert truth.errors(np.asarray(result.x)[:, None], result.rank)[0] <= result.forward_error


def test_rows_in_other_units(rng: np.random.Generator) -> None:
    """Also where rows of A are nearly parallel, and those of A with columns of norm 1 are not."""
    check(np.array([[1e14, 1.0, 2.0], [2e14, 3.0, 1.0]]), np.array([1.0, 3.0]))
    check(np.array([[1e14, 1.0, 2.0], [2e14, 3.0, 1.0]]), np.array([1.0, 3.0]), engine="emulated")
    for power in (-40, 40):
        a = rng.standard_normal((3, 7))
        a[1] *= 2.0**power
        check(a, a @ rng.standard_normal(7))


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("m", [1, 3, 5])
@pytest.mark.parametrize("name", SIZES)
def test_wide_problems_with_columns_in_different_units(
    name: str, m: int, engine: str, rng: np.random.Generator
) -> None:
    check(rng.standard_normal((m, 6)) * np.array(SIZES[name]), rng.standard_normal(m), engine=engine)


def test_a_batch_of_wide_problems_in_different_units(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((5, 3, 6)) * np.array(SIZES["two kinds"]), rng.standard_normal((5, 3, 1))
    result = neula.lstsq(a, b)
    assert result.converged
    for i in range(5):
        truth = LeastSquares(a[i], b[i], rcond=6 * 2.0**-52)
        assert backward_errors(truth, result.x[i], 3)[0] <= result.tolerance
        assert truth.errors(result.x[i], 3)[0] <= result.forward_errors[i, 0]


@pytest.mark.parametrize("shape", [(6, 3), (3, 6), (4, 4)])
@pytest.mark.parametrize("exponent", [-1060, -1040, -960, -500, 900])
def test_powers_of_two_change_nothing_but_what_underflows(
    shape: tuple[int, int], exponent: int, rng: np.random.Generator
) -> None:
    """An x that is subnormal has lost digits, which counts; all others are as right as ever."""
    a, b = rng.standard_normal(shape), rng.standard_normal((shape[0], 2))
    b[:, 1] *= 2.0**-30
    small = np.ldexp(b, exponent)
    truth = LeastSquares(a, small, rcond=max(shape) * 2.0**-52)
    with pytest.warns(neula.AccuracyWarning, match="underflows") if exponent < -1030 else nullcontext():
        result = neula.lstsq(a, small)
    errors = backward_errors(truth, result.x, min(shape))
    assert (truth.errors(result.x, min(shape)) <= result.forward_errors).all()
    assert errors.max() <= result.backward_error + NOISE * sum(shape) ** 0.5
    assert result.converged == (exponent > -1030) == (result.backward_error <= result.tolerance)


@pytest.mark.parametrize("kind", ["gen", "pos", "factors"])
@pytest.mark.parametrize("exponent", [-1060, -1000, 900])
def test_systems_near_the_ends_of_the_range(exponent: int, kind: str, rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((5, 5)), rng.standard_normal(5)
    a = a @ a.T + np.eye(5) if kind == "pos" else a
    expected, small = np.ldexp(np.linalg.solve(a, b), exponent), np.ldexp(b, exponent)
    message = "" if kind == "factors" else "underflows"
    with pytest.warns(neula.AccuracyWarning, match=message) if exponent < -1030 else nullcontext():
        if kind == "factors":
            x = neula.lu_solve(neula.lu_factor(a), small)
        else:
            result = neula.solve(a, small, assume_a=kind)
            assert result.converged == (exponent > -1030) == (result.backward_error <= result.tolerance)
            x = result.x
    assert np.abs(x - expected).max() <= 1e-12 * np.abs(expected).max() + 2.0**-1073


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_results_that_underflow_in_their_dtype(dtype: type) -> None:
    a, b = np.array([[3.0], [4.0]], dtype), np.array([3.0, 4.0], dtype) * np.finfo(dtype).tiny
    with pytest.warns(neula.AccuracyWarning, match="wider dtype"):
        result = neula.lstsq(a, (b.astype(float) / 700).astype(dtype))
    assert result.backward_error > result.tolerance


def test_rounded_products_with_weights_count() -> None:
    """Also where nothing else is inexact, and the problem is scaled because its weights are far apart."""
    a = np.outer([1, -3, 2], [3, -3, 4, 4, -3])
    b = np.array([[1.0], [2.0], [5.0]]) / 3
    weights = np.array([1.02420682e-100, 9.27674453e99, 1.26328142e100])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", neula.AccuracyWarning)
        result = neula.lstsq(a, b, weights=weights, damp=0.64, certify="forward")
    exact = LeastSquares(a, b, weights=weights, damp=0.64, rcond=5 * 2.0**-52)
    assert (exact.errors(result.x, result.rank) <= result.forward_errors).all()
