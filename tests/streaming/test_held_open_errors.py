"""Forward errors of incremental least squares, compared with exact solutions."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from tests.campaign.matrices import KINDS, right_hand_side
from tests.campaign.oracle import LeastSquares
from tests.exact_solutions import error_of, least_squares

import neula


def checked(a: np.ndarray, b: np.ndarray, scales: np.ndarray | None = None) -> neula.LstsqResult:
    """The result of a fit of two blocks of rows; its forward errors hold unless there was a warning."""
    fit = neula.LeastSquares(a.shape[1], scales=scales)
    for rows in np.array_split(np.arange(len(a)), 2):
        fit.update(a[rows], b[rows])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", neula.AccuracyWarning)
        result = fit.solve()
    if result.converged and result.rank == a.shape[1]:
        errors = LeastSquares(a, b, rcond=0.0).errors(result.x, result.rank)
        assert (errors <= result.forward_errors).all(), (errors, result.forward_errors)
    return result


@pytest.mark.parametrize(
    "kind", ["normal", "uniform", "graded", "diagonal", "kahan", "hilbert", "vandermonde"]
)
@pytest.mark.parametrize("rhs", ["range", "nearly orthogonal", "orthogonal", "unit"])
def test_of_every_kind(kind: str, rhs: str) -> None:
    rng = np.random.default_rng(8)
    for m, n in ((2, 1), (4, 1), (6, 2), (8, 3)):
        a = KINDS[kind](rng, m, n)
        checked(a, right_hand_side(rng, rhs, a, 2))


@pytest.mark.parametrize("unit", [1e-300, 1e-200, 1e-130, 1e-60, 1e100])
@pytest.mark.parametrize("scaled", ["A", "b", "both", "one column"])
def test_units(scaled: str, unit: float, rng: np.random.Generator) -> None:
    """Units of all numbers together do not matter."""
    a, b = rng.standard_normal((9, 3)), rng.standard_normal((9, 2))
    if scaled in ("A", "both"):
        a *= unit
    if scaled in ("b", "both"):
        b *= unit
    if scaled == "one column":
        a[:, 1] *= unit
    result = checked(a, b)
    assert result.converged or scaled == "one column"
    if scaled == "one column":
        assert checked(a, b, scales=np.array([1.0, unit, 1.0])).converged


@pytest.mark.parametrize("power", [3, 6, 9, 12])
def test_columns_of_different_sizes(power: int, rng: np.random.Generator) -> None:
    """The rounding errors of products of slices are those of the largest column."""
    sizes = 10.0 ** np.array([power, -power, 0.0])
    a, b = rng.standard_normal((12, 3)) * sizes, rng.standard_normal((12, 1))
    assert not checked(a, b).converged
    assert checked(a, b, scales=sizes).converged


@pytest.mark.parametrize("power", [-1040, -1000, -500, 0, 390])
def test_sequences_at_every_scale(power: int, tmp_path: Path) -> None:
    """The same numbers, whatever they are multiplied by, and whatever is done with them."""
    rng = np.random.default_rng(2)
    a, b = rng.integers(-9, 10, (12, 3)).astype(float), rng.integers(-9, 10, 12).astype(float)
    fit, other = neula.LeastSquares(3), neula.LeastSquares(3)
    fit.update(np.ldexp(a[:6], power), np.ldexp(b[:6], power))
    fit.forget(0.25)
    fit.update(np.ldexp(a[6:9], power), np.ldexp(b[6:9], power), weights=[1.0, 2.0, 0.5])
    other.update(np.ldexp(a[9:], power), np.ldexp(b[9:], power))
    fit.merge(other)
    fit.downdate(np.ldexp(a[9:10], power), np.ldexp(b[9:10], power))
    fit.save(tmp_path / "fit.npz")
    result = neula.LeastSquares.load(tmp_path / "fit.npz").solve()
    weights = np.array([0.5] * 6 + [1.0, 2.0, 0.5] + [0.0, 1.0, 1.0])
    assert result.converged
    truth = LeastSquares(a, b[:, None], weights=weights, rcond=0.0)
    assert (truth.errors(result.x[:, None], 3) <= result.forward_errors).all()
    norm = np.linalg.norm(weights * (b - a @ result.x))
    assert np.ldexp(result.residual_norm, -power) == pytest.approx(norm, rel=1e-12)


def test_rows_that_are_far_larger_than_those_before() -> None:
    fit = neula.LeastSquares(2)
    fit.update([[1e-300, 2e-300], [3e-300, 1e-300]], [1e-300, 5e-300])
    fit.update([[3.0, 1.0], [1.0, -1.0], [2.0, 5.0]], [7.0, 1.0, 9.0])
    fit.forget(1e-300)
    fit.forget(1e-300)
    result = fit.solve()
    assert result.converged
    assert np.allclose(result.x, [2.0, 1.0], rtol=1e-13)


def test_a_fit_of_dependent_columns_keeps_its_rows() -> None:
    fit = neula.LeastSquares(2)
    fit.update([[1.0, 0.0], [2.0, 0.0]], [1.0, 1.0])
    with pytest.raises(ValueError, match="begin a new fit with the other rows"):
        fit.downdate([[2.0, 0.0]], [1.0])
    assert fit.rows == 2
    assert np.allclose(fit.solve().x, [0.6, 0.0])


def test_right_hand_sides_that_larger_ones_have_hidden() -> None:
    """Beside 1 nothing is known of ``2^-200``, even where removing the rows leaves zeros."""
    for seed in (31, 76):
        rng = np.random.default_rng(seed)
        a, more = rng.standard_normal((4, 2)), rng.standard_normal((5, 2))
        fit = neula.LeastSquares(2)
        fit.update(a, a @ np.ones((2, 2)))
        fit.update(more, 2.0**-200 * rng.standard_normal((5, 2)))
        fit.downdate(a, a @ np.ones((2, 2)))
        with pytest.warns(neula.AccuracyWarning):
            result = fit.solve()
        assert (result.forward_errors >= 1).all()


@pytest.mark.parametrize("damp", [1e-3, 1e6])
def test_damping_leaves_the_digits_of_householder(damp: float, rng: np.random.Generator) -> None:
    """A step with sums that were kept would bring the square of the condition number of A."""
    n, u, v = 4, *(np.linalg.qr(rng.standard_normal((m, 4)))[0] for m in (30, 4))
    a = u * np.geomspace(1, 1e-6, n) @ v.T
    b = a @ rng.standard_normal(n)
    fit = neula.LeastSquares(n)
    fit.update(a, b)
    result = fit.solve(damp=damp)
    stacked, right = np.vstack([a, damp * np.eye(n)]), np.concatenate([b, np.zeros(n)])
    sizes, exact = np.linalg.norm(stacked, axis=0), least_squares(stacked, right)
    condition, x = np.linalg.cond(stacked / sizes), np.array([float(y) for y in exact])
    ratio = np.linalg.norm(right - stacked @ x) / np.linalg.norm(sizes * x)
    error = error_of(stacked, result.x, exact)
    assert error <= result.forward_error
    assert error <= 8 * n * 2.0**-53 * condition * (1 + condition * ratio)


def test_residual_of_dependent_columns(rng: np.random.Generator) -> None:
    """The residual includes the part of b in rows of R that belong to dependent columns."""
    a, b = rng.standard_normal((50, 4)), rng.standard_normal((50, 2))
    a[:, 3] = a[:, 1]
    result = checked(a, b)
    assert result.rank == 3
    norms = np.linalg.norm(b - a @ result.x, axis=0)
    assert np.allclose(result.residual_norm, norms, rtol=50 * 4 * 2.0**-53)
