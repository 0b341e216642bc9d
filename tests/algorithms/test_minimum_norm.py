"""Minimum-norm solutions below full rank, by the SVD and without: errors against exact truncated solutions.

Those come from ball arithmetic (tests/campaign/oracle.py).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import neula
from campaign.oracle import LeastSquares
from neula.algorithms.scaled_problems import ScaledProblems
from neula.algorithms.spectra.complete_orthogonal import complete_orthogonal
from neula.algorithms.spectra.rank_revealing import MinimumNorm, minimum_norm
from neula.engines import CpuEngine
from neula.io.matrices import random_matrix

WAYS = {
    "svd": minimum_norm,
    "complete orthogonal": lambda problems, rcond: complete_orthogonal(
        problems, rcond, CpuEngine("cpu", "fp64"), width=3
    ),
}
EACH = pytest.mark.parametrize("way", WAYS)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def with_singular_values(s: list[float], m: int, n: int) -> torch.Tensor:
    u, v = torch.linalg.qr(normal(m, len(s)))[0], torch.linalg.qr(normal(n, len(s), seed=1))[0]
    return u * torch.tensor(s, dtype=torch.float64) @ v.T


def dependent(m: int, n: int, rank: int, spread: float = 1.0) -> torch.Tensor:
    """Integer combinations, exactly; with a spread singular values fall from 1 to its inverse, then to 0."""
    rng = np.random.default_rng(10 * n + rank)
    left = rng.integers(-9, 10, (m, rank)).astype(float)
    # Columns that differ by less and less: powers of two change no digit.
    left[:, 1:] = (
        left[:, :1] + left[:, 1:] * np.exp2(np.round(np.log2(np.geomspace(1, 1 / spread, rank))))[1:]
    )
    return torch.from_numpy(left @ rng.integers(1, 4, (rank, n)).astype(float))


def solved(
    way: str, a: torch.Tensor, b: torch.Tensor, rcond: float, weights: torch.Tensor | None = None
) -> tuple[MinimumNorm | str, torch.Tensor]:
    """The solution or a reason, and x in the units of A and b."""
    problems = ScaledProblems.from_arrays(a[None], b[None], weights, 0.0)
    found = WAYS[way](problems, rcond)
    x = b.new_empty(0) if isinstance(found, str) else problems.unscale(found.y / problems.norms.mT)[0]
    return found, x


DEFICIENT = {
    "sums": (normal(16, 4) @ torch.from_numpy(np.random.default_rng(2).integers(-2, 3, (4, 9)) * 1.0), 1e-10),
    "wide": (normal(7, 4) @ normal(4, 20, seed=3), 1e-10),
    "one": (normal(15, 1) @ normal(1, 6, seed=3), 1e-10),
    "zero column": (normal(12, 5) * torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]), 1e-10),
    "zero": (torch.zeros(5, 3).double(), 0.0),
    "graded": (normal(14, 3) @ normal(3, 6, seed=3) * torch.tensor([1, 1e3, 1e-4, 1, 1e6, 1e-2]), 1e-4),
    "condition 1e4": (with_singular_values([1.0, 1e-2, 1e-4], 18, 7), 1e-4),
    "integers": (dependent(14, 7, 4), 1e-12),
    "square integers": (dependent(8, 8, 7), 1e-12),
    "wide integers": (dependent(7, 14, 4), 1e-12),
    # Singular values that count as zero are known to eps, which counts with the square of the condition.
    "nearly parallel integers": (dependent(14, 7, 4, 1e6), 1e-4),
    "nearly parallel rows": (dependent(7, 14, 4, 1e6), 1e-4),
}


@EACH
@pytest.mark.parametrize("name", DEFICIENT)
@pytest.mark.parametrize("consistent", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_errors_are_below_their_bounds(way: str, name: str, consistent: bool, weighted: bool) -> None:
    """Weighted rows, which rounding makes independent, lose nothing."""
    a, limit = DEFICIENT[name]
    m, n = a.shape
    b = a @ normal(n, 2, seed=4) if consistent else normal(m, 2, seed=4)
    weights = torch.from_numpy(np.random.default_rng(5).random(m) + 0.1) if weighted else None
    rcond = 1e-11
    found, x = solved(way, a, b, rcond, weights)
    if isinstance(found, str):  # left to the SVD
        assert way != "svd"
        assert name in ("zero", "nearly parallel integers", "nearly parallel rows")
        return
    exact = None if weights is None else weights.numpy()
    judge = LeastSquares(a.numpy(), b.numpy(), weights=exact, rcond=rcond)
    assert judge.ranks == (found.rank,)
    errors = torch.from_numpy(judge.errors(x.numpy(), found.rank))
    assert (errors <= found.forward_error).all()
    assert (found.forward_error <= (limit if way == "svd" else max(limit, 1e-10))).all()


@pytest.mark.parametrize("exponent", [3, 9])
@pytest.mark.parametrize("shape", [(14, 7), (7, 14)])
def test_dependent_columns_in_different_units(shape: tuple[int, int], exponent: int) -> None:
    """The shortest x is that of the user's units: its bound grows with what they differ by, and holds."""
    m, n = shape
    a = dependent(m, n, 4) * torch.exp2(torch.linspace(-exponent, exponent, n).round().double())
    b = normal(m, 2, seed=n)
    found, x = solved("svd", a, b, 1e-11)
    errors = torch.from_numpy(LeastSquares(a.numpy(), b.numpy(), rcond=1e-11).errors(x.numpy(), 4))
    assert found.rank == 4
    assert (errors <= found.forward_error).all()
    # Twice the ratio of the units: through M^+ and through what is orthogonal to M.
    assert (found.forward_error <= 1e-12 * 4.0 ** (2 * exponent)).all()


