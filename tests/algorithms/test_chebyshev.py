"""Leading eigenvectors by filtered subspace iteration, against spectra that are known."""

from __future__ import annotations

import math

import pytest
import torch

from neula.algorithms import chebyshev
from neula.algorithms.chebyshev import leading_eigenvectors
from neula.matrices import random_matrix

N = 300
EPS = 2.0**-52


def symmetric(values: torch.Tensor) -> torch.Tensor:
    q = torch.linalg.qr(random_matrix("normal", len(values), len(values), seed=3)).Q
    g = (q * values) @ q.T
    return (g + g.T) / 2


def flat() -> torch.Tensor:
    """Those of the Gram matrix of a tall random matrix: a few percent apart, and dense."""
    return torch.linalg.svdvals(random_matrix("normal", 40 * N, N, seed=1)).square() / (40 * N)


SPECTRA = {
    "flat": flat,
    "geometric": lambda: 10 ** torch.linspace(0, -8, N, dtype=torch.float64),
    "arithmetic": lambda: torch.linspace(1, 1e-4, N, dtype=torch.float64).square(),
    "one dominates": lambda: torch.cat([torch.tensor([1e3], dtype=torch.float64), flat()[1:]]),
    "all alike": lambda: torch.ones(N, dtype=torch.float64),
    "more alike than vectors": lambda: torch.ones(N, dtype=torch.float64).index_fill(
        0, torch.arange(90), 2.0
    ),
    "a step": lambda: torch.ones(N, dtype=torch.float64).index_fill(0, torch.arange(8), 1.01),
}


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("k", [1, 8, 30])
@pytest.mark.parametrize("relative", [1e-4, 1e-9])
def test_the_largest_are_found(kind: str, k: int, relative: float) -> None:
    truth = SPECTRA[kind]()
    g = symmetric(truth)
    tolerance = relative * float(truth[k - 1])
    v = leading_eigenvectors(g, k, lambda smallest: tolerance)
    if v is None:  # for the caller, who has a solver for all of them
        assert (kind, relative) in {("flat", 1e-9), ("one dominates", 1e-9), ("a step", 1e-9)}
        return
    assert torch.allclose(v.T @ v, torch.eye(k, dtype=torch.float64), rtol=0, atol=N * EPS)
    values = (v * (g @ v)).sum(0)
    rounding = N * EPS * float(truth[0])
    assert float(torch.linalg.matrix_norm(g @ v - v * values)) <= tolerance + rounding
    # Each is an eigenvalue to its residual, and none of the others exceeds the smallest by more (Parlett).
    assert float((values.sort(descending=True).values - truth[:k]).abs().max()) <= 2 * tolerance + rounding


def test_the_kept_part_of_a_flat_spectrum_is_the_largest() -> None:
    """Errors of the sum are those of the vectors squared, divided by gaps: what a truncation is judged by."""
    truth, k = flat(), 30
    v = leading_eigenvectors(symmetric(truth), k, lambda smallest: 1e-4 * smallest)
    assert v is not None
    missing = float(truth[:k].sum() - (v * (symmetric(truth) @ v)).sum())
    assert -N * EPS <= missing / float(truth.sum()) <= 1e-6


def test_one_that_was_missed_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block without the largest eigenvector converges to the others, and is not taken for the answer."""
    g = torch.diag(torch.linspace(1, 2, N, dtype=torch.float64).square())

    def blind(n: int, k: int, like: torch.Tensor) -> torch.Tensor:
        block = random_matrix("normal", n, k, seed=1)
        block[-1] = 0
        return block

    monkeypatch.setattr(chebyshev, "_random_block", blind)
    assert leading_eigenvectors(g, 4, lambda smallest: 1e-6) is None


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_what_it_cannot_do_is_left_to_the_library(value: float) -> None:
    g = torch.full((N, N), value, dtype=torch.float64)
    assert leading_eigenvectors(g, 8, lambda smallest: 1e-9) is None


@pytest.mark.parametrize("rank", [1, 5, 20, 60])
def test_a_matrix_of_low_rank_gives_eigenvectors_or_nothing(rank: int) -> None:
    values = torch.zeros(N, dtype=torch.float64)
    values[:rank] = torch.arange(1, rank + 1)
    g = symmetric(values)
    v = leading_eigenvectors(g, 8, lambda smallest: 1e-9)
    if v is not None:
        assert torch.allclose(v.T @ v, torch.eye(8, dtype=torch.float64), rtol=0, atol=N * EPS)
        assert float(torch.linalg.matrix_norm(g @ v - v * (v * (g @ v)).sum(0))) <= 1e-8


def test_the_matrix_is_left_alone() -> None:
    g = symmetric(SPECTRA["arithmetic"]())
    kept = g.clone()
    leading_eigenvectors(g, 4, lambda smallest: 1e-6)
    assert torch.equal(g, kept)
