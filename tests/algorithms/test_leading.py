"""Leading columns of Cholesky factors that are not rounded, and solves that make good what others lack."""

from __future__ import annotations

import math

import pytest
import torch

from neula.algorithms.elimination.cholesky import cholesky
from neula.algorithms.elimination.cholesky_factor import CholeskyFactor
from neula.algorithms.triangular.inverted import InvertedBlocks
from neula.engines import EmulatedEngine

BLOCK = 64


def kernel_matrix(n: int, noise: float = 0.01) -> torch.Tensor:
    """``exp(-|x - y|^2)`` of points in three dimensions, and a multiple of the identity."""
    points = torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return torch.cdist(points, points).square_().neg_().exp_() + noise * torch.eye(n, dtype=torch.float64)


def definite(n: int) -> torch.Tensor:
    g = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    return g @ g.T / n + torch.eye(n, dtype=torch.float64)


def factorized(a: torch.Tensor, *, give_up: bool) -> CholeskyFactor:
    work = a.float().T.contiguous().T[None]
    found = cholesky(work, EmulatedEngine(format="fp16"), leaf=32, block=BLOCK, give_up=give_up)
    assert not found.order.any()
    lower = found.lower[0].tril()
    lost = None if found.leading is None else found.leading.lost(lower)
    return CholeskyFactor.from_factor(lower, torch.float32, 2 * BLOCK, lost)


def test_what_rounding_would_hide_is_kept() -> None:
    """``M^-1 A`` is as near to the identity as small eigenvalues need; without the columns it is not."""
    n, noise = 500, 0.01
    a = kernel_matrix(n, noise)
    gaps = []
    for give_up in (True, False):
        factor = factorized(a, give_up=give_up)
        assert (factor.lost is not None) == give_up
        gaps.append(float(torch.linalg.matrix_norm(torch.eye(n) - factor.solve(a), 2)))
    # The first block stands for nearly all of A: of the others no element is above 1/10, most far below.
    assert gaps[0] <= 2.0**-11 * math.sqrt(n) * 0.1 / noise
    assert gaps[0] <= gaps[1] / 3


def test_matrices_without_structure_are_rounded() -> None:
    assert factorized(definite(300), give_up=True).lost is None


@pytest.mark.parametrize(
    ("n", "width", "k"),
    [(300, 128, 100), (300, 128, 128), (257, 128, 1), (100, 128, 40), (300, 64, 100), (90, 0, 30)],
)
@pytest.mark.parametrize("columns", [1, 3])
def test_solves_with_what_was_lost(n: int, width: int, k: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(n)
    whole = torch.randn(n, n, dtype=torch.float64, generator=generator).tril() / n**0.5
    whole.diagonal().copy_(1 + whole.diagonal().abs())
    low = whole.half()
    low[:, :k] += 0.01  # anything: it is made good
    lost = (whole - low)[:, :k]
    low[:, k:], whole[:, k:] = whole[:, k:].half(), whole[:, k:].half().double()
    blocks = InvertedBlocks.from_factor(low, torch.float64, upper=False, width=width, lost=lost)
    b = torch.randn(n, columns, dtype=torch.float64, generator=generator)
    for solver, matrix in ((blocks, whole), (blocks.mH, whole.T)):
        x = solver.solve(b.clone())
        assert torch.linalg.vector_norm(matrix @ x - b) <= 1e-12 * torch.linalg.vector_norm(b)
