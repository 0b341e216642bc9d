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


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_residual_is_the_smallest_in_the_krylov_space(steps: int) -> None:
    a, b = system(30, 2)
    x, iterations = gmres(lambda z: a @ z, b, tolerance=0.0, max_iterations=steps)
    assert iterations == steps
    for column in range(2):
        powers = [b[:, column]]
        for _ in range(steps - 1):
            powers.append(a @ powers[-1])
        q = torch.linalg.qr(torch.stack(powers, 1))[0]
        best = torch.linalg.lstsq(a @ q, b[:, column : column + 1]).solution
        expected = torch.linalg.vector_norm(b[:, column] - (a @ q @ best)[:, 0])
        found = torch.linalg.vector_norm(b[:, column] - a @ x[:, column])
        assert found == pytest.approx(float(expected), rel=1e-10)


def test_right_hand_sides_do_not_mix() -> None:
    a, b = system(40, 3)
    together, _ = gmres(lambda z: a @ z, b, tolerance=1e-10, max_iterations=40)
    for j in range(3):
        alone, _ = gmres(lambda z: a @ z, b[:, j : j + 1], tolerance=1e-10, max_iterations=40)
        assert torch.allclose(together[:, j], alone[:, 0], rtol=0, atol=1e-8)


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


def test_single_equation() -> None:
    x, iterations = gmres(
        lambda z: 4 * z, torch.ones(1, 1, dtype=torch.float64), tolerance=1e-15, max_iterations=9
    )
    assert float(x) == 0.25
    assert iterations == 1


def test_gives_up_when_it_cannot_be_in_time() -> None:
    a = random_matrix("geometric", 200, 200, cond=1e8)
    b = torch.ones(200, 1, dtype=torch.float64)
    _, iterations = gmres(lambda z: a @ z, b, tolerance=1e-8, max_iterations=60)
    assert iterations <= HOPELESS_AFTER


def test_stops_at_nan() -> None:
    b = torch.ones(5, 1, dtype=torch.float64)
    assert gmres(lambda z: z * torch.nan, b, tolerance=1e-8, max_iterations=9)[1] == 1
