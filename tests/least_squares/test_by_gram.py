"""Large tall problems by an R of low precision and the corrected seminormal equations."""

from __future__ import annotations

import pytest
import torch

from gram_problems import N, U, problem, solved


@pytest.mark.parametrize("condition", [1.0, 10.0, 1e3])
def test_all_digits_are_sure(condition: float) -> None:
    a, b = problem(condition)
    found = solved(a, b).values
    assert found.accepted.all()
    assert (found.forward_error <= 4 * U).all()
    sizes = torch.linalg.vector_norm(a, dim=0)[:, None]
    scaled = a / sizes.T
    expected = torch.linalg.lstsq(scaled, b, driver="gelsd").solution
    # Wedin's bound for the error of the other solution, with 10 n u for its backward error.
    error = torch.linalg.vector_norm(found.x[0] * sizes - expected, dim=0)
    rest = torch.linalg.vector_norm(b - scaled @ expected, dim=0)
    true_condition = float(torch.linalg.cond(scaled))
    length = torch.linalg.vector_norm(expected, dim=0)
    assert (error <= 10 * N * U * true_condition * (2 * length + true_condition * rest)).all()


@pytest.mark.parametrize("condition", [1e5, 1e9, 0.0])
def test_an_r_that_is_no_good_is_noticed(condition: float) -> None:
    """Rank-deficient matrices among them: no answer is accepted, whatever x is."""
    assert not solved(*problem(condition)).values.accepted.any()
