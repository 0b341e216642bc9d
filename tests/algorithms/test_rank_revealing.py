"""Minimum-norm solutions against exact ones, and ranks that do not depend on units.

Exact truncated solutions come from ball arithmetic (tests/campaign/oracle.py).
"""

import numpy as np
import pytest
import scipy.linalg
import torch

import neula
from campaign.oracle import LeastSquares
from neula.algorithms.scaled_problems import ScaledProblems
from neula.algorithms.spectra.rank_revealing import MinimumNorm, minimum_norm
from neula.io.matrices import random_matrix

U64 = 2.0**-53


def deficient(m: int, n: int, rank: int, seed: int = 0) -> torch.Tensor:
    """Singular values 1 to 1/4 and exact products, as far as rounding allows."""
    left = random_matrix("arithmetic", m, rank, cond=2.0, seed=seed)
    return left @ random_matrix("arithmetic", rank, n, cond=2.0, seed=seed + 1)


def dependent(m: int, n: int, rank: int, seed: int, spread: float = 1.0) -> torch.Tensor:
    """Columns of about one size, of which some are sums of others exactly.

    With a spread the singular values fall from 1 to about its inverse, and then to zero.
    """
    rng = np.random.default_rng(seed)
    left = rng.integers(-9, 10, (m, rank)).astype(float)
    # Columns that differ by less and less: powers of two change no digit.
    weights = np.exp2(np.round(np.log2(np.geomspace(1.0, 1.0 / spread, rank))))
    left[:, 1:] = left[:, :1] + left[:, 1:] * weights[1:]
    return torch.from_numpy(left @ rng.integers(1, 4, (rank, n)).astype(float))


def solved(
    a: torch.Tensor, b: torch.Tensor, rcond: float, weights: torch.Tensor | None = None
) -> tuple[MinimumNorm, torch.Tensor]:
    """The solution, and its x in the units of A."""
    problems = ScaledProblems.from_arrays(a[None], b[None], weights, 0.0)
    found = minimum_norm(problems, rcond)
    return found, problems.unscale(found.y / problems.norms.mT)[0]


def norm(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dim=0)


def sizes(a: torch.Tensor) -> torch.Tensor:
    """Norms of columns, 1 for zero columns."""
    found = norm(a)
    return torch.where(found > 0, found, 1.0)


@pytest.mark.parametrize(
    ("m", "n", "rank"),
    [
        (1, 1, 1),
        (33, 33, 7),
        (257, 129, 128),
        (7, 33, 7),
        (300, 40, 1),
    ],
)
@pytest.mark.parametrize("k", [1, 3])
def test_solution_of_minimum_norm(m: int, n: int, rank: int, k: int) -> None:
    """The solution is that of NumPy's pseudoinverse, up to multiples of n u: A is well conditioned."""
    a, b = deficient(m, n, rank), random_matrix("normal", m, k, seed=2)
    before = a.clone(), b.clone()
    found, x = solved(a, b, rcond=max(m, n) * 2.0**-52)
    expected = torch.from_numpy(np.linalg.pinv(a.numpy(), rcond=1e-12) @ b.numpy())
    cond = 4.0 if rank > 1 else 1.0
    assert found.rank == rank
    assert found.y.shape == x.shape == (n, k)
    assert not found.doubt
    assert (norm(x - expected) <= 16 * (m + n) * U64 * cond**2 * (norm(expected) + norm(b))).all()
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])


@pytest.mark.parametrize("exponent", [0, 8, 30])
def test_units_of_the_columns_do_not_matter(exponent: int) -> None:
    """Columns of 1e-30 to 1e30: the rank is decided column-scaled, and x solves the problem. The residual is
    orthogonal to every column, each in its own unit, as it is after a backward stable solver.
    """
    a = deficient(60, 20, 13) * 10.0 ** torch.linspace(-exponent, exponent, 20, dtype=torch.float64)
    b = random_matrix("normal", 60, 2, seed=3)
    found, x = solved(a, b, rcond=1e-12)
    assert found.rank == 13
    gradient = (a / sizes(a)).T @ (b - a @ x)
    size = found.norm * (found.norm * norm(x * sizes(a)[:, None]) + norm(b))
    assert (norm(gradient) <= 16 * 80 * U64 * size).all()
    smallest = torch.linalg.lstsq(a / sizes(a), b, driver="gelsd", rcond=1e-12).solution
    optimum = norm(b - (a / sizes(a)) @ smallest)
    assert (norm(b - a @ x) <= optimum * (1 + 1e-8)).all()


