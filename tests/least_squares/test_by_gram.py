"""Large tall problems by an R of low precision and the corrected seminormal equations."""

from __future__ import annotations

import pytest
import torch

from neula.engines import FP64, EmulatedEngine
from neula.pipeline.chain import Answer
from neula.problems.least_squares import links
from neula.problems.least_squares.prepared import Problems
from neula.problems.least_squares.problem import Members, Options

M, N = 300, 40
U = 2.0**-53


def problem(condition: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of very different sizes, and a residual that is not small."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(M, n, generator=generator, dtype=torch.float64) for n in (N, 2))
    u, _, vh = torch.linalg.svd(a, full_matrices=False)
    s = torch.logspace(0, -1, N, base=condition, dtype=torch.float64) if condition else torch.arange(N)
    return (u * s) @ vh * torch.logspace(-8, 8, N, dtype=torch.float64), b


def solved(a: torch.Tensor, b: torch.Tensor) -> Answer[Members]:
    options = Options(
        engine=EmulatedEngine(),
        target=FP64,
        dtype=torch.float64,
        max_iterations=60,
        forward=False,
        progress=None,
        algorithm=None,
        compute=None,
        damp=0.0,
        weights=None,
        rcond=M * 2 * U,
    )
    return links.by_gram(Problems(a[None], b[None], options), None, label="by gram", compute="fp32")


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
