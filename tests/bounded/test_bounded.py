"""Least squares with bounds: the conditions of Karush, Kuhn and Tucker, and SciPy."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import scipy.optimize
from tests.bounded.kkt import U, violation
from tests.matrices import with_condition

import neula
from scaled_errors import scaled_errors


def problem(m: int, n: int, seed: int = 0, condition: float = 10.0):
    rng = np.random.default_rng(seed)
    return with_condition(rng, m, n, condition), rng.standard_normal(m)


def bound(n: int) -> float:
    """Of violations: products of n terms, summed at random."""
    return 20 * max(n, 1) ** 0.5 * U


@pytest.mark.parametrize("shape", [(1, 1), (7, 7), (40, 13), (90, 60), (33, 32)])
@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6])
def test_nnls(shape, condition) -> None:
    A, b = problem(*shape, condition=condition)
    result = neula.nnls(A, b)
    assert result.converged
    assert violation(A, b, result.x, 0.0, np.inf) < bound(shape[1])
    assert np.array_equal(result.active_mask == -1, result.x == 0)
    assert result.rnorm == pytest.approx(np.linalg.norm(b - A @ result.x), rel=1e-13)
    expected = scipy.optimize.nnls(A, b)[0]
    # Both are exact for data that differ by a few u: Wedin's bound, which the result reports.
    assert scaled_errors(A, result.x, expected) <= 4 * result.forward_error or not expected.any()


@pytest.mark.parametrize("shape", [(20, 30), (3, 50), (1, 4)])
def test_fewer_rows_than_columns(shape) -> None:
    """Solutions of an underdetermined problem are not unique where they leave no residual."""
    A, b = np.abs(problem(*shape)[0]), -np.abs(problem(*shape)[1])
    A[:, ::2] *= -1
    rng = np.random.default_rng(3)
    A += 0.3 * rng.standard_normal(shape)
    result = neula.nnls(A, b)
    assert violation(A, b, result.x, 0.0, np.inf) < bound(shape[1])
    assert result.backward_error <= result.tolerance
    reference = scipy.optimize.nnls(A, b)[1]
    assert result.rnorm <= reference + 1e-12 * np.linalg.norm(b)


def test_dependent_columns() -> None:
    """A solution, whose residual is that of any other, and no digit of x is guaranteed."""
    A, b = problem(30, 6)
    A = np.column_stack([A, A[:, 0], A[:, 1] + A[:, 2], np.zeros(30)])
    b = A @ np.ones(9) + 0.1 * b
    with pytest.warns(neula.IllConditionedWarning):
        result = neula.nnls(A, b)
    assert not result.converged
    assert result.backward_error <= result.tolerance
    assert violation(A, b, result.x, 0.0, np.inf) < bound(9)
    assert result.rnorm == pytest.approx(scipy.optimize.nnls(A, b)[1], rel=1e-12)


def test_a_column_twice_that_is_not_needed() -> None:
    """Dependent columns do no harm where their unknowns are zero in every solution."""
    A, b = problem(30, 4)
    A = np.column_stack([A, -b, -b])
    result = neula.nnls(A, b + A[:, 0])
    assert result.converged
    assert (result.x[4:] == 0).all()


@pytest.mark.parametrize("condition", [1e8, 1e10, 1e12])
def test_ill_conditioned(condition) -> None:
    A, b = problem(60, 12, condition=condition)
    b = A @ np.maximum(np.random.default_rng(1).standard_normal(12), 0) + 1e-9 * b
    result = neula.nnls(A, b)
    assert result.backward_error <= result.tolerance
    assert violation(A, b, result.x, 0.0, np.inf) < bound(12)
    if result.converged:
        expected = scipy.optimize.nnls(A, b)[0]
        assert np.linalg.norm(result.x - expected) <= 10 * result.forward_error * np.linalg.norm(expected)


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e150])
def test_units_do_not_matter(scale) -> None:
    A, b = problem(25, 8)
    plain = neula.nnls(A, b)
    columns = 2.0 ** np.random.default_rng(0).integers(-20, 20, 8)
    exact = 2.0 ** np.round(np.log2(scale))
    scaled = neula.nnls(A * columns, b * exact)
    assert scaled.converged
    assert np.array_equal(scaled.active_mask, plain.active_mask)
    assert np.allclose(scaled.x * (columns / exact), plain.x, rtol=1e-12, atol=0)


def test_bounds_that_underflow_are_kept() -> None:
    """Beside an unknown of 1e296 the others' bounds are nothing, and x is within them all the same."""
    A = np.array([[1e-301, 2e-301, 3e-301]])
    lower, upper = np.array([5e-205, -np.inf, -2e-204]), np.array([np.inf, np.inf, -1e-204])
    with pytest.warns(neula.AccuracyWarning):
        x = neula.lsq_linear(A, [-4e-5], (lower, upper)).x
    assert ((lower <= x) & (x <= upper)).all()