@pytest.mark.parametrize("rcond", [1e-3, 1e-7, 1e-12])
def test_rank_by_rcond(rcond: float) -> None:
    """Singular values of B from 1 to 1e-10: those above rcond count."""
    a = random_matrix("geometric", 200, 101, cond=1e10)
    found, _ = solved(a, torch.ones(200, 1, dtype=torch.float64), rcond)
    s = torch.linalg.svdvals(a / sizes(a))
    assert found.rank == int((s > rcond * s[0]).sum())


@pytest.mark.parametrize(("m", "n"), [(5, 3), (3, 5), (1, 1)])
def test_a_zero_matrix_has_rank_zero(m: int, n: int) -> None:
    a = torch.zeros(m, n, dtype=torch.float64)
    found, x = solved(a, torch.ones(m, 2, dtype=torch.float64), 1e-12)
    assert (found.rank, found.norm, found.row_basis.shape) == (0, 0.0, (n, 0))
    assert torch.equal(x, torch.zeros(n, 2, dtype=torch.float64))
    assert (found.forward_error == 0).all()


@pytest.mark.parametrize("cond", [1e4, 1e8])
def test_refinement_makes_it_as_good_as_lapack(cond: float) -> None:
    """Of full rank, consistent, ill-conditioned: the error of SciPy's solution, within a small factor."""
    a = random_matrix("geometric", 300, 50, cond=cond)
    known = random_matrix("normal", 50, 1, seed=4)
    b = a @ known
    found, x = solved(a, b, 1e-15)
    assert found.rank == 50
    assert norm(x - known) <= 4 * 50 * U64 * cond * norm(known)
    lapack = scipy.linalg.lstsq(a.numpy(), b.numpy(), lapack_driver="gelsd")[0]
    residual, theirs = norm(b - a @ x), norm(b - a @ torch.from_numpy(lapack))
    assert residual <= theirs + 4 * 50 * U64 * norm(known)


@pytest.mark.parametrize("spread", [1.0, 1e6])
@pytest.mark.parametrize(("m", "n", "rank"), [(14, 7, 4), (7, 14, 4), (8, 8, 7), (10, 5, 1)])
@pytest.mark.parametrize("consistent", [False, True])
def test_exactly_dependent_columns(m: int, n: int, rank: int, spread: float, consistent: bool) -> None:
    """The forward error is a bound, and tiny: the condition of the part that counts costs no digits."""
    a = dependent(m, n, rank, seed=10 * n + rank, spread=spread)
    rng = np.random.default_rng(n)
    b = torch.from_numpy(rng.standard_normal((m, 2)))
    if consistent:
        b = a @ torch.from_numpy(rng.integers(-5, 6, (n, 2)).astype(float))
    judge = LeastSquares(a.numpy(), b.numpy(), rcond=1e-11)
    assert judge.ranks == (rank,)
    found, x = solved(a, b, rcond=1e-11)
    assert found.rank == rank
    errors = torch.from_numpy(judge.errors(x.numpy(), rank))
    assert (errors <= found.forward_error).all()
    # The singular values that count as zero are known to eps, which counts with the square of the condition.
    eps = 4 * (m + n) ** 0.5 * U64
    ratio = norm(found.residual) / (found.norm * norm(found.y))
    unknown = (found.condition * eps) ** 2 * (2 + (found.condition + 1) * ratio)
    assert (found.forward_error <= 1e-13 + 2 * unknown).all()


