"""Least squares with bounds and equality constraints, beside all sets of free variables and SciPy's SLSQP."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import neula
from exact_solutions import error_of, exactly, product, solved
from scaled_errors import scaled_errors

SIZES = [(12, 5), (30, 7), (5, 5)]


def best_of_all_sets(a: np.ndarray, b: np.ndarray, total: float) -> np.ndarray:
    """The nonnegative x of some sum with the shortest residual, of the solutions of all free sets."""
    n, best = a.shape[1], (np.inf, np.zeros(a.shape[1]))
    for count in range(1, n + 1):
        for free in map(list, itertools.combinations(range(n), count)):
            bordered = np.block(
                [[a[:, free].T @ a[:, free], np.ones((count, 1))], [np.ones((1, count)), 0.0]]
            )
            x = np.zeros(n)
            x[free] = np.linalg.solve(bordered, np.append(a[:, free].T @ b, total))[:-1]
            if (x >= 0).all():
                best = min(best, (float(np.linalg.norm(a @ x - b)), x), key=lambda found: found[0])
    return best[1]


def kkt(a: np.ndarray, b: np.ndarray, c: np.ndarray, result: neula.LsqLinearResult) -> float:
    """The gradient along variables that could move, less its best fit by multipliers of the constraints."""
    gradient, side = a.T @ (a @ result.x - b), result.active_mask
    free = side == 0
    y = np.linalg.lstsq(c[:, free].T, gradient[free], rcond=None)[0]
    left = gradient - c.T @ y
    return float(np.abs(np.where(free, left, np.minimum(left * -side, 0.0))).max())


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("total", [1.0, 1e-3, 40.0])
def test_sums(rng: np.random.Generator, shape: tuple[int, int], total: float) -> None:
    for _ in range(10):
        a, b = rng.standard_normal(shape), 3 * rng.standard_normal(shape[0])
        result, x = neula.nnls(a, b, sum_to=total), best_of_all_sets(a, b, total)
        assert result.converged
        assert abs(result.x.sum() - total) <= 1e-14 * total
        # The other one has normal equations.
        assert scaled_errors(a, result.x, x) <= result.forward_error + 1e-11


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("scale", [1.0, 1e150, 1e-150])
def test_constraints(rng: np.random.Generator, count: int, scale: float) -> None:
    """Conditions of Karush, Kuhn and Tucker, and no point of SLSQP is better."""
    for _ in range(10):
        a, c, b = (rng.standard_normal(size) for size in ((15, 6), (count, 6), 15))
        d = c @ rng.uniform(0.1, 1.2, 6)
        result = neula.lsq_linear(a, scale * b, (0.0, 1.5 * scale), constraints=(c, scale * d))
        assert result.converged
        result.x[:] /= scale
        assert np.abs(c @ result.x - d).max() <= 1e-13
        assert (result.x >= 0).all()
        assert (result.x <= 1.5).all()
        assert kkt(a, b, c, result) <= 1e-12
        other = minimize(
            lambda x, a=a, b=b: np.sum((a @ x - b) ** 2) / 2,
            np.full(6, 0.5),
            bounds=[(0, 1.5)] * 6,
            constraints={"type": "eq", "fun": lambda x, c=c, d=d: c @ x - d},
            method="SLSQP",
        )
        if np.abs(c @ other.x - d).max() <= 1e-8:
            assert np.sum((a @ result.x - b) ** 2) / 2 <= other.fun + 1e-6


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("cond", [1.0, 1e3, 1e6])
def test_constraints_that_leave_little_or_nothing(rng: np.random.Generator, cond: float, count: int) -> None:
    """Inside of the bounds: beside the equations with multipliers in rational numbers."""
    for _ in range(10):
        a, b = rng.standard_normal((6, 4)), rng.standard_normal(6)
        u, v = (np.linalg.qr(rng.standard_normal((n, count)))[0] for n in (count, 4))
        c = (u * np.geomspace(1, 1 / cond, count)) @ v.T
        d = c @ rng.uniform(0.1, 1.0, 4)
        result = neula.lsq_linear(a, b, (-1e9, 1e9), constraints=(c, d))
        x = exact_minimum(a, b, c, d)
        assert result.converged
        assert error_of(a, result.x, x) <= result.forward_error <= 1e-11 * cond**2


@pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")
def test_more_constraints_than_unknowns() -> None:
    c = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    for x in ([1.0, 1.0], [0.5, 2.0]):
        found = neula.lsq_linear(np.eye(3)[:, :2], np.ones(3), (0, 2), constraints=(c, c @ x))
        assert error_of(np.eye(3)[:, :2], found.x, [Fraction(y) for y in x]) <= found.forward_error <= 1e-11


def exact_minimum(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> list[Fraction]:
    rows, right, (e, f) = exactly(a), [Fraction(x) for x in b.tolist()], (exactly(c), exactly(d[:, None]))
    columns = [list(column) for column in zip(*rows, strict=True)]
    gram = [product(columns, column) for column in columns]
    upper = [row + [line[j] for line in e] for j, row in enumerate(gram)]
    bordered = upper + [line + [Fraction(0)] * len(e) for line in e]
    return solved(bordered, product(columns, right) + [x for (x,) in f])[: a.shape[1]]


def test_without_bounds_it_is_lstsq(rng: np.random.Generator) -> None:
    a, c, b = (rng.standard_normal(size) for size in ((15, 6), (2, 6), (15, 3)))
    d = rng.standard_normal((2, 3))
    result, other = neula.lsq_linear(a, b, constraints=(c, d)), neula.lstsq(a, b, constraints=(c, d))
    assert result.converged
    assert np.allclose(result.x, other.x, rtol=1e-11)


def test_many_pixels(rng: np.random.Generator) -> None:
    """Parts of materials in mixtures: all digits of each are those of one pixel alone."""
    a = np.abs(rng.standard_normal((50, 6)))
    parts = rng.dirichlet(np.full(6, 0.3), 3000).T
    b = a @ parts + 0.05 * rng.standard_normal((50, 3000))
    result = neula.nnls(a, b, sum_to=1.0)
    assert result.converged
    assert result.accepted.all()
    assert (result.x >= 0).all()
    assert np.abs(result.x.sum(0) - 1).max() <= 1e-14
    for place in range(0, 3000, 300):
        assert np.allclose(result.x[:, place], best_of_all_sets(a, b[:, place], 1.0), atol=1e-10)
    batch = neula.nnls(torch.from_numpy(np.stack([a, 1e3 * a])), torch.from_numpy(b[:, :40]), sum_to=1.0)
    assert batch.converged
    assert np.allclose(batch.x[0], result.x[:, :40], atol=1e-12)
    narrow = neula.nnls(a.astype(np.float32), b[:, :40].astype(np.float32), sum_to=1.0)
    assert narrow.converged
    assert np.allclose(narrow.x, result.x[:, :40], atol=1e-5)


def test_dependent_columns_are_not_certified(rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((12, 4)), rng.standard_normal(12)
    with pytest.warns(neula.AccuracyWarning):
        result = neula.nnls(a[:, [0, 0, 1, 2, 3]], b, sum_to=50.0)
    assert not result.converged


def test_what_is_refused(rng: np.random.Generator) -> None:
    a, b, ones = rng.standard_normal((12, 4)), rng.standard_normal(12), np.ones((1, 4))
    for total in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="sum_to must be above 0"):
            neula.nnls(a, b, sum_to=total)
    for message, constraints in [
        ("row 0 of C x is between 0 and 4 within the bounds, and d is 5", (ones, [5.0])),
        (r"C must have shape \(p, 4\)", (ones[:, :3], [1.0])),
        (r"d must have shape \(1,\) or \(1, 1\)", (ones, ones[:, :2])),
    ]:
        with pytest.raises(ValueError, match=message):
            neula.lsq_linear(a, b, (0, 1), constraints=constraints)
    with pytest.raises(ValueError, match="have no gradient: detach A and b"):
        neula.nnls(torch.from_numpy(a).requires_grad_(), torch.from_numpy(b), sum_to=1.0)


@pytest.mark.filterwarnings("ignore::neula.AccuracyWarning")
@pytest.mark.parametrize("shape", [(50, 200), (100, 120), (20, 400)])
def test_wide_matrices_take_few_steps(rng: np.random.Generator, shape: tuple[int, int]) -> None:
    """Sets of free variables are not tried one by one: a few right-hand sides start from SciPy's solution."""
    a = rng.standard_normal(shape)
    for b in (a @ np.maximum(rng.standard_normal(shape[1]), 0), rng.standard_normal(shape[0])):
        result = neula.nnls(a, b)
        assert result.iterations <= 5
        assert result.backward_error <= result.tolerance
        assert (result.x >= 0).all()