@EACH
@pytest.mark.parametrize("dropped", [0.02, 1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_dropped_turns_nothing(way: str, dropped: float, transposed: bool) -> None:
    """The truncated problem is that of singular values, not of pivots, whatever the gap."""
    a = with_singular_values([1.0, 0.7, 0.5, 0.3, 0.3 * dropped, 0.1 * dropped], 16, 6)
    a = a.T.contiguous() if transposed else a
    b = normal(a.shape[0], 2, seed=4)
    rcond = 0.3 * dropped**0.5
    found, x = solved(way, a, b, rcond)
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
    assert isinstance(solved("complete orthogonal", a, normal(len(a), 1), rcond)[0], str)


@pytest.mark.parametrize("columns", [2, 22])
def test_a_singular_value_at_rcond_is_doubtful(columns: int) -> None:
    """Two unit columns with cosine c have singular values with ``s_2 / s_1 = sqrt((1 - c) / (1 + c))``."""
    a, b = torch.zeros(9, columns, dtype=torch.float64), torch.ones(9, 1, dtype=torch.float64)
    a[:2, :2] = torch.tensor([[1.0, 0.6], [0.0, 0.8]], dtype=torch.float64)
    at, away = solved("svd", a, b, 0.5)[0], solved("svd", a, b, 0.49)[0]
    assert "too close to rcond = 5.00e-01" in at.doubt
    assert (away.rank, away.doubt) == (2, "")


def test_both_agree_where_blocks_are_many() -> None:
    a, b = normal(120, 30) @ normal(30, 80, seed=1), normal(120, 3, seed=2)
    by_svd, found = (solved(way, a, b, 1e-12)[0] for way in WAYS)
    assert found.rank == by_svd.rank == 30
    assert by_svd.condition <= found.condition <= 6 * by_svd.condition
    error = torch.linalg.vector_norm(found.y - by_svd.y, dim=0) / torch.linalg.vector_norm(by_svd.y, dim=0)
    assert (error <= found.forward_error).all()
    assert (found.forward_error <= 1e-10).all()
    problem = ScaledProblems.from_arrays(a[None], b[None], None, 0.0)
    basis = problem.a[0] / problem.norms[0] @ found.coordinates.T
    assert torch.linalg.matrix_norm(basis.T @ basis - torch.eye(30, dtype=torch.float64)) <= 1e-13


@pytest.mark.parametrize("spread", [0, 12, 30])
def test_zero_is_solved_exactly(spread: int) -> None:
    """Of any rank and in any units, where other solutions have bounds that are infinite."""
    a = np.random.default_rng(spread).integers(-3, 4, (6, 4)).astype(float)
    a[:, 3] = a[:, 0] - a[:, 1]
    result = neula.lstsq(a * 10.0 ** np.linspace(0, spread, 4), np.zeros(6))
    assert (result.converged, result.rank, result.forward_error) == (True, 3, 0)
    assert not result.x.any()
