"""Minimum-norm solutions against the pseudoinverse, and ranks that do not depend on units."""

import numpy as np
import pytest
import scipy.linalg
import torch

from neula.algorithms.rank_revealing import minimum_norm
from neula.algorithms.scaling import power_of_two_scales
from neula.matrices import random_matrix

U64 = 2.0**-53


def deficient(m: int, n: int, rank: int, seed: int = 0) -> torch.Tensor:
    """Singular values 1 to 1/4 and exact products, as far as rounding allows."""
    left = random_matrix("arithmetic", m, rank, cond=2.0, seed=seed)
    return left @ random_matrix("arithmetic", rank, n, cond=2.0, seed=seed + 1)


def scales_of(a: torch.Tensor) -> torch.Tensor:
    return power_of_two_scales(a.abs().max(0).values)


def norm(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dim=0)


@pytest.mark.parametrize(
    ("m", "n", "rank"),
    [
        (1, 1, 1),
        (300, 1, 1),
        (33, 33, 33),
        (33, 33, 7),
        (257, 129, 128),
        (7, 33, 7),
        (7, 33, 3),
        (300, 40, 1),
    ],
)
@pytest.mark.parametrize("k", [1, 3])
def test_solution_of_minimum_norm(m: int, n: int, rank: int, k: int) -> None:
    """That of NumPy's pseudoinverse; a well-conditioned problem, so both err by a multiple of n u."""
    a, b = deficient(m, n, rank), random_matrix("normal", m, k, seed=2)
    before = a.clone(), b.clone()
    found = minimum_norm(a, b, scales_of(a), rcond=max(m, n) * 2.0**-52)
    expected = torch.from_numpy(np.linalg.pinv(a.numpy(), rcond=1e-12) @ b.numpy())
    cond = 4.0 if rank > 1 else 1.0
    assert found.rank == rank
    assert found.x.shape == (n, k)
    assert (norm(found.x - expected) <= 16 * (m + n) * U64 * cond**2 * (norm(expected) + norm(b))).all()
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])


@pytest.mark.parametrize(("m", "n", "rank"), [(60, 20, 20), (60, 20, 13), (20, 60, 11)])
def test_basis_and_norm(m: int, n: int, rank: int) -> None:
    a = deficient(m, n, rank)
    scales = scales_of(a)
    found = minimum_norm(a, torch.ones(m, 1, dtype=torch.float64), scales, rcond=1e-12)
    basis = found.range_basis
    assert basis.shape == (m, rank)
    identity = torch.eye(rank, dtype=torch.float64)
    assert torch.linalg.matrix_norm(basis.T @ basis - identity) <= 16 * m * U64
    assert torch.linalg.matrix_norm(a - basis @ (basis.T @ a)) <= 16 * m * U64 * torch.linalg.matrix_norm(a)
    assert found.norm == pytest.approx(float(torch.linalg.matrix_norm(a * scales, 2)), rel=16 * n * U64)


@pytest.mark.parametrize("exponent", [0, 4, 8, 12, 30])
def test_units_of_the_columns_do_not_matter(exponent: int) -> None:
    """Columns of 1e-30 to 1e30: the rank is decided column-scaled, and x solves the problem. The residual is
    orthogonal to every column, each in its own unit, as it is after a backward stable solver.
    """
    a = deficient(60, 20, 13) * 10.0 ** torch.linspace(-exponent, exponent, 20, dtype=torch.float64)
    b = random_matrix("normal", 60, 2, seed=3)
    scales = scales_of(a)
    found = minimum_norm(a, b, scales, rcond=1e-12)
    assert found.rank == 13
    gradient = (a * scales).T @ (b - a @ found.x)
    size = found.norm * (found.norm * norm(found.x / scales[:, None]) + norm(b))
    assert (norm(gradient) <= 16 * 80 * U64 * size).all()
    smallest = torch.linalg.lstsq(a * scales, b, driver="gelsd", rcond=1e-12).solution
    optimum = norm(b - (a * scales) @ smallest)
    assert (norm(b - a @ found.x) <= optimum * (1 + 1e-8)).all()


@pytest.mark.parametrize("spread", [1.0, 1e3, 1e6])
def test_minimum_norm_in_the_users_units(spread: float) -> None:
    """Two columns in different units describe the same direction: the one in larger numbers is used most."""
    a = torch.tensor([[1.0, spread], [1.0, spread], [1.0, spread]], dtype=torch.float64)
    found = minimum_norm(a, torch.ones(3, 1, dtype=torch.float64), scales_of(a), rcond=1e-12)
    expected = torch.tensor([[1.0], [spread]], dtype=torch.float64) / (1 + spread**2)
    assert found.rank == 1
    assert norm(found.x - expected) <= 100 * U64 * norm(expected)


@pytest.mark.parametrize("rcond", [1e-3, 1e-7, 1e-12])
def test_rank_by_rcond(rcond: float) -> None:
    """Geometric singular values from 1 to 1e-10, ten of them a decade: those above rcond count."""
    a = random_matrix("geometric", 200, 101, cond=1e10)
    found = minimum_norm(a, torch.ones(200, 1, dtype=torch.float64), torch.ones(101).double(), rcond)
    s = torch.linalg.svdvals(a)
    assert found.rank == int((s > rcond * s[0]).sum())


def test_rcond_zero_keeps_everything() -> None:
    a = random_matrix("geometric", 50, 20, cond=1e14)
    assert minimum_norm(a, torch.ones(50, 1).double(), torch.ones(20).double(), 0.0).rank == 20


@pytest.mark.parametrize(("m", "n"), [(5, 3), (3, 5), (1, 1)])
def test_a_zero_matrix_has_rank_zero(m: int, n: int) -> None:
    a = torch.zeros(m, n, dtype=torch.float64)
    found = minimum_norm(a, torch.ones(m, 2, dtype=torch.float64), scales_of(a), 1e-12)
    assert (found.rank, found.norm, found.range_basis.shape) == (0, 0.0, (m, 0))
    assert torch.equal(found.x, torch.zeros(n, 2, dtype=torch.float64))


def test_zero_columns_get_zero_coefficients() -> None:
    a = random_matrix("normal", 60, 10)
    a[:, [0, 4, 9]] = 0
    found = minimum_norm(a, random_matrix("normal", 60, 2, seed=1), scales_of(a), 1e-12)
    assert found.rank == 7
    assert (found.x[[0, 4, 9]].abs() <= 100 * U64 * found.x.abs().max()).all()


@pytest.mark.parametrize("cond", [1e4, 1e8])
def test_refinement_makes_it_as_good_as_lapack(cond: float) -> None:
    """Of full rank, consistent, ill-conditioned: the error of SciPy's solution, within a small factor."""
    a = random_matrix("geometric", 300, 50, cond=cond)
    known = random_matrix("normal", 50, 1, seed=4)
    b = a @ known
    found = minimum_norm(a, b, scales_of(a), 1e-15)
    assert found.rank == 50
    assert norm(found.x - known) <= 4 * 50 * U64 * cond * norm(known)
    lapack = scipy.linalg.lstsq(a.numpy(), b.numpy(), lapack_driver="gelsd")[0]
    residual, theirs = norm(b - a @ found.x), norm(b - a @ torch.from_numpy(lapack))
    assert residual <= theirs + 4 * 50 * U64 * norm(known)
