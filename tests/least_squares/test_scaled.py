"""Least-squares problems in numbers near 1 are exactly those that were given."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from neula.algorithms.scaled_problems import (
    ScaledProblems,
    gradient_is_zero,
    gradient_vanishes,
    weighted_norms,
)

EXACT = 2.0**-960
"""Elements below, relative to the largest of their column, may lose bits of what rounding has lost."""

Matrix = list[list[Fraction]]


def power(exponent: int) -> Fraction:
    return Fraction(2) ** int(exponent)


def fractions(x: torch.Tensor) -> Matrix:
    return [[Fraction(v) for v in row] for row in x.tolist()]


def weighted(x: torch.Tensor, weights: torch.Tensor | None) -> Matrix:
    """``diag(weights) X`` without rounding."""
    if weights is None:
        return fractions(x)
    return [[Fraction(w) * v for v in row] for w, row in zip(weights.tolist(), fractions(x), strict=True)]


def check_parts(
    high: torch.Tensor, low: torch.Tensor | None, exponents: list[list[int]], expected: Matrix
) -> None:
    """``(high + low) 2^exponents`` is what was expected, low a rounding error of high."""
    rest = torch.zeros_like(high) if low is None else low
    assert (rest.abs() <= 2.0**-53 * high.abs() + 2.0**-1074).all()
    parts = zip(high.tolist(), rest.tolist(), exponents, expected, strict=True)
    for row in parts:
        for h, r, e, v in zip(*row, strict=True):
            error = abs((Fraction(h) + Fraction(r)) * power(e) - v)
            if abs(h) >= EXACT:
                assert error == 0
            else:
                assert error <= 2 * power(e - 1074)


def spread(rng: np.random.Generator, shape: tuple[int, ...], decades: float) -> torch.Tensor:
    """Random numbers over so many decades around 1."""
    exponents = rng.uniform(-decades / 2, decades / 2, shape)
    return torch.from_numpy(rng.choice([-1.0, 1.0], shape) * 10.0**exponents)


@pytest.mark.parametrize("decades", [0, 280, 600])
@pytest.mark.parametrize("shape", [(7, 4), (3, 5)], ids=["tall", "wide"])
@pytest.mark.parametrize("damp", [0.0, 1.0 / 3, 1e-200, 1e200])
@pytest.mark.parametrize("weighs", [False, True])
def test_exactly_the_problem_that_was_given(
    shape: tuple[int, int], decades: int, damp: float, weighs: bool, rng: np.random.Generator
) -> None:
    m, n = shape
    a = spread(rng, (1, m, n), decades)
    a[0, :, 1] = 0
    b = spread(rng, (1, m, 2), decades)
    weights = spread(rng, (m,), 300) if weighs else None
    problems = ScaledProblems.from_arrays(a, b, weights, damp)
    assert problems.wide == (m < n and not damp)
    expected_a, expected_b = weighted(a[0], weights), weighted(b[0], weights)
    if damp:
        expected_a += [[Fraction(damp) * (i == j) for j in range(n)] for i in range(n)]
        expected_b += [[Fraction(0)] * 2 for _ in range(n)]
    a_low = None if problems.a_low is None else problems.a_low[0]
    b_low = None if problems.b_low is None else problems.b_low[0]
    assert (a_low is None) == (not weighs)
    for x in (problems.a, problems.b):
        # A product of two fractions is a quarter at least; it may be rounded up to one.
        largest = x.abs().amax(1)
        assert ((largest >= 0.25) & (largest <= 1) | (largest == 0)).all()
    norms = torch.linalg.vector_norm(problems.a, dim=1)
    assert torch.allclose(problems.norms[:, 0], torch.where(norms == 0, 1.0, norms))
    columns = problems.columns[0].expand(problems.a.shape[1:]).tolist()
    check_parts(problems.a[0], a_low, columns, expected_a)
    check_parts(problems.b[0], b_low, problems.b_columns[0].expand(problems.b.shape[1:]).tolist(), expected_b)


@pytest.mark.parametrize("decades", [0, 200])
@pytest.mark.parametrize("weighs", [False, True])
def test_rows_of_wide_problems(decades: int, weighs: bool, rng: np.random.Generator) -> None:
    """As columns of T, in units that have nothing to do with each other."""
    a, b = spread(rng, (1, 3, 5), decades), spread(rng, (1, 3, 2), 0)
    weights = spread(rng, (3,), 200) if weighs else None
    problems = ScaledProblems.from_arrays(a, b, weights, 0.0)
    rows, of_rows = problems.with_rows()
    largest = rows.a[0].abs().amax(1)
    assert ((largest >= 0.5) & (largest <= 1)).all()
    exponents = of_rows[0] + rows.columns[0]
    a_low = None if rows.a_low is None else rows.a_low[0]
    check_parts(rows.a[0], a_low, exponents.expand(3, 5).tolist(), weighted(a[0], weights))
    shifts = of_rows[0] + problems.b_columns[0]
    b_low = None if rows.b_low is None else rows.b_low[0]
    check_parts(rows.b[0], b_low, shifts.tolist(), weighted(b[0], weights))
    y = spread(rng, (1, 5, 2), 4)
    assert torch.equal(rows.unscale(y), torch.ldexp(y, problems.b_columns - rows.columns))


def test_where_the_gradient_vanishes() -> None:
    """Where products with A are exactly zero, not where they underflow."""
    a = torch.tensor([[1e-200, 0.0], [1e-200, 1.0], [0.0, 0.0]], dtype=torch.float64)[None]
    b = torch.tensor([[1e-200, 0.0, 1e-200], [-1e-200, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)[None]
    b[0, 1, 0] = 0.0
    assert gradient_vanishes(a, b, None).tolist() == [[False, True, False]]
    weights = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    assert gradient_vanishes(a, b, weights).tolist() == [[True, True, True]]


@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("last", [0.0, 2.0**-55])
def test_gradients_that_are_zero_beyond_doubt(last: float, weighs: bool) -> None:
    """Pairs of rows that cancel, in numbers of 53 bits; the last row adds 2^-110, or nothing."""
    rng = np.random.default_rng(1)
    half, c = rng.standard_normal((4, 3)), rng.standard_normal((4, 1))
    tail = np.zeros((1, 3))
    tail[0, 1] = last
    a = torch.from_numpy(np.concatenate([half, half, tail]))[None]
    zero = torch.from_numpy(np.concatenate([c, -c, [[last]]]))
    b = torch.cat([zero, 0 * zero, zero.abs()], 1)[None]
    w = rng.standard_normal(4)
    weights = torch.from_numpy(np.concatenate([w, -w, [1.0]])) if weighs else None
    assert gradient_is_zero(a, b, weights).tolist() == [[last == 0, True, False]]
    exact, rhs = weighted(a[0], weights), weighted(b[0], weights)
    gradient = sum(row[1] * side[0] for row, side in zip(exact, rhs, strict=True))
    assert gradient == Fraction(last) ** 2


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_norms_of_what_is_weighted(scale: float) -> None:
    b = torch.tensor([[[3.0, 0.0], [4.0, 2.0]]], dtype=torch.float64) * scale
    weights = torch.tensor([1.0, 2.0], dtype=torch.float64)
    expected = torch.tensor([[73.0**0.5, 4.0]], dtype=torch.float64) * scale
    torch.testing.assert_close(weighted_norms(b, weights), expected, rtol=1e-15, atol=0)


def test_doubts_about_zero_gradients() -> None:
    """Gradients that underflow, or are not finite, are not taken for zero."""
    a = torch.tensor([[[1.0], [1.0], [1e-320]]], dtype=torch.float64)
    b = torch.tensor([[[1.0, 1.0], [-1.0, -1.0], [1.0, torch.nan]]], dtype=torch.float64)
    assert not gradient_is_zero(a, b, None).any()
    assert not gradient_is_zero(a * torch.inf, b, None).any()
