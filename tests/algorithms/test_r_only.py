"""R of tall matrices without Q: what is noticed early, and what is known of A before."""

from __future__ import annotations

import pytest
import torch
from tests.matrices import normal

from neula.algorithms.orthogonal.r_only import (
    SAMPLED,
    cholesky_r,
    low_cholesky_r,
    lower_gram,
    sampled_max,
    shifted_cholesky3_r,
)
from neula.engines import EmulatedEngine
from neula.io.matrices import random_matrix

U = 2.0**-53


def deviation(a: torch.Tensor, r: torch.Tensor) -> float:
    """``||I - W^T W||_F`` for ``W = A R^-1``."""
    w = torch.linalg.solve_triangular(r, a, upper=True, left=False)
    return float(torch.linalg.matrix_norm(w.mT @ w - torch.eye(a.shape[-1], dtype=a.dtype)))


@pytest.mark.parametrize("factor", [cholesky_r, shifted_cholesky3_r])
def test_a_gram_matrix_that_is_known_is_not_made_again(factor) -> None:
    a = normal(1, 60, 20)
    gram = lower_gram(a)
    before = gram.clone()
    assert torch.equal(factor(a, gram=gram), factor(a))
    assert torch.equal(gram, before)


@pytest.mark.parametrize("condition", [1e3, 1e9, 1e12])
@pytest.mark.parametrize("units", [1.0, 10.0])
def test_full_rank_is_never_given_up(condition: float, units: float) -> None:
    """The smallest singular value is above rcond, and no vector shows less."""
    a = random_matrix("geometric", 300, 40, cond=condition)[None].double()
    norms = torch.linalg.vector_norm(a, dim=1, keepdim=True)
    a = a / norms * torch.logspace(0, 1, 40, base=units, dtype=torch.float64)
    rcond = 0.9 * float(torch.linalg.svdvals(a / torch.linalg.vector_norm(a, dim=1, keepdim=True))[0, -1])
    r = shifted_cholesky3_r(a, rcond=rcond)
    assert torch.equal(r, shifted_cholesky3_r(a))
    assert deviation(a, r) <= 300 * 40 * U * condition


def deficient() -> dict[str, torch.Tensor]:
    a = normal(300, 40)
    twice, zero = a.clone(), a.clone()
    twice[:, 30], zero[:, 7] = twice[:, 3], 0
    return {"product": a[:, :30] @ normal(30, 40, seed=1), "twice": twice, "zero column": zero}


@pytest.mark.parametrize("name", ["product", "twice", "zero column"])
def test_a_matrix_without_full_rank_is_given_up(name: str) -> None:
    assert shifted_cholesky3_r(deficient()[name][None], rcond=300 * 2 * U).isnan().any()


def test_some_rows_show_how_large_columns_are() -> None:
    a = normal(2 * SAMPLED, 5) * torch.logspace(-200, 200, 5, dtype=torch.float64)
    largest = a.abs().amax(0)
    assert (sampled_max(a) >= largest).all()
    assert torch.equal(sampled_max(a[:SAMPLED]), a[:SAMPLED].abs().amax(0))
    engine = EmulatedEngine("cpu", "fp32")
    for sampled in (True, False):
        r = low_cholesky_r(a[None], engine=engine, sampled=sampled)
        assert deviation(a[None], r) <= len(a) ** 0.5 * 5 * 2.0**-24