def test_a_corner_is_exact() -> None:
    corner = neula.nnls(np.eye(5), -np.ones(5))
    assert corner.converged
    assert corner.forward_error == 0
    assert not corner.x.any()


def test_many_right_hand_sides() -> None:
    """Sets that many of them share, and sets of their own, are solved for in different ways."""
    rng = np.random.default_rng(0)
    A, _ = problem(30, 9)
    B = rng.standard_normal((30, 400))
    B[:, 100:200] = A @ np.abs(rng.standard_normal((9, 100)))
    result = neula.nnls(A, B)
    assert result.converged
    assert result.x.shape == (9, 400)
    assert result.residual_norms.shape == (400,)
    expected = np.column_stack([scipy.optimize.nnls(A, b)[0] for b in B.T])
    assert np.allclose(result.x, expected, atol=1e-12)
    assert (result.accepted & (result.backward_errors <= result.tolerance)).all()


def test_batches() -> None:
    rng = np.random.default_rng(0)
    A, b = rng.standard_normal((3, 1, 12, 4)), rng.standard_normal((1, 2, 12, 5))
    result = neula.lsq_linear(A, b, (-0.1, np.full(4, 0.3)))
    assert result.x.shape == (3, 2, 4, 5)
    assert result.cost.shape == result.accepted.shape == (3, 2, 5)
    assert result.fun.shape == (3, 2, 12, 5)
    for i, j, k in np.ndindex(3, 2, 5):
        expected = scipy.optimize.lsq_linear(A[i, 0], b[0, j, :, k], (-0.1, 0.3), method="bvls").x
        assert np.allclose(result.x[i, j, :, k], expected, atol=1e-12)
    assert np.allclose(result.fun, A @ result.x - b)


def test_as_scipy_returns_it() -> None:
    A, b = problem(30, 8, condition=3.0)
    x, rnorm = neula.nnls(A, b)
    expected = scipy.optimize.nnls(A, b)
    assert np.allclose(x, expected[0])
    assert isinstance(rnorm, float)
    for bounds in [(-0.2, 0.1), (np.full(8, -0.2), np.linspace(0, 1, 8)), (-np.inf, np.inf)]:
        ours, theirs = neula.lsq_linear(A, b, bounds), scipy.optimize.lsq_linear(A, b, bounds, method="bvls")
        for name in ("x", "fun", "cost"):
            assert np.allclose(ours[name], theirs[name], atol=1e-12)
        assert np.array_equal(ours.active_mask, theirs.active_mask)
        assert np.allclose(ours.unbounded_sol, theirs.unbounded_sol[0])
        assert ours.success == theirs.success
        assert ours.optimality < 1e-14
        assert (ours.status == 3) == (theirs.status == 3)
        assert (ours.nit == 0) == (theirs.nit == 0)
    assert np.allclose(
        neula.lsq_linear(A, b, scipy.optimize.Bounds(0, 1)).x, neula.lsq_linear(A, b, (0, 1)).x
    )
    with pytest.raises(KeyError):
        ours["nothing"]


