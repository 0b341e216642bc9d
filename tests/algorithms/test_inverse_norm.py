"""Norms of scaled inverses: a factor of three, below and above the order up to which they are explicit."""

from __future__ import annotations

import pytest
import torch

from neula.algorithms.spectra.inverse_norm import EXPLICIT, inverse_norm, norm_of, symmetric_inverse_norm
from neula.io.matrices import SPECTRA, random_matrix

FACTOR = 3.0
ORDERS = [1, 2, 20, EXPLICIT, EXPLICIT + 1, 150]


def weights(n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.rand(n, 1, generator=generator, dtype=torch.float64) + 0.1


def checked(a: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """The claims, for a stack of matrices or one."""
    norm, vector = inverse_norm(
        lambda x: torch.linalg.solve(a, x), lambda x: torch.linalg.solve(a.mT, x), left, right
    )
    scaled = left * torch.linalg.inv(a) * right.mT
    true = torch.linalg.matrix_norm(scaled, 2)
    slack = 1 + 1e-6
    assert norm.shape == true.shape
    assert vector.shape == left.shape
    if a.shape[-1] <= EXPLICIT:  # from above
        assert (norm >= true / slack).all()
        assert (norm <= FACTOR * true * slack).all()
    else:  # from below
        assert (norm <= true * slack).all()
        assert (norm >= true / FACTOR).all()
    assert torch.allclose(torch.linalg.vector_norm(vector, dim=-2), torch.ones_like(true)[..., None])
    shown = torch.linalg.vector_norm(scaled @ vector, dim=-2)[..., 0]
    # The longest column of an explicit inverse has at least the mean of the squares.
    part = a.shape[-1] ** -0.5 if a.shape[-1] <= EXPLICIT else 1 / FACTOR
    assert (shown >= part * true / slack).all()


@pytest.mark.parametrize("n", ORDERS)
@pytest.mark.parametrize("kind", [*SPECTRA, "normal"])
def test_within_a_factor_of_three(kind: str, n: int) -> None:
    a = random_matrix(kind, n, n, cond=1e5, seed=n)
    one = torch.ones(n, 1, dtype=torch.float64)
    checked(a, one, one)
    checked(a, weights(n, 1), weights(n, 2))


@pytest.mark.parametrize("n", [5, EXPLICIT + 1])
def test_a_batch(n: int) -> None:
    a = torch.stack([random_matrix("geometric", n, n, cond=c, seed=3) for c in (1.0, 1e2, 1e6)])
    left, right = (torch.stack([weights(n, seed + i) for i in range(3)]) for seed in (1, 7))
    checked(a, left, right)


@pytest.mark.parametrize("n", [30, 100])
def test_graded_matrices(n: int) -> None:
    """Rows over ten decades, and weights that take them out again."""
    rows = torch.logspace(0, -10, n, dtype=torch.float64)[:, None]
    a = rows * random_matrix("normal", n, n, seed=2)
    one = torch.ones(n, 1, dtype=torch.float64)
    checked(a, one, rows)
    checked(a, one, one)


@pytest.mark.parametrize("n", [30, 100])
@pytest.mark.parametrize("kind", [*SPECTRA, "normal"])
def test_norm_of_scaled_matrices(kind: str, n: int) -> None:
    """``||A D^-1||_2`` from below, within a factor of ten, for each matrix of a batch."""
    a = torch.stack([10.0**i * random_matrix(kind, n, n, cond=1e5, seed=i) for i in range(3)])
    columns = torch.stack([weights(n, i) for i in range(3)])
    x = weights(n, 5).expand(3, n, 1)
    norm, images = norm_of(a, columns, beside=x)
    true = torch.linalg.matrix_norm(a / columns.mT, 2)
    assert torch.allclose(images, a @ x, rtol=1e-12, atol=0)
    assert norm.shape == true.shape
    assert (norm >= true / 10).all()
    assert (norm <= true * (1 + 1e-6)).all()


@pytest.mark.parametrize("smallest", [0.5, 0.2, 1e-3, 1e-12])
@pytest.mark.parametrize("n", [20, 400])
@pytest.mark.parametrize("count", [2, 6])
def test_symmetric_ones_within_a_factor_of_three(n: int, count: int, smallest: float) -> None:
    """One eigenvalue apart from others, the worst case of what random vectors show, and all alike."""
    q = torch.linalg.qr(random_matrix("normal", n, n, seed=n)).Q
    values = torch.ones(n, dtype=torch.float64)
    for values[-1] in (smallest, 1.0):
        a = (q * values) @ q.T
        left, right = weights(n, 3), weights(n, 4)
        steps = symmetric_inverse_norm(left, right, count)
        try:
            sent = next(steps)
            while True:
                sent = steps.send(torch.linalg.solve(a, sent))
        except StopIteration as end:
            norm, vector = end.value
        scaled = left * torch.linalg.inv(a) * right.mT
        true = float(torch.linalg.matrix_norm(scaled, 2))
        assert true / FACTOR <= norm <= max(1.0, 2 * n**0.125 / FACTOR) * true * (1 + 1e-6)
        assert vector.shape == left.shape
        assert float(torch.linalg.vector_norm(vector)) == pytest.approx(1.0)
        assert float(torch.linalg.vector_norm(scaled @ vector)) >= true / FACTOR


@pytest.mark.parametrize("n", [3, EXPLICIT + 1])
def test_what_is_not_finite_shows(n: int) -> None:
    one = torch.ones(n, 1, dtype=torch.float64)
    norm, _ = inverse_norm(lambda x: x * torch.nan, lambda x: x * torch.nan, one, one)
    assert not torch.isfinite(norm)
