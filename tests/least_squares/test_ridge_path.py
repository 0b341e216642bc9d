"""Errors of prediction along ridge paths, beside refits in rational arithmetic."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import torch
from sklearn import linear_model
from tests.campaign.areas.ridge import Truth, rational, relative_error

import neula
from neula.problems.least_squares.ridge_path import _claimed
from neula.problems.least_squares.ridge_solutions import BoundedEstimate
from neula.sklearn import RidgeCV

rng = np.random.default_rng(3)
WIDE = rng.standard_normal((5, 8))
DUMMIES = np.array([[1.0, 0, 1]] * 3 + [[0.0, 1, 1]] * 3)
ALONE = np.array([[1.0, 0, 1], [1.0, 0, 2], [1.0, 0, 4], [1.0, 1, 3]])
"""The last row alone has the second column: its leverage is 1 without damping."""

FULL = {
    "square": (np.array([[2.0, 1], [1, 3]]), [1.0, 2]),
    "wide": (WIDE, [1.0, -2, 3, 1, 2]),
    "large": (1e6 * WIDE, [1.0, -2, 3, 1, 2]),
    "units": (WIDE * [2.0**40, 1, 1, 1, 1, 1, 1, 1], [1.0, -2, 3, 1, 2]),
    "inside": (WIDE.T, WIDE.T @ [1.0, 2, 3, 4, 5] + np.eye(8)[0] * 1e-9),
    "far": (np.ldexp(WIDE, 40), np.ldexp([1.0, -2, 3, 1, 2], -400)),
}
DEPENDENT = {
    "dummies": (DUMMIES, [1.0, 2, 2, 5, 6, 8]),
    "copies of rows": (np.vstack([WIDE, WIDE[:2]]), [1.0, -2, 3, 1, 2, 4, 1]),
    "zero column": (ALONE * [1.0, 0, 1], [1.0, 3, 2, 7]),
    "alone": (ALONE, [1.0, 3, 2, 7]),
    "one row": (np.array([[3.0, 4]]), [2.0]),
    "zero": (np.zeros((3, 2)), [1.0, 2, 3]),
}
CASES = [
    *((*given, damps) for given in FULL.values() for damps in ([0.0, 1e-12, 1e-9], [1e-4, 1.0, 1e6])),
    *((*given, damps) for given in DEPENDENT.values() for damps in ([0.0, 1e-8, 1e-6], [1e-4, 1.0, 1e6])),
    (WIDE.T @ np.c_[np.eye(5), [1, 1, 0, 0, 0]], np.arange(8.0) ** 2, [1e-10, 1e-9, 1e-8]),
]


@pytest.mark.parametrize(("A", "b", "damps"), CASES)
@pytest.mark.filterwarnings("error")
def test_every_number_is_that_of_a_refit(A, b, damps) -> None:
    b = np.asarray(b)
    path = neula.ridge_path(A, b, damps)
    assert path.converged
    assert path.accepted.all()
    for i, damp in enumerate(damps):
        truth = Truth.of(A, b, damp, False)
        claims = path.residual_norm_errors, path.gcv_errors, path.leave_one_out_errors
        assert truth.error_of_x(rational(path.x[i])) <= path.forward_errors[i] <= 1e-5
        for (name, exact), claim in zip(truth.numbers.items(), claims, strict=True):
            if exact is not None and exact != 0:  # gcv is 0 / 0 without damping: then its limit is given
                error = relative_error(getattr(path, name)[i], exact, root=name == "residual_norms")
                assert error <= claim[i] <= 1e-3


@pytest.mark.parametrize("power", [1, 2])
def test_errors_of_squares_are_twice_those_of_roots(power: int) -> None:
    """Of a root that is off by as much as its bound allows."""
    root, error = torch.tensor([1 + 2.0**-20]).double(), torch.tensor([2.0**-20]).double()
    claimed = _claimed(root**power, BoundedEstimate(root, error), power, 0.0)
    assert 1.0 <= float(claimed) / (float(root**power) - 1) <= 1.001


def test_limits_without_damping() -> None:
    A, b = FULL["square"][0], np.array([1.0, 2])
    path = neula.ridge_path(A, b, [0.0, 1e-150])
    assert path.gcv == pytest.approx([2 / 9, 2 / 9], rel=1e-12)
    assert path.leave_one_out == pytest.approx([0.5, 0.5], rel=1e-12)
    assert path.residual_norms[0] == 0


def test_right_hand_sides_have_errors_of_their_own() -> None:
    A, b = FULL["wide"][0], np.column_stack([FULL["wide"][1], np.zeros(5), 1e100 * np.arange(5.0)])
    path = neula.ridge_path(torch.from_numpy(A), torch.from_numpy(b), [1e-7, 1.0])
    assert path.accepted.shape == (2, 3)
    assert path.accepted.dtype == torch.bool
    for i in range(3):
        alone = neula.ridge_path(A, b[:, i], [1e-7, 1.0])
        assert path.leave_one_out[:, i].numpy() == pytest.approx(alone.leave_one_out, rel=1e-12)
    assert path.leave_one_out[:, 1].tolist() == path.forward_errors[:, 1].tolist() == [0, 0]
    assert path.best("leave_one_out").shape == (3,)


def test_no_digit_no_silence() -> None:
    """The damping is below what rounding leaves of singular values, and decides all."""
    A = np.array([[1.0, 1], [1, 1 + 2.0**-52], [1, 1]])
    with pytest.warns(
        neula.IllConditionedWarning, match=r"1 of 2 dampings: no digit of x, .*gcv.* is guaranteed"
    ):
        path = neula.ridge_path(A, [1.0, 2, 4], [1e-16, 1.0])
    assert path.accepted.tolist() == [False, True]
    assert np.isnan(path.gcv[0])
    assert path.gcv_errors[0] == path.forward_errors[0] == np.inf
    assert path.best() == 1
    with pytest.raises(neula.AccuracyError):
        neula.ridge_path(A, [1.0, 2, 4], [1e-16], strict=True)


@pytest.mark.parametrize("weights", [None, np.array([1.0, 2, 0.25, 4, 1, 9])])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.filterwarnings("error")
def test_the_model_is_chosen_that_predicts_best(weights, intercept) -> None:
    """Refits in 60 digits, where scikit-learn's quotients of small numbers are none."""
    source = np.random.default_rng(17)
    X, alphas = 1e6 * source.standard_normal((6, 9)), [1e-6, 1e-3, 1e11, 1e13]
    y = X @ source.standard_normal(9) / 1e6
    model = RidgeCV(alphas, fit_intercept=intercept).fit(X, y, sample_weight=weights)
    scores = [
        _left_out(X, y, alpha, np.ones(6) if weights is None else weights, intercept) for alpha in alphas
    ]
    assert model.alpha_ == alphas[int(np.argmin(scores))]
    assert model.result_.leave_one_out.numpy() == pytest.approx(scores, rel=1e-8)
    assert -model.best_score_ == pytest.approx(min(scores), rel=1e-8)
    assert isinstance(model, linear_model.RidgeCV)


