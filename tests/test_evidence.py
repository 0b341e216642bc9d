"""The evidence in results: forward errors that are bounds, conditions, warnings where no digit is sure."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from tests.matrices import normal_array

import neula
from campaign.oracle import LeastSquares, System
from exact_solutions import error_of, least_squares
from neula.io import datasets
from neula.io.matrices import random_matrix

U64 = 2.0**-53
NIST = {
    "filip": 7.9,
    "wampler2": 13.2,
    "pontius": 13.5,
    "norris": 14.0,
    "longley": 14.6,
    "noint1": 14.7,
    **dict.fromkeys(("noint2", "wampler1", "wampler3", "wampler4", "wampler5"), 15.0),
}
"""Digits of the solutions of the matrices as they are stored, rounded, against those that are certified."""


def known_system(n: int, cond: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, b and x without a rounding error: A has 36 bits, x 7, and sums of n products 52."""
    a = np.round(random_matrix("geometric", n, n, cond=cond, seed=1).numpy() * 2.0**36) / 2.0**36
    x = np.random.default_rng(n).integers(-99, 100, n).astype(float)
    return a, a @ x, x


def known_problem(m: int, n: int, cond: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Least squares with known x and a residual that is orthogonal to A exactly: every row is there twice."""
    rng = np.random.default_rng(n)
    half = np.round(random_matrix("geometric", m // 2, n, cond=cond, seed=1).numpy() * 2.0**36) / 2.0**36
    x = rng.integers(-99, 100, n).astype(float)
    rest = rng.integers(-999, 1000, m // 2) * 2.0**-20
    return np.vstack([half, half]), np.concatenate([half @ x + rest, half @ x - rest]), x


def scaled_error(a: np.ndarray, x: np.ndarray, expected: np.ndarray) -> float:
    """``||D (x - x*)|| / ||D x*||``."""
    sizes = np.linalg.norm(a, axis=0)
    return float(np.linalg.norm(sizes * (x - expected)) / np.linalg.norm(sizes * expected))


# ---------------------------------------------------------------- no digit is sure


SINGULAR = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
"""To LU it is regular."""


def test_singular_systems_that_lu_does_not_notice() -> None:
    """Alone and in a batch."""
    b = np.array([1.0, 2.0, 4.0])
    batch = np.stack([np.eye(3), SINGULAR, 2 * np.eye(3)])
    for A, name, indices in ((SINGULAR, "no digit of x is guaranteed", ((),)), (batch, r"A\[1\]", ((1,),))):
        with pytest.warns(neula.IllConditionedWarning, match=name):
            result = neula.solve(A, b)
        assert not result.converged
        assert result.forward_error == math.inf
        assert result.digits == -math.inf
        assert result.condition > 1e15
        with pytest.raises(neula.AccuracyError, match="no digit of x is guaranteed") as caught:
            neula.solve(A, b, strict=True)
        assert caught.value.indices == indices
        assert not caught.value.result.converged
    assert result.accepted.tolist() == [True, False, True]
    assert result.forward_errors[1] == math.inf
    assert (result.forward_errors[[0, 2]] <= 2 * U64).all()
    np.testing.assert_array_equal(result.x[[0, 2]], [b, b / 2])


@pytest.mark.parametrize("certify", ["backward", "forward"])
@pytest.mark.parametrize("n", [6, 10, 11, 12, 13, 15])
def test_hilbert_matrices_are_solved_or_warned_of(n: int, certify: str) -> None:
    """Up to 10 they are regular beyond doubt, with a condition number of 1e13; beyond either is right."""
    A = scipy.linalg.hilbert(n)
    b = A @ np.ones(n)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = neula.solve(A, b, certify=certify)
    assert [w.category for w in caught] == [] if result.converged else [neula.IllConditionedWarning]
    assert (result.forward_error <= 0.1) == result.converged
    assert result.converged or n > 10
    if result.converged:
        assert System(A, b[:, None]).errors(result.x[:, None], n)[0] <= result.forward_error


def test_strict_least_squares() -> None:
    """A spectrum without a gap at rcond: neither the rank nor a digit is sure."""
    A = random_matrix("geometric", 60, 30, cond=1e17).numpy()
    b = np.random.default_rng(1).standard_normal(60)
    with pytest.warns(neula.IllConditionedWarning):
        result = neula.lstsq(A, b)
    assert not result.converged
    assert result.digits < 1
    with pytest.raises(neula.AccuracyError, match="no digit of x is guaranteed") as caught:
        neula.lstsq(A, b, strict=True)
    assert caught.value.result.forward_error == result.forward_error


# ---------------------------------------------------------------- what is sure


@pytest.mark.parametrize("name", datasets.nist_names())
def test_nist_data_sets_have_the_digits_that_their_rounded_matrices_allow(name: str) -> None:
    problem = datasets.nist(name)
    result = neula.lstsq(problem.A, problem.b)
    assert datasets.log_relative_error(result.x, problem.certified) >= NIST[name] - 0.3
    assert result.converged
    assert result.rank == problem.A.shape[1]
    assert (result.x != 0).all()
    assert result.digits > 15
    judge = LeastSquares(problem.A, problem.b[:, None], rcond=0.0)
    assert judge.errors(result.x[:, None], result.rank)[0] <= result.forward_error


@pytest.mark.parametrize("rows", [(0, -24), (0, -8, -16, -24), (24, 0, 0, 0)])
@pytest.mark.parametrize("consistent", [False, True])
def test_wide_matrices_whose_rows_differ(rows: tuple[int, ...], consistent: bool) -> None:
    A = normal_array(len(rows), 9) * 10.0 ** np.array(rows, dtype=float)[:, None]
    b = A @ normal_array(9, 1) if consistent else normal_array(len(rows), 1, seed=1)
    result = neula.lstsq(A, b)
    judge = LeastSquares(A, b, rcond=9 * 2.0**-52)
    assert judge.ranks == (result.rank,)
    assert judge.errors(result.x, result.rank)[0] <= result.forward_error
    assert result.converged == (result.forward_error <= 0.1)


@pytest.mark.parametrize("exponent", [-190, 190, 300])
@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (5, 5)])
def test_elements_near_the_ends_of_the_range(shape: tuple[int, int], exponent: int) -> None:
    """Squares of which overflow or underflow: the answer is the same, in other units."""
    rng = np.random.default_rng(1)
    A, b = rng.standard_normal(shape) * 10.0**exponent, rng.standard_normal((shape[0], 1))
    result = neula.lstsq(A, b)
    assert result.converged
    errors = LeastSquares(A, b, rcond=1e-15).errors(result.x, min(shape))
    assert errors[0] <= result.forward_error <= 2 * U64
    if shape[0] == shape[1]:
        solved = neula.solve(A, b)
        assert solved.converged
        assert System(A, b).errors(solved.x, 5)[0] <= solved.forward_error <= 2 * U64


@pytest.mark.parametrize(
    ("A", "x", "exactly"),
    [
        (np.diag([1e-30, 1.0]), [3.0, 5.0], False),
        (np.eye(5)[[2, 0, 1, 4, 3]], [1.0, 2.0, 3.0, 4.0, 5.0], True),
        ([[3.0]], [7.0], True),
        ([[2.0**-1030]], [1.0], True),
        ([[2.0, 0.0], [0.0, 4.0]], [0.0, 0.0], True),
    ],
)
def test_systems_without_a_difficulty(A: list[list[float]], x: list[float], exactly: bool) -> None:
    """The condition number is that of normalized columns: near 1, estimated within a factor of 3."""
    a, expected = np.array(A), np.array(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = neula.solve(a, a @ expected)
    assert result.converged
    assert 1 <= result.condition <= 3
    assert result.forward_error <= 2 * U64
    np.testing.assert_allclose(result.x, expected, rtol=0 if exactly else 2 * U64)


TO_THE_FORWARD_ERROR = [
    *(("solve", "emulated", cond) for cond in (1e2, 1e8)),
    # Beyond, rounding errors of the gradient come near the bound.
    *(("lstsq", engine, cond) for engine in ("cpu", "emulated") for cond in (1e2, 1e7)),
]


@pytest.mark.parametrize(("function", "engine", "cond"), TO_THE_FORWARD_ERROR)
def test_to_the_forward_error(function: str, engine: str, cond: float) -> None:
    """Above the small size, with factors in a low precision; on a CPU a Gram matrix comes first, alone."""
    A, b, x = known_system(300, cond) if function == "solve" else known_problem(800, 260, cond)
    backward, forward = (
        getattr(neula, function)(A, b, engine=engine, certify=certify) for certify in ("backward", "forward")
    )
    for result in (backward, forward):
        assert result.converged
        assert scaled_error(A, result.x, x) <= result.forward_error
        assert result.digits == pytest.approx(-math.log10(max(U64, result.forward_error)))
        if function == "solve":
            assert not result.method.startswith("lu fp64")
        else:
            assert "cgls" in result.factorization or engine == "cpu"
    assert forward.forward_error <= 2 * U64 < backward.forward_error


@pytest.mark.parametrize(("compute", "cond"), [("fp64", 3e9), ("fp32", 1e6)])
def test_a_large_error_is_no_bound_of_a_larger_one(compute: str, cond: float) -> None:
    """An x far from the exact one says nothing of its size, to which errors are relative."""
    rng = np.random.default_rng(2)
    for weights in (None, *rng.uniform(0.1, 2, (9, 20))):
        q, v = (np.linalg.qr(rng.standard_normal((m, 3)))[0] for m in (20, 3))
        A = (q * np.geomspace(1, 1 / cond, 3)) @ v
        b = A @ rng.standard_normal(3)
        with pytest.warns(neula.IllConditionedWarning):
            result = neula.lstsq(
                A, b, weights=weights, engine="emulated", algorithm="direct", compute=compute
            )
        given, right = (A, b) if weights is None else (weights[:, None] * A, weights * b)
        assert error_of(given, result.x, least_squares(given, right)) <= result.forward_error


@pytest.mark.parametrize("algorithm", ["cgls", "lsqr"])
@pytest.mark.parametrize("seed", [1, 2])
def test_no_digit_is_sure_where_a_named_algorithm_has_a_poor_r(algorithm: str, seed: int) -> None:
    """Columns of ones but for 1e-5, R in half precision: its singular values are not those of A."""
    rng = np.random.default_rng(seed)
    half = 1 + np.round(1e-5 * rng.standard_normal((150, 35)) * 2.0**36) / 2.0**36
    x = rng.integers(-99, 100, 35).astype(float)
    rest = rng.integers(-999, 1000, 150) * 2.0**-20
    A, b = np.vstack([half, half]), np.concatenate([half @ x + rest, half @ x - rest])
    with pytest.warns(neula.IllConditionedWarning, match="asked for .*, no digit of x is guaranteed"):
        result = neula.lstsq(A, b, engine="emulated", algorithm=algorithm)
    assert "R is too inaccurate, or" in result.attempts[-1].reason
    assert not result.converged
    assert scaled_error(A, result.x, x) <= result.forward_error == math.inf
    usual = neula.lstsq(A, b, engine="emulated")
    assert usual.converged
    assert scaled_error(A, usual.x, x) <= usual.forward_error <= 0.1


def test_digits_that_were_asked_for_and_are_not_reached_are_said() -> None:
    """A truncated solution is known as well as the singular vectors that are dropped, and no better."""
    A = random_matrix("geometric", 40, 5, cond=1e8, seed=1).numpy()
    b = np.random.default_rng(11).standard_normal((40, 2))
    assert neula.lstsq(A, b, rcond=1e-5).converged
    with pytest.warns(neula.AccuracyWarning, match=r"forward error .*, asked for 1.8e-15") as caught:
        result = neula.lstsq(A, b, rcond=1e-5, certify="forward")
    assert not issubclass(caught[0].category, neula.IllConditionedWarning), "some digits are sure"
    assert not result.converged
    assert 1.8e-15 < result.forward_error < 0.1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_narrow_types_are_rounded_once(dtype: str) -> None:
    rng = np.random.default_rng(1)
    u = float(np.finfo(dtype).eps) / 2
    for A in (rng.standard_normal((20, 6)), rng.standard_normal((6, 20)), rng.standard_normal((6, 6))):
        a, b = A.astype(dtype), rng.standard_normal((len(A), 2)).astype(dtype)
        result = neula.lstsq(a, b) if A.shape != (6, 6) else neula.solve(a, b)
        judge = LeastSquares(a.astype(float), b.astype(float), rcond=0.0)
        errors = judge.errors(result.x.astype(float), 6)
        assert (errors <= result.forward_errors).all()
        assert result.forward_error <= 2 * u


# ---------------------------------------------------------------- shapes and names


@pytest.mark.parametrize("function", [neula.lstsq, neula.solve])
def test_shapes_of_the_evidence(function: Callable[..., Any]) -> None:
    A = normal_array(2, 3, 5, 5)
    for right, shape in (((2, 3, 5, 4), (2, 3, 4)), ((2, 3, 5, 1), (2, 3, 1)), ((5,), (2, 3))):
        result = function(A, normal_array(*right))
        assert result.forward_errors.shape == shape
        assert result.conditions.shape == result.backward_errors.shape == result.accepted.shape == (2, 3)
        assert result.forward_errors.dtype == result.conditions.dtype == np.float64
        assert result.forward_error == result.forward_errors.max()
        assert result.condition == result.conditions.max()
        assert result.digits == pytest.approx(-math.log10(max(U64, result.forward_error)))
    single = function(A[0, 0], normal_array(5, 4))
    assert single.forward_errors.shape == (4,)
    assert np.shape(single.conditions) == np.shape(single.accepted) == ()
    tensors = function(torch.from_numpy(A), torch.ones(5, dtype=torch.float64))
    assert isinstance(tensors.forward_errors, torch.Tensor)
    assert isinstance(tensors.conditions, torch.Tensor)


@pytest.mark.parametrize("function", [neula.lstsq, neula.solve])
def test_exact_solutions_and_unknown_certificates(function: Callable[..., Any]) -> None:
    result = function(np.eye(3), np.zeros(3))
    assert (result.forward_error, result.digits) == (0.0, -math.log10(U64))
    with pytest.raises(ValueError, match=r"unknown certify 'both': choose one of 'backward', 'forward'"):
        function(np.eye(2), np.ones(2), certify="both")


# ---------------------------------------------------------------- solutions that are zero, and no solutions


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
@pytest.mark.parametrize("options", [{}, {"weights": np.array([0.1, 0.1, 3.0])}, {"damp": 0.5}])
def test_zero_is_exact_where_b_is_orthogonal_to_the_columns(scale: float, options: dict[str, Any]) -> None:
    """No relative error of another x is small: a refined one has a bound of infinity."""
    A = np.array([[0.1, 2.0], [0.1, 2.0], [0.0, 1.0]])
    b = scale * np.array([[1.0, 1.0], [-1.0, 1.0], [0.0, 1.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = neula.lstsq(A, b, **options)
        batch = neula.lstsq(np.stack([A, A[:, ::-1]]), b, **options)
        alone = neula.lstsq(A, b[:, 0], algorithm="svd", **options)
    for found in (result.forward_errors, batch.forward_errors[0], batch.forward_errors[1]):
        assert found[0] == 0
        assert 0 < found[1] <= 2 * U64
    assert (result.x[:, 0] == 0).all()
    assert (batch.x[..., 0] == 0).all()
    assert (alone.x == 0).all()
    assert alone.converged
    weights = options.get("weights", np.ones(3))
    expected = math.hypot(*(weights * b[:, 0]))
    for norm in (alone.residual_norm, result.residual_norm[0], *batch.residual_norm[::2]):
        assert norm == pytest.approx(expected, rel=1e-15)


def test_nearly_orthogonal_is_not_zero() -> None:
    """The gradient is 2^-110: x is neither zero nor known."""
    A = np.array([[1.0 + 2.0**-52], [-1.0], [2.0**-55]])
    b = np.array([1.0, 1.0 + 2.0**-52, 2.0**-55])
    with pytest.warns(neula.IllConditionedWarning):
        result = neula.lstsq(A, b)
    assert not result.converged


def test_a_doubt_about_the_rank_is_said() -> None:
    """The backward error and the digits are all right, and no reason for the warning."""
    a = np.array([[1.0, 1.0], [0.0, 1e-6], [0.0, 0.0]])
    s = np.linalg.svd(a / np.linalg.norm(a, axis=0), compute_uv=False)
    with pytest.warns(neula.AccuracyWarning, match="too close to rcond"):
        result = neula.lstsq(a, np.ones(3), rcond=s[1] / s[0])
    assert result.backward_error <= result.tolerance


def test_residuals_that_rounding_makes_longer_than_b_are_said() -> None:
    """The backward error and the digits are those of the dtype, and no reason for the warning."""
    A = random_matrix("geometric", 12, 12, cond=1e14, seed=2).numpy().astype(np.float32)
    b = np.random.default_rng(1).standard_normal(12).astype(np.float32)
    with pytest.warns(neula.AccuracyWarning, match="residual of the rounded x exceeds b"):
        result = neula.solve(A, b)
    assert result.backward_error <= result.tolerance
    assert result.forward_error <= 2.0**-23
    assert np.linalg.norm(b - A.astype(float) @ result.x) > np.linalg.norm(b)


def test_of_unsure_answers_the_one_with_most_digits_is_returned() -> None:
    """Factors in low precision have residuals as small, and cannot even tell that A is regular."""
    A = random_matrix("arithmetic", 300, 300, cond=1e13, seed=5).numpy()
    with pytest.warns(neula.IllConditionedWarning):
        result = neula.solve(A, np.ones(300), engine="emulated")
    assert result.method == "lu fp64 with pivoting"
    truth = np.linalg.cond(A / np.linalg.norm(A, axis=0))
    assert truth / 10 <= result.condition <= 10 * truth
    assert result.forward_error < 1