@pytest.mark.parametrize("exponent", [3, 9])
@pytest.mark.parametrize(("m", "n", "rank"), [(14, 7, 4), (7, 14, 4)])
def test_dependent_columns_in_different_units(m: int, n: int, rank: int, exponent: int) -> None:
    """The shortest x is that of the user's units: its bound grows with what they differ by, and holds."""
    units = torch.exp2(torch.linspace(-exponent, exponent, n).round().double())
    a = dependent(m, n, rank, seed=n) * units
    b = torch.from_numpy(np.random.default_rng(n).standard_normal((m, 2)))
    judge = LeastSquares(a.numpy(), b.numpy(), rcond=1e-11)
    found, x = solved(a, b, rcond=1e-11)
    errors = torch.from_numpy(judge.errors(x.numpy(), rank))
    assert found.rank == rank
    assert (errors <= found.forward_error).all()
    # Twice the ratio of the units: through M^+ and through what is orthogonal to M.
    assert (found.forward_error <= 1e-13 * 4.0 ** (2 * exponent)).all()


@pytest.mark.parametrize("spread", [0, 12, 30])
def test_zero_is_solved_exactly(spread: int) -> None:
    """Of any rank and in any units, where other solutions have bounds that are infinite."""
    generator = np.random.default_rng(spread)
    a = generator.integers(-3, 4, (6, 4)).astype(float)
    a[:, 3] = a[:, 0] - a[:, 1]
    result = neula.lstsq(a * 10.0 ** np.linspace(0, spread, 4), np.zeros(6))
    assert result.converged
    assert result.rank == 3
    assert not result.x.any()
    assert result.forward_error == 0


def test_weighted_rows_lose_nothing() -> None:
    """Rounded products with weights are no longer dependent; with what rounding lost they are."""
    a = dependent(12, 6, 4, seed=3, spread=1e3)
    rng = np.random.default_rng(5)
    b, weights = torch.from_numpy(rng.standard_normal((12, 1))), torch.from_numpy(rng.random(12) + 0.1)
    judge = LeastSquares(a.numpy(), b.numpy(), weights=weights.numpy(), rcond=1e-11)
    found, x = solved(a, b, 1e-11, weights)
    assert found.rank == 4
    assert judge.errors(x.numpy(), 4)[0] <= float(found.forward_error) <= 1e-13


@pytest.mark.parametrize("dropped", [1e-3, 1e-6, 1e-9])
def test_singular_values_that_are_dropped(dropped: float) -> None:
    """They turn the space of those that count, which is part of the bound."""
    rng = np.random.default_rng(1)
    u, v = (np.linalg.qr(rng.standard_normal((n, n)))[0] for n in (16, 6))
    a = torch.from_numpy((u[:, :6] * np.array([1.0, 0.7, 0.5, 0.3, dropped, dropped / 2])) @ v.T)
    b = torch.from_numpy(rng.standard_normal((16, 2)))
    rcond = 30 * dropped
    judge = LeastSquares(a.numpy(), b.numpy(), rcond=rcond)
    assert judge.ranks == (4,)
    found, x = solved(a, b, rcond)
    errors = torch.from_numpy(judge.errors(x.numpy(), 4))
    assert found.rank == 4
    assert not found.doubt
    assert (errors <= found.forward_error).all()
    assert (found.forward_error <= 1e-12).all()


@pytest.mark.parametrize("wide", [False, True])
def test_a_singular_value_at_rcond_is_doubtful(wide: bool) -> None:
    """Two unit columns with cosine c have singular values with ``s_2 / s_1 = sqrt((1 - c) / (1 + c))``."""
    c = 0.6
    a = torch.zeros(9, 2, dtype=torch.float64)
    a[:2] = torch.tensor([[1.0, c], [0.0, 0.8]], dtype=torch.float64)
    a = torch.cat([a, torch.zeros(9, 20)], 1) if wide else a
    b = torch.ones(9, 1, dtype=torch.float64)
    at, away = solved(a, b, 0.5)[0], solved(a, b, 0.49)[0]
    assert "too close to rcond = 5.00e-01" in at.doubt
    assert (away.rank, away.doubt) == (2, "")