def test_integers_views_and_other_engines() -> None:
    A = np.arange(24).reshape(8, 3)[::-1] % 5
    b = np.arange(16)[::-2]
    expected = scipy.optimize.nnls(A, b)[0]
    for engine in ("auto", "emulated"):
        assert np.allclose(neula.nnls(A, b, engine=engine).x, expected)
    assert np.allclose(neula.nnls(A.tolist(), b.tolist()).x, expected)


@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0, 0)])
def test_empty(shape) -> None:
    A, b = np.ones(shape), np.ones(shape[0])
    result = neula.lsq_linear(A, b, (0.5, 2.0))
    assert result.converged
    assert np.array_equal(result.x, np.full(shape[1], 0.5))
    assert result.cost == shape[0] / 2
    assert neula.nnls(np.ones((5, 2)), np.ones((5, 0))).x.shape == (2, 0)
    assert neula.nnls(np.ones((0, 5, 2)), np.ones((5, 1))).x.shape == (0, 2, 1)


def test_nan_in_a_batch() -> None:
    rng = np.random.default_rng(0)
    A, b = rng.standard_normal((3, 9, 2)), rng.standard_normal((3, 9, 2))
    A[1, 0, 0], b[2, 3, 1] = np.nan, np.inf
    with pytest.warns(neula.AccuracyWarning, match="hold NaN or Inf"):
        result = neula.nnls(A, b)
    assert result.accepted.tolist() == [[True, True], [False, False], [True, False]]
    assert np.isnan(result.x[1]).all()
    assert np.isfinite(result.x[2, :, 0]).all()
    with pytest.raises(ValueError, match=r"A\[1, 0, 0\] is nan"):
        neula.nnls(A, b, strict=True)


def test_bad_input() -> None:
    A, b = problem(6, 3)
    nan, infinite = (
        np.where(np.arange(18).reshape(6, 3) == 7, np.nan, A),
        np.where(np.arange(6) == 4, np.inf, b),
    )
    for message, call in [
        (r"the lower bound 2.0 of x\[1\] must be less than", lambda: neula.lsq_linear(A, b, ([0, 2, 0], 2))),
        ("nan", lambda: neula.lsq_linear(A, b, (np.nan, 2))),
        (r"shape \(3,\).*got \(2,\)", lambda: neula.lsq_linear(A, b, ([0, 2], 2))),
        ("bounds must be a pair", lambda: neula.lsq_linear(A, b, 3.0)),
        ("unknown method 'simplex'", lambda: neula.lsq_linear(A, b, method="simplex")),
        ("can't be used", lambda: neula.lsq_linear(A, b, method="bvls", lsq_solver="lsmr")),
        ("at least 1, got 0", lambda: neula.nnls(A, b, maxiter=0)),
        ("do not fit", lambda: neula.nnls(A, b[:-1])),
        (r"A\[2, 1\] is nan", lambda: neula.nnls(nan, b)),
        (r"b\[4\] is inf", lambda: neula.nnls(A, infinite)),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_too_few_iterations() -> None:
    A, b = problem(60, 40)
    with pytest.warns(neula.AccuracyWarning, match="not certified"):
        result = neula.nnls(A, b, maxiter=1)
    assert not result.converged
    assert (result.x >= 0).all()
    with pytest.raises(neula.AccuracyError):
        neula.nnls(A, b, maxiter=1, strict=True)
    with pytest.warns(neula.AccuracyWarning):
        linear = neula.lsq_linear(A, b, (0, np.inf), max_iter=1)
    assert (linear.status, linear.success) == (0, False)


def test_results_show_themselves(capsys) -> None:
    A, b = problem(20, 5)
    result = neula.lsq_linear(A, b, (0, 1), verbose=1, progress=lambda stage, part: print(stage, part))
    assert "solving with bounds 1.0" in capsys.readouterr().out
    assert "at bounds" in repr(result)
    assert pickle.loads(pickle.dumps(result)).nit == result.nit
    assert len(neula.nnls(A, b)) == 2
    assert neula.nnls(A, b)[1] == neula.nnls(A, b).rnorm
