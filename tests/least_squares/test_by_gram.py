"""Large tall problems by an R of low precision and the corrected seminormal equations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gram_problems import M, N, U, accepted, problem, solved
from neula.certificates.bounds import lstsq_bound
from neula.engines import FP64
from neula.problems.least_squares.problem import LeastSquaresSolutions


@pytest.mark.parametrize("condition", [1.0, 10.0, 1e3])
def test_all_digits_are_sure(condition: float) -> None:
    a, b = problem(condition)
    found = solved(a, b).values
    assert accepted(found)
    assert (found.forward_error <= 4 * U).all()
    check(a, b, found)


def check(a: torch.Tensor, b: torch.Tensor, found: LeastSquaresSolutions) -> None:
    """Errors of x are those of another solution, and what is claimed."""
    sizes = torch.linalg.vector_norm(a, dim=0)[:, None]
    scaled = a / sizes.T
    expected = torch.linalg.lstsq(scaled, b, driver="gelsd").solution
    # Wedin's bound for the error of the other solution, with 10 n u for its backward error.
    error = torch.linalg.vector_norm(found.x[0] * sizes - expected, dim=0)
    rest = torch.linalg.vector_norm(b - scaled @ expected, dim=0)
    true_condition = float(torch.linalg.cond(scaled))
    length = torch.linalg.vector_norm(expected, dim=0)
    bound = 10 * N * U * true_condition * (2 * length + true_condition * rest)
    assert (error <= bound + found.forward_error[0] * length).all()


@pytest.mark.parametrize("condition", [1.0, 3.0])
def test_in_half_precision_with_plain_residuals(condition: float) -> None:
    """Backward errors are those of double precision; what is claimed of x is what they leave."""
    a, b = problem(condition)
    found = solved(a, b, compute="fp16", plain_residuals=True).values
    assert accepted(found)
    assert (found.refined_error <= lstsq_bound(FP64, N)).all()
    # Residuals err by 2 (m + n)^0.5 u, times norms whose ratios are about 5, and the condition number.
    assert (found.forward_error <= 100 * (M + N) ** 0.5 * U * found.condition).all()
    check(a, b, found)


@pytest.mark.parametrize("condition", [1e5, 1e9, 0.0])
@pytest.mark.parametrize("given", [{}, {"compute": "fp16", "plain_residuals": True}])
def test_an_r_that_is_no_good_is_noticed(condition: float, given: dict[str, Any]) -> None:
    """Rank-deficient matrices among them: no answer is accepted, whatever x is."""
    assert not accepted(solved(*problem(condition), **given).values)
