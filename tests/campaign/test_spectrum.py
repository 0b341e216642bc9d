"""Enclosures of singular values and ranks by inertia, beside each other and beside what is known by heart."""

from __future__ import annotations

import numpy as np
import pytest
from flint import arb, fmpz_mat

from .areas import oracle
from .exact import balls
from .oracle import LeastSquares
from .recipes import Scope, Seeded
from .spectrum import _in_order, count_above, positive_eigenvalues, singular_values, values_of


def test_a_multiple_singular_value() -> None:
    """Arb's eigensolver says 1, 0.76, 0.76, 0.39 for A with columns of norm 1: the rank is 3."""
    a = np.array([[1.0, 1, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]])
    truth = LeastSquares(a, np.ones((4, 1)), rcond=1e-15)
    np.testing.assert_allclose(truth.singular_values, [1, 0.5**0.5, 0.5**0.5, 0], atol=1e-15)
    assert truth.ranks == (3,)


def test_discs_that_overlap_leave_others_alone() -> None:
    """A disc that is wider than the one before it reaches the one before that."""
    discs = [arb(100, 1), arb(5.2, 2.8), arb(0.1, 2.2), arb(0.05, 2.5), arb(-50, 1)]
    found = _in_order(discs, np.eye(5).tolist()).values
    assert [value.contains(disc) for value, disc in zip(found, discs, strict=True)] == [True] * 5
    np.testing.assert_allclose(
        [float(value.rad()) for value in found], [1, 5.225, 5.225, 5.225, 1], atol=0.01
    )


def test_two_ways_agree() -> None:
    """``python -m tests.campaign.fuzz --problem oracle`` tries more."""
    for number in range(200):
        verdict, text = oracle.judge(oracle.draw(Seeded(0, number), Scope()), "cpu")
        assert not verdict.findings, f"{verdict}\n{text}"


@pytest.mark.parametrize("diagonal", [(3, 2, 1), (2, 0, 0), (1, -1, 0), (0, 0, 0), (-1, -2, -3)])
def test_inertia_survives_congruence(diagonal: tuple[int, ...], rng: np.random.Generator) -> None:
    for _ in range(5):
        x = fmpz_mat(rng.integers(-3, 4, (3, 3)).tolist())
        if x.rank() < 3:
            continue
        d = fmpz_mat([[diagonal[i] if i == j else 0 for j in range(3)] for i in range(3)])
        product = (x.transpose() * d * x).tolist()
        assert positive_eigenvalues(product) == sum(value > 0 for value in diagonal)


def test_inertia_of_a_matrix_without_a_diagonal() -> None:
    assert positive_eigenvalues(fmpz_mat([[0, 1, 2], [1, 0, 3], [2, 3, 0]]).tolist()) == 1


def test_counts_on_both_sides() -> None:
    """Columns (1, 0) and (1, 1) / sqrt(2): singular values sqrt(1 + s), sqrt(1 - s) with s = sqrt(1/2)."""
    a = fmpz_mat([[1, 1], [0, 1]])
    for square, count in (((1, 5), 2), ((3, 10), 1), ((17, 10), 1), ((171, 100), 0)):
        assert count_above(a, square) == count


@pytest.mark.parametrize("decades", [3, 14, 60])
def test_small_singular_values_are_enclosed(decades: int) -> None:
    exact = np.array([1.0, 10.0**-decades])
    turned = np.array([[0.75, 0.5], [0.5, -0.75]]) / 0.8125**0.5 * exact
    found = singular_values(balls(np.diag(exact)[:, ::-1]))
    assert all(abs(x.mid() - y) <= x.rad() for x, y in zip(found, exact.tolist(), strict=True))
    np.testing.assert_allclose(values_of(turned), exact, rtol=1e-5 if decades < 14 else 1, atol=4e-16)