def _left_out(X, y, alpha: float, w, intercept: bool) -> float:
    """Mean of weighted squares of errors with which refits predict what was left out."""
    total = mpmath.mpf(0)
    with mpmath.workdps(60):
        for i in range(len(y)):
            rest = np.arange(len(y)) != i
            A = np.column_stack([X, np.ones(len(y))]) if intercept else X
            W = mpmath.diag(w[rest].tolist())
            B = mpmath.matrix(A[rest].tolist())
            D = mpmath.diag([alpha] * X.shape[1] + [0] * intercept)
            x = mpmath.lu_solve(B.T * W * B + D, B.T * W * mpmath.matrix(y[rest].tolist()))
            error = y[i] - (mpmath.matrix([A[i].tolist()]) * x)[0]
            total += w[i] * error**2
        return float(total / len(y))


def test_degrees_of_freedom_of_damped_fits() -> None:
    """Rows less leverages, of as many rows as leverages that are nearly 1."""
    A, b = FULL["wide"][0][:3], mpmath.matrix([1.0, -2, 3])
    for given in (A, A[:, :3]):
        for damp in (1e-9, 1e-3, 1.0):
            fit = neula.lstsq(given, np.array([1.0, -2, 3]), damp=damp)
            with mpmath.workdps(60):
                exact, square = mpmath.matrix(given.tolist()), mpmath.mpf(damp) ** 2
                W = square * (exact * exact.T + square * mpmath.eye(3)) ** -1
                free = sum(W[i, i] for i in range(3))
                variance = mpmath.norm(W * b) ** 2 / free
            assert fit.degrees_of_freedom == pytest.approx(float(free), rel=1e-9)
            assert fit.residual_variance == pytest.approx(float(variance), rel=1e-9)


