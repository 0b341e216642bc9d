"""GMRES against what it minimizes."""

from __future__ import annotations

import pytest
import torch

from neula.algorithms.krylov.gmres import HOPELESS_AFTER, gmres
from neula.io.matrices import random_matrix


def system(n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix with eigenvalues near 1, and right-hand sides."""
    generator = torch.Generator().manual_seed(seed)
    perturbation = torch.randn(n, n, dtype=torch.float64, generator=generator) / n**0.5
    return torch.eye(n, dtype=torch.float64) + 0.4 * perturbation, torch.randn(
        n, k, dtype=torch.float64, generator=generator
    )


def residuals(a: torch.Tensor, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(b - a @ x, dim=0) / torch.linalg.vector_norm(b, dim=0)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-6, 1e-12])
def test_reaches_the_tolerance_and_not_much_more(k: int, tolerance: float) -> None:
    a, b = system(60, k)
    x, iterations = gmres(lambda z: a @ z, b, tolerance=tolerance, max_iterations=60)
    assert residuals(a, x, b).max() <= 1.01 * tolerance
    _, fewer = gmres(lambda z: a @ z, b, tolerance=100 * tolerance, max_iterations=60)
    assert fewer < iterations < 60


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_residuals_are_the_smallest_in_the_space_of_all(steps: int, k: int) -> None:
    a, b = system(30, k)
    x, iterations = gmres(lambda z: a @ z, b, tolerance=0.0, max_iterations=steps)
    assert iterations == steps
    q = torch.linalg.qr(b)[0]
    for _ in range(steps - 1):
        q = torch.linalg.qr(torch.cat([q, a @ q[:, -k:]], 1))[0]
    expected = b - a @ q @ torch.linalg.lstsq(a @ q, b).solution
    norm = torch.linalg.vector_norm
    assert torch.allclose(norm(b - a @ x, dim=0), norm(expected, dim=0), rtol=1e-10, atol=0)


def test_right_hand_sides_share_what_they_find() -> None:
    """Twenty directions in which A is far from the identity cost one of them twenty iterations."""
    a, b = system(200, 4)
    a = torch.eye(200, dtype=torch.float64) + (a - torch.eye(200, dtype=torch.float64)) / 20
    far = torch.linalg.qr(
        torch.randn(200, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    )[0]
    a += far @ torch.diag(torch.arange(1.0, 21.0, dtype=torch.float64)) @ far.T
    together, iterations = gmres(lambda z: a @ z, b, tolerance=1e-10, max_iterations=100)
    alone = [gmres(lambda z: a @ z, b[:, j : j + 1], tolerance=1e-10, max_iterations=100) for j in range(4)]
    assert iterations <= 0.6 * min(each for _, each in alone)
    exact = torch.linalg.solve(a, b)
    bound = 1e-10 * torch.linalg.cond(a)
    assert (residuals(exact, torch.eye(4, dtype=torch.float64), together) <= bound).all()


def test_each_right_hand_side_has_its_own_tolerance() -> None:
    a, b = system(60, 2)
    aims = torch.tensor([1e-2, 1e-8], dtype=torch.float64)
    x, iterations = gmres(lambda z: a @ z, b, tolerance=aims, max_iterations=60)
    assert (residuals(a, x, b) <= 1.01 * aims).all()
    _, fewer = gmres(lambda z: a @ z, b, tolerance=aims.flip(0).clamp_min(1e-2), max_iterations=60)
    assert fewer < iterations


@pytest.mark.parametrize("difference", [0.0, 1e-12, 1e-6, 1e-2])
def test_right_hand_sides_that_depend_on_one_another(difference: float) -> None:
    """For a difference of 1e-12 the remaining residual is below the rounding errors of half of the digits."""
    a, b = system(50, 3)
    b[:, 2] = b[:, 0] - 2 * b[:, 1] + difference * b[:, 2]
    x, iterations = gmres(lambda z: a @ z, b, tolerance=1e-11, max_iterations=50)
    assert iterations < 50
    assert residuals(a, x, b).max() <= 1e-8 if 0 < difference < 1e-8 else 1.01e-11


def test_krylov_spaces_that_end_early() -> None:
    """A zero column, an eigenvector and a general vector together: nothing is divided by zero."""
    a = torch.diag(torch.arange(1.0, 9.0, dtype=torch.float64))
    b = torch.zeros(8, 3, dtype=torch.float64)
    b[2, 1] = 5.0
    b[:, 2] = 1.0
    x, iterations = gmres(lambda z: a @ z, b, tolerance=1e-13, max_iterations=50)
    assert iterations <= 8
    assert torch.allclose(a @ x, b, rtol=0, atol=1e-12)
    assert (x[:, 0] == 0).all()


def test_gives_up_when_it_cannot_be_in_time() -> None:
    a = random_matrix("geometric", 200, 200, cond=1e8)
    b = torch.ones(200, 1, dtype=torch.float64)
    _, iterations = gmres(lambda z: a @ z, b, tolerance=1e-8, max_iterations=60)
    assert iterations <= HOPELESS_AFTER


def test_goes_on_where_residuals_fall_late() -> None:
    """Some singular values far from one are done with first, one an iteration; all others are close to it."""
    n, far = 200, HOPELESS_AFTER - 2
    a = torch.diag(1 + 0.1 * random_matrix("uniform", n, 1)[:, 0])
    a.diagonal()[:far] = 10.0 ** torch.linspace(1, 4, far)
    b = torch.ones(n, 1, dtype=torch.float64)
    x, iterations = gmres(lambda z: a @ z, b, tolerance=1e-12, max_iterations=50)
    assert HOPELESS_AFTER < iterations < 50
    assert float((b - a @ x).norm() / b.norm()) <= 1e-11
