"""Truncated least squares without an SVD, against exact solutions (tests/campaign/oracle.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from campaign.oracle import LeastSquares
from neula.algorithms.scaled_problems import ScaledProblems
from neula.algorithms.spectra.complete_orthogonal import complete_orthogonal, norm_bounds
from neula.algorithms.spectra.rank_revealing import MinimumNorm, minimum_norm
from neula.engines import CpuEngine
from neula.io.matrices import random_matrix

FP64 = CpuEngine("cpu", "fp64")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def with_singular_values(s: list[float], m: int, n: int) -> torch.Tensor:
    u, v = torch.linalg.qr(normal(m, len(s)))[0], torch.linalg.qr(normal(n, len(s), seed=1))[0]
    return u * torch.tensor(s, dtype=torch.float64) @ v.T


def solved(
    a: torch.Tensor, b: torch.Tensor, rcond: float, weights: torch.Tensor | None = None
) -> tuple[MinimumNorm | str, ScaledProblems, torch.Tensor]:
    """The solution or a reason, the problem scaled to numbers near 1, and x in the units of A and b."""
    problems = ScaledProblems.from_arrays(a[None], b[None], weights, 0.0)
    found = complete_orthogonal(problems, rcond, FP64, width=3)
    x = b.new_empty(0) if isinstance(found, str) else problems.unscale(found.y / problems.norms.mT)[0]
    return found, problems, x


DEFICIENT = {
    "sums": lambda: (
        normal(16, 4) @ torch.tensor(np.random.default_rng(2).integers(-2, 3, (4, 9)).astype(float))
    ),
    "wide": lambda: normal(7, 4) @ normal(4, 20, seed=3),
    "one": lambda: normal(15, 1) @ normal(1, 6, seed=3),
    "zero column": lambda: normal(12, 5) * torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]),
    "graded": lambda: normal(14, 3) @ normal(3, 6, seed=3) * torch.tensor([1, 1e3, 1e-4, 1, 1e6, 1e-2]),
    "condition 1e4": lambda: with_singular_values([1.0, 1e-2, 1e-4], 18, 7),
}


@pytest.mark.parametrize("name", DEFICIENT)
@pytest.mark.parametrize("consistent", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_errors_are_below_their_bounds(name: str, consistent: bool, weighted: bool) -> None:
    a = DEFICIENT[name]().double()
    m, n = a.shape
    b = a @ normal(n, 2, seed=4) if consistent else normal(m, 2, seed=4)
    weights = torch.from_numpy(np.random.default_rng(5).random(m) + 0.1) if weighted else None
    rcond = 1e-11
    found, _, x = solved(a, b, rcond, weights)
    judge = LeastSquares(
        a.numpy(), b.numpy(), weights=None if weights is None else weights.numpy(), rcond=rcond
    )
    assert not isinstance(found, str), found
    assert judge.ranks == (found.rank,)
    errors = torch.from_numpy(judge.errors(x.numpy(), found.rank))
    assert (errors <= found.forward_error).all()
    assert (found.forward_error <= (1e-4 if name in ("graded", "condition 1e4") else 1e-10)).all()


@pytest.mark.parametrize("dropped", [0.02, 1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_dropped_turns_nothing(dropped: float, transposed: bool) -> None:
    """The truncated problem is that of singular values, not of pivots, whatever the gap."""
    a = with_singular_values([1.0, 0.7, 0.5, 0.3, 0.3 * dropped, 0.1 * dropped], 16, 6)
    a = a.T.contiguous() if transposed else a
    b = normal(a.shape[0], 2, seed=4)
    rcond = 0.3 * dropped**0.5
    found, _, x = solved(a, b, rcond)
    judge = LeastSquares(a.numpy(), b.numpy(), rcond=rcond)
    assert not isinstance(found, str), found
    assert judge.ranks == (found.rank,) == (4,)
    errors = torch.from_numpy(judge.errors(x.numpy(), 4))
    assert (errors <= found.forward_error).all()
    assert (errors <= 1e-9).all()


@pytest.mark.parametrize(
    ("a", "rcond"),
    [
        (normal(30, 8), 1e-13),
        (torch.zeros(8, 5, dtype=torch.float64), 1e-13),
        (random_matrix("geometric", 40, 20, cond=1e17), 1e-13),
        (torch.tensor([[1.0, 0.6], [0.0, 0.8], [0.0, 0.0]], dtype=torch.float64), 0.499),
        (normal(20, 3) @ normal(3, 9, seed=1), 1e-16),
    ],
    ids=["full rank", "zero", "no gap", "at the threshold", "among rounding errors"],
)
def test_what_is_left_to_the_svd(a: torch.Tensor, rcond: float) -> None:
    assert isinstance(solved(a, normal(len(a), 1), rcond)[0], str)


def test_it_agrees_with_the_svd_where_blocks_are_many() -> None:
    a = normal(120, 30) @ normal(30, 80, seed=1)
    found, problem, _ = solved(a, normal(120, 3, seed=2), 1e-12)
    assert not isinstance(found, str), found
    by_svd = minimum_norm(problem, 1e-12)
    assert found.rank == by_svd.rank == 30
    assert by_svd.condition <= found.condition <= 6 * by_svd.condition
    error = torch.linalg.vector_norm(found.y - by_svd.y, dim=0) / torch.linalg.vector_norm(by_svd.y, dim=0)
    assert (error <= found.forward_error).all()
    assert (found.forward_error <= 1e-10).all()
    identity = torch.eye(30, dtype=torch.float64)
    basis = problem.a[0] / problem.norms[0] @ found.coordinates.T
    assert torch.linalg.matrix_norm(basis.T @ basis - identity) <= 1e-13


@pytest.mark.parametrize("n", [1, 5, 60])
def test_bounds_on_norms(n: int) -> None:
    a = normal(n, n)
    low, high = norm_bounds(a)
    norm = torch.linalg.matrix_norm(a, 2)
    assert norm / n**0.125 * (1 - 1e-12) <= low * n**0.125
    assert low <= norm * (1 + 1e-12)
    assert norm <= high * (1 + 1e-12) <= norm * n**0.125 * (1 + 1e-11)