def test_ridge_path_does_not_depend_on_units() -> None:
    """Powers of two round nothing, and no square may be lost."""
    A, b, damps = (
        rng.standard_normal((12, 4)),
        rng.standard_normal((12, 2)),
        np.logspace(-6, 1, 3),
    )
    plain = neula.ridge_path(A, b, damps)
    for of_a, of_b in ((-900, -800), (900, 500), (0, -900), (0, 900), (-450, 450)):
        found = neula.ridge_path(np.ldexp(A, of_a), np.ldexp(b, of_b), np.ldexp(damps, of_a))
        assert found.converged
        np.testing.assert_array_equal(found.x, np.ldexp(plain.x, of_b - of_a))
        np.testing.assert_array_equal(found.residual_norms, np.ldexp(plain.residual_norms, of_b))
        np.testing.assert_array_equal(found.solution_norms, np.ldexp(plain.solution_norms, of_b - of_a))
        np.testing.assert_array_equal(found.backward_errors, plain.backward_errors)
    with pytest.warns(neula.AccuracyWarning):
        narrow = neula.ridge_path(A.astype(np.float32), (1e-43 * b).astype(np.float32), [1.0])
    assert narrow.backward_errors.min() > 1e-4


@pytest.mark.parametrize("shape", [(30, 6), (8, 12)])
def test_sizes_and_degrees_of_freedom(shape: tuple[int, int]) -> None:
    A, b = rng.standard_normal(shape), rng.standard_normal(shape[0])
    A[:, 1] = A[:, 0]
    path = neula.ridge_path(A, np.stack([b, -2 * b], 1), [0.0, 0.1, 30.0])
    s = np.linalg.svd(A, compute_uv=False)
    for i, damp in enumerate(path.damps):
        free = (s[s > 1e-9] ** 2 / (s[s > 1e-9] ** 2 + damp**2)).sum()
        assert path.effective_degrees_of_freedom[i] == pytest.approx(free, rel=1e-9)
        assert path.solution_norms[i] == pytest.approx([x * np.linalg.norm(path.x[i, :, 0]) for x in (1, 2)])
    assert path.best().tolist() == path.gcv.argmin(0).tolist()
    assert "damps" in repr(path)


def test_bad_input() -> None:
    A, b = rng.standard_normal((9, 3)), rng.standard_normal(9)
    for message, given in [
        ("must be a vector", (A, b, 1.0)),
        ("must not be negative, got -1", (A, b, [1.0, -1.0])),
        (r"damps\[1\] is nan", (A, b, [1.0, np.nan])),
        ("are a batch", (A[None], b, [1.0])),
        (r"A\[0, 0\] is nan", (A * np.nan, b, [1.0])),
        ("do not fit", (A, b[:-1], [1.0])),
    ]:
        with pytest.raises(ValueError, match=message):
            neula.ridge_path(*given)
    with pytest.raises(ValueError, match="unknown error 'aic'"):
        neula.ridge_path(A, b, [1.0]).best("aic")
    assert neula.ridge_path(A, b, []).x.shape == (0, 3)
