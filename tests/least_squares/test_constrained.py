"""Least squares with equality constraints and with a covariance, beside LAPACK and by definition."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from flint import fmpq, fmpq_mat
from tests.bounded.exact import error, matrix
from tests.campaign.matrices import KINDS

import neula

U = 2.0**-53


def problem(m: int, n: int, p: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    A, b = rng.standard_normal((m, n)), rng.standard_normal(m)
    return A, b, rng.standard_normal((p, n)), rng.standard_normal(p)


def gglse(A, b, C, d) -> np.ndarray:
    return scipy.linalg.lapack.dgglse(A, C, b, d)[3]


SHAPES = [(30, 8, 3), (8, 8, 1), (5, 8, 4), (40, 12, 11), (9, 4, 4), (6, 1, 1)]


@pytest.mark.parametrize(("m", "n", "p"), SHAPES)
def test_as_lapack(m, n, p) -> None:
    A, b, C, d = problem(m, n, p)
    result = neula.lstsq(A, b, constraints=(C, d))
    assert result.converged
    assert result.rank == n
    expected, norm = gglse(A, b, C, d), np.linalg.norm
    assert norm(result.x - expected) <= 4 * result.forward_error * norm(expected) + 20 * U
    assert norm(C @ result.x - d) <= 20 * n * U * norm(C) * norm(result.x)
    # The gradient is a combination of the rows of C.
    gradient = A.T @ (A @ result.x - b)
    left = gradient - C.T @ np.linalg.lstsq(C.T, gradient, rcond=None)[0]
    assert norm(left) <= 20 * n * U * norm(A) * (norm(A) * norm(result.x) + norm(b))
    none = neula.lstsq(A, b, constraints=(C[:0], d[:0]))
    assert np.allclose(none.x, neula.lstsq(A, b).x)


def test_dependent_constraints() -> None:
    A, b, C, d = problem(30, 8, 3)
    dependent = np.vstack([C, C[0] - 2 * C[2]]), np.append(d, d[0] - 2 * d[2])
    result = neula.lstsq(A, b, constraints=dependent)
    assert result.converged
    assert "3 of 4 constraints" in result.attempts[0].reason
    assert np.allclose(result.x, gglse(A, b, C, d), rtol=1e-11)
    with pytest.raises(ValueError, match=r"contradict.* rank 3, and \|\|C x - d\|\| is at least 0.000408"):
        neula.lstsq(A, b, constraints=(dependent[0], dependent[1] + [0, 0, 0, 1e-3]))
    with pytest.raises(ValueError, match="row 1"):
        neula.lstsq(A, b, constraints=(np.vstack([C[0], np.zeros(8)]), [1.0, 2.0]))


def test_right_hand_sides_batches_and_gradients() -> None:
    rng = np.random.default_rng(0)
    A, B = rng.standard_normal((3, 15, 4)), rng.standard_normal((15, 2))
    C, D = rng.standard_normal((2, 4)), rng.standard_normal((2, 2))
    result = neula.lstsq(A, B, constraints=(C, D))
    assert result.x.shape == (3, 4, 2)
    assert result.forward_errors.shape == (3, 2)
    assert result.accepted.tolist() == [True] * 3
    for i, j in np.ndindex(3, 2):
        assert np.allclose(result.x[i, :, j], gglse(A[i], B[:, j], C, D[:, j]))

    def solution(a: torch.Tensor) -> torch.Tensor:
        return neula.lstsq(a, torch.from_numpy(B), constraints=(C, D)).x

    a = torch.from_numpy(A[:1].copy()).requires_grad_()
    assert torch.autograd.gradcheck(solution, (a,), fast_mode=True)


def test_with_weights_and_damping() -> None:
    A, b, C, d = problem(20, 6, 2)
    w = np.linspace(0.1, 2, 20)
    result = neula.lstsq(A, b, constraints=(C, d), weights=w, damp=0.3)
    stacked = np.vstack([w[:, None] * A, 0.3 * np.eye(6)])
    expected = gglse(stacked, np.concatenate([w * b, np.zeros(6)]), C, d)
    assert np.allclose(result.x, expected, rtol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes(dtype) -> None:
    A, b, C, d = problem(20, 6, 2)
    A, b = torch.from_numpy(A).to(dtype), torch.from_numpy(b).to(dtype)
    result = neula.lstsq(A, b, constraints=(torch.from_numpy(C), d))
    assert result.converged
    assert result.x.dtype == dtype
    expected = gglse(A.double().numpy(), b.double().numpy(), C, d)
    error = np.abs(result.x.double().numpy() - expected).max()
    assert error <= torch.finfo(dtype).eps * np.abs(expected).max()


def test_covariance() -> None:
    A, b, C, d = problem(25, 4, 1)
    rng = np.random.default_rng(5)
    L = np.tril(rng.standard_normal((25, 25))) + 5 * np.eye(25)
    expected = np.linalg.lstsq(np.linalg.solve(L, A), np.linalg.solve(L, b), rcond=None)[0]
    for given in ({"covariance": L @ L.T}, {"covariance_factor": L}):
        result = neula.lstsq(A, b, **given)
        assert result.converged
        assert np.linalg.norm(result.x - expected) <= result.forward_error * np.linalg.norm(expected)
    variances = np.linspace(0.1, 3, 25)
    assert np.allclose(
        neula.lstsq(A, b, covariance=variances).x, neula.lstsq(A, b, weights=variances**-0.5).x, rtol=1e-13
    )
    both = neula.lstsq(A, b, covariance_factor=L, constraints=(C, d))
    assert np.allclose(both.x, gglse(np.linalg.solve(L, A), np.linalg.solve(L, b), C, d), rtol=1e-11)


def test_zero_matrices() -> None:
    A, b, C, d = problem(9, 4, 2)
    constraints = [{"constraints": (C, right)} for right in (d, 0 * d)]
    for given in ({}, {"covariance": np.arange(1.0, 10.0)}, *constraints):
        result = neula.lstsq(0 * A, b, **given)
        assert result.converged
        expected = np.linalg.pinv(C) @ given["constraints"][1] if "constraints" in given else np.zeros(4)
        assert np.allclose(result.x, expected, rtol=1e-12)


def test_bad_input() -> None:
    A, b, C, d = problem(9, 4, 2)
    for message, given in [
        (r"pair \(C, d\)", {"constraints": C}),
        (r"C must have shape \(p, 4\).*got \(2, 3\)", {"constraints": (C[:, :3], d)}),
        (r"d must have shape \(2,\)", {"constraints": (C, d[:1])}),
        (r"d must have shape \(2,\) or \(2, 1\), got \(2, 3\)", {"constraints": (C, np.ones((2, 3)))}),
        (r"C\[1, 2\] is nan", {"constraints": (np.where(np.arange(8).reshape(2, 4) == 6, np.nan, C), d)}),
        (r"covariance\[3\] is -1", {"covariance": np.where(np.arange(9) == 3, -1.0, 1.0)}),
        (r"shape \(9, 9\) or \(9,\)", {"covariance": np.eye(4)}),
        ("not symmetric", {"covariance": np.eye(9) + np.eye(9, k=1)}),
        ("leading minor of order 3", {"covariance": np.diag([1.0, 1, -1, 1, 1, 1, 1, 1, 1])}),
        ("lower triangular", {"covariance_factor": np.eye(9) + np.eye(9, k=1)}),
        (r"covariance_factor\[0, 0\] is zero", {"covariance_factor": np.diag(np.arange(9.0))}),
        ("are the same covariance", {"covariance": np.ones(9), "covariance_factor": np.eye(9)}),
        ("both weight the rows", {"covariance": np.ones(9), "weights": np.ones(9)}),
    ]:
        with pytest.raises(ValueError, match=message):
            neula.lstsq(A, b, **given)
    with pytest.raises(ValueError, match=r"b\[2\] is nan"):
        neula.lstsq(A, np.where(np.arange(9) == 2, np.nan, b), constraints=(C, d))
    with pytest.raises(ValueError, match="requires a gradient"):
        neula.lstsq(A, b, constraints=(torch.ones(1, 4, requires_grad=True), torch.ones(1)))


def test_dependent_columns_that_no_constraint_decides() -> None:
    A, b, C, d = problem(20, 5, 1)
    A[:, 3] = A[:, 2]
    C[:, 2:4] = 0
    result = neula.lstsq(A, b, constraints=(C, d))
    assert result.rank == 4
    assert np.abs(C @ result.x - d).max() < 1e-13
    assert result.x[2] == pytest.approx(result.x[3])  # the shortest


def exact_solution(A: np.ndarray, b: np.ndarray, C: np.ndarray, d: np.ndarray) -> list[fmpq] | None:
    """By the equations with multipliers, in rational numbers; None where they are singular."""
    (p, n), a, c = C.shape, matrix(A), matrix(C)
    gram = (a.transpose() * a).tolist()
    rows = [[*gram[i], *c.transpose().tolist()[i]] for i in range(n)]
    rows += [[*c.tolist()[j], *[fmpq(0)] * p] for j in range(p)]
    whole = fmpq_mat(rows)
    if whole.rank() < n + p:
        return None
    right = fmpq_mat([*(a.transpose() * matrix(b[:, None])).tolist(), *matrix(d[:, None]).tolist()])
    return whole.solve(right).entries()[:n]


@pytest.mark.parametrize("kind", ["normal", "hilbert", "graded", "geometric", "zero_lines", "kahan"])
@pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")  # it may say that it has no digit
def test_forward_errors_are_bounds(kind: str) -> None:
    """Against rational numbers: also with d = 0, and where ``A Z`` is a small difference."""
    rng, checked = np.random.default_rng(5), 0
    for scale in (0.0, 1e-8, 1.0) * 8:
        n = int(rng.integers(2, 6))
        p = int(rng.integers(1, n + 1))
        A, b = KINDS[kind](rng, 8, n), rng.standard_normal(8)
        C, d = rng.standard_normal((p, n)), scale * rng.standard_normal(p)
        truth = exact_solution(A, b, C, d)
        result = neula.lstsq(A, b, constraints=(C, d))
        if truth is not None and result.rank == n:
            checked += 1
            assert error(A, result.x, truth) <= result.forward_error * (1 + 1e-9)
    assert checked > 5


@pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")  # it may say that it has no digit
def test_columns_of_very_different_sizes_do_not_make_constraints_dependent() -> None:
    """Scaled by the columns of A these two rows are parallel up to rounding errors."""
    A = np.diag([1.0, 1e-30, 1e-30])
    C, d = np.array([[1.0, 1.0, 0.0], [1.0, -1.0, 0.0]]), np.array([3.0, 1.0])
    result = neula.lstsq(A, np.ones(3), constraints=(C, d))
    np.testing.assert_allclose(result.x[:2], [2.0, 1.0], rtol=1e-12)


@pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")  # it may say that it has no digit
def test_what_a_covariance_is_factorized_with_counts_by_its_condition() -> None:
    """Rounding errors of the factor of V are magnified by the condition of V, not by its square root."""
    rng, losses = np.random.default_rng(3), []
    for power in np.linspace(6, 15, 20):
        q = np.linalg.qr(rng.standard_normal((8, 8)))[0]
        V = q * np.logspace(0, -power, 8) @ q.T
        V = (V + V.T) / 2
        A, b = rng.integers(-9, 10, (8, 2)).astype(float), rng.standard_normal(8)
        a, v, rhs = matrix(A), matrix(V), matrix(b[:, None])
        inverse_a = v.solve(a).transpose()
        truth = (inverse_a * a).solve(inverse_a * rhs).entries()
        result = neula.lstsq(A, b, covariance=V)
        wrong = error(np.linalg.solve(np.linalg.cholesky(V), A), result.x, truth)
        assert wrong <= result.forward_error * 1.01  # for D, which is not exact here
        losses.append(wrong / (10 ** (power / 2) * U))
    assert max(losses) > 100


@pytest.mark.parametrize("given", ["constraints", "covariance"])
def test_what_underflows_is_no_solution(given: str) -> None:
    """Solutions that float32 has no digits for; float64 has all of them, and zero is exact."""
    A, b, C, d = problem(9, 3, 1)

    def more(scale: float) -> dict[str, Any]:
        return {given: (C, scale * d) if given == "constraints" else np.arange(1.0, 10.0)}

    with pytest.warns(neula.AccuracyWarning):
        result = neula.lstsq(A.astype(np.float32), (1e-42 * b).astype(np.float32), **more(1e-42))
    assert result.forward_error > 1e-5
    zero = neula.lstsq(A, 0 * b, **more(0.0))
    assert zero.converged
    assert not zero.x.any()


POWERS = [(200, 0, 200), (1015, 1015, 1015), (-1000,) * 3, (0, 900, 0), (0, 0, -1000), (-900, 100, -900)]


@pytest.mark.parametrize(("of_a", "of_c", "of_b"), POWERS)
def test_powers_of_two_do_not_matter(of_a: int, of_c: int, of_b: int) -> None:
    rng = np.random.default_rng(0)
    A, C = rng.integers(-8, 9, (6, 4)).astype(float), rng.integers(-8, 9, (2, 4)).astype(float)
    x, b = np.array([0.125, 0.25, 0.375, 0.5]), rng.integers(-8, 9, 6).astype(float)
    for right, more in ((A @ x, {}), (b, {"damp": 0.5}), (b, {"covariance": np.arange(1.0, 7.0)})):
        plain = neula.lstsq(A, right, constraints=(C, C @ x), **more)
        damp = {"damp": np.ldexp(0.5, of_a)} if "damp" in more else {}
        scaled = neula.lstsq(
            np.ldexp(A, of_a),
            np.ldexp(right, of_b),
            constraints=(np.ldexp(C, of_c), np.ldexp(C @ x, of_c + of_b - of_a)),
            **{**more, **damp},
        )
        assert scaled.converged
        assert np.allclose(np.ldexp(scaled.x, of_a - of_b), plain.x, rtol=1e-12)
        assert scaled.forward_error <= 4 * plain.forward_error
        assert np.ldexp(scaled.residual_norm, -of_b) == pytest.approx(plain.residual_norm, abs=1e-13)


TALL, RIGHT = np.array([[2.0, 1, 0], [1, 3, 1], [0, 1, 4], [1, 1, 1]]), np.arange(1.0, 5.0)


@pytest.mark.parametrize(
    ("C", "d", "rank", "certain"),
    [
        ([[1, 1, 1], [3, 3, 3 + 1e-14]], [1, 3], 1, False),  # the second constraint says that x[2] is zero
        ([[1, 1, 1], [3, 3, np.nextafter(3, 4)]], [1, 3], 1, False),
        ([[1, 2, 0], [3, 1, 4], [1, 2, 1e-40]], [1, 2, 1], 2, False),  # less than doubled arithmetic sees
        ([[1, 2, 0], [3, 1, 4], [1, 2, 1e-300]], [1, 2, 1], 2, False),
        ([[1, 1, 1], [3, 3, 3]], [1, 3], 1, True),
        ([[1, 2, 3], [4, 5, 6], [7, 8, 9]], [1, 2, 3], 2, True),
        ([[1, 2, 3], [4, 5, 6], [7, 8, np.nextafter(9, 0)]], [1, 2, 3], 2, False),
        ([[0.1, 0.2, 0.7], [0.3, 0.1, 0.4], np.add([0.1, 0.2, 0.7], [0.3, 0.1, 0.4])], [1, 2, 3], 2, True),
        ([[1, 1, 1], [0, 0, 0]], [1, 0], 1, True),
        ([[0, 0, 0]], [0], 0, True),
        (np.zeros((0, 3)), [], 0, True),
        (np.vstack([np.eye(3), np.ones(3)]), [1, 2, 3, 6], 3, True),
    ],
)
def test_the_rank_of_constraints_that_counts(C: Any, d: Any, rank: int, certain: bool) -> None:
    """Deficient clearly, or only by rounding errors, which the constraints as they are stored are not."""
    message = f"numerical rank {rank}, but row"
    with nullcontext() if certain else pytest.warns(neula.IllConditionedWarning, match=message):
        result = neula.lstsq(TALL, RIGHT, constraints=(np.array(C, float), np.array(d, float)))
    assert (result.rank, result.constraint_rank, result.converged) == (3, rank, certain)
    assert f"rank {rank} of the constraints" in str(result)
    assert np.isinf(result.forward_error) != certain
    assert neula.lstsq(TALL, RIGHT).constraint_rank is None


THIRD = np.array([[0.1, 0.2, 0.7], [0.3, 0.1, 0.4]])


@pytest.mark.parametrize(
    ("C", "told"),
    [
        ([THIRD[0], 3 * THIRD[0]], True),
        ([THIRD[0], THIRD[0] / 3], True),
        ([*THIRD, THIRD.sum(0)], True),
        ([*THIRD, THIRD.mean(0)], True),
        ([*THIRD, THIRD[0]], False),
        ([*THIRD, THIRD[1] / 4], False),
        ([[1, 0, -4], [0, 5, 3], [1, 0, -4]], False),
        ([[1, 0, -4], [0, 5, 3], [3, 5, -9]], False),
    ],
)
def test_forward_errors_that_hold_for_unrounded_constraints_only(C: Any, told: bool) -> None:
    """Rows that are combinations of others up to rounding: as they are stored, they decide on more."""
    c, right = np.array(C), np.array(C) @ np.array([0.3, -0.7, 1.1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = neula.lstsq(TALL, RIGHT, constraints=(c, right))
    assert [w.category for w in caught] == [neula.IllConditionedWarning] * told
    kept = len(c) - 1
    assert result.constraint_rank == kept
    assert result.converged or told
    truth = exact_solution(TALL, RIGHT, c[:kept], right[:kept])
    assert truth is not None
    assert error(TALL, result.x, truth) < 1e-12
    assert told == (matrix(c).rank() > kept)


def test_rounded_right_hand_sides_contradict_one_another_and_are_accepted() -> None:
    rng = np.random.default_rng(0)
    C = np.array([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])
    for _ in range(20):
        result = neula.lstsq(TALL, RIGHT, constraints=(C, C @ rng.standard_normal(3)))
        assert (result.converged, result.constraint_rank) == (True, 2)
    with pytest.raises(ValueError, match="contradict"):
        neula.lstsq(TALL, RIGHT, constraints=(C, [1.0, 2, 3 + 1e-9]))
    with pytest.raises(ValueError, match="contradict"):
        neula.lstsq(TALL, RIGHT, constraints=(np.array([[1.0, 1, 1], [0, 0, 0]]), [1.0, 1e-17]))


def test_constraints_that_are_rows_of_a_wide_matrix() -> None:
    rng = np.random.default_rng(1)
    for A in (rng.standard_normal((3, 6)), rng.integers(-9, 10, (3, 6)).astype(float)):
        b = rng.standard_normal(3)
        shortest = neula.lstsq(A, b).x
        for rows in ([0], [0, 2], [0, 1, 2]):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                result = neula.lstsq(A, b, constraints=(A[rows], b[rows]))
            assert (result.rank, result.constraint_rank, result.converged) == (3, len(rows), True)
            assert np.allclose(result.x, shortest, rtol=1e-11)


def test_a_deficient_matrix_has_the_shortest_solution_in_its_own_units() -> None:
    A = np.array([[1.0, 2.0**20, 0], [1, 2.0**20, 1], [1, 2.0**20, -1], [2, 2.0**21, 3]])
    C, d = np.array([[0.0, 0, 1]]), np.array([0.5])
    result = neula.lstsq(A, RIGHT, constraints=(C, d))
    assert result.rank == 2
    assert result.x[1] == pytest.approx(2.0**20 * result.x[0], rel=1e-12)


@pytest.mark.parametrize("damp", [1e8, 1e16, 1e30, 1e150])
@pytest.mark.parametrize("weights", [None, np.arange(1.0, 5.0)])
def test_damping_far_above_the_matrix(damp: float, weights: np.ndarray | None) -> None:
    """The solution is ``A^T W^2 b / damp^2``, up to a part of ``(||A|| / damp)^2``."""
    w = 1.0 if weights is None else weights**2
    expected = TALL.T @ (w * RIGHT) / damp / damp
    result = neula.lstsq(TALL, RIGHT, damp=damp, weights=weights)
    assert result.converged
    assert np.allclose(result.x, expected, rtol=1e-13, atol=0)
    fit = neula.LeastSquares(3)
    fit.update(TALL, RIGHT, weights=weights)
    assert np.allclose(fit.solve(damp=damp).x, expected, rtol=1e-13, atol=0)


def test_constraints_that_units_of_columns_make_tiny() -> None:
    """Where columns of A are large, rows of C are small beside them, and their squares underflow."""
    A, b, C, d = problem(6, 4, 4)
    A *= np.array([1e270, 1e274, 1e262, 1e268])
    d *= 1e-272
    result = neula.lstsq(A, b, constraints=(C, d))
    truth = matrix(C).solve(matrix(d[:, None])).entries()
    assert 0 < error(A, result.x, truth) <= result.forward_error


def test_doubtful_constraints_leave_a_solution_in_range() -> None:
    """Zero is the solution, and the one for the numerical rank of C is out of range."""
    C, A, b = np.array([[1.0, 1.0], [1.0, 1.0 + 2.0**-52]]), 1e-300 * np.eye(3, 2), [1e300, -1e300, 0.0]
    with pytest.warns(neula.IllConditionedWarning, match="no digit of x is guaranteed"):
        result = neula.lstsq(A, b, constraints=(C, [0.0, 0.0]))
    assert np.isfinite(result.x).all()
    assert np.isinf(result.forward_error)
    with pytest.raises(OverflowError, match="does not fit"):
        neula.lstsq(A, b, constraints=(C[:1], [0.0]))
