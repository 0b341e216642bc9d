"""Butterflies against the matrices that they stand for."""

from __future__ import annotations

import math

import pytest
import torch

from neula.algorithms.elimination.butterfly import Butterflied, Butterfly, TwoSided, padded
from neula.algorithms.elimination.factorization import library_lu
from neula.engines import EmulatedEngine

CPU = torch.device("cpu")


def dense(butterfly: Butterfly) -> torch.Tensor:
    """``W = diag(B1, B2) B`` as the papers define it."""
    outer, inner = butterfly.diagonals
    half = len(outer) // 2
    return torch.block_diag(single(inner[:half]), single(inner[half:])) @ single(outer)


def single(diagonal: torch.Tensor) -> torch.Tensor:
    r0, r1 = (torch.diag(d) for d in diagonal.chunk(2))
    return torch.cat([torch.cat([r0, r1], 1), torch.cat([r0, -r1], 1)])


@pytest.mark.parametrize("n", [4, 8, 12, 52])
@pytest.mark.parametrize("column_major", [False, True])
def test_applies_the_matrix(n: int, column_major: bool) -> None:
    butterfly = Butterfly.random(n, 3, CPU)
    w = dense(butterfly)
    x = torch.randn(n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for apply, matrix in ((butterfly.apply_, w), (butterfly.apply_transpose_, w.T)):
        work = x.T.contiguous().T if column_major else x.clone()
        assert apply(work) is work
        assert torch.allclose(work, matrix @ x, rtol=0, atol=1e-14)


@pytest.mark.parametrize("n", [4, 100])
def test_nearly_orthogonal(n: int) -> None:
    """Diagonals within ``exp(+-1/40)``: two levels leave the condition number below ``exp(1/10)``."""
    s = torch.linalg.svdvals(dense(Butterfly.random(n, 1, CPU)))
    assert s[0] / s[-1] <= math.exp(0.1)
    assert s[0] <= math.exp(0.05)


@pytest.mark.parametrize("n", range(1, 10))
def test_two_sided_transform_of_any_order(n: int) -> None:
    transform = TwoSided.random(n, CPU)
    a = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    order = padded(n)
    assert order % 4 == 0
    assert n <= order < n + 4
    work = torch.full((order, order), math.nan, dtype=torch.float64)
    work[:n, :n] = a
    bordered = torch.block_diag(a, torch.eye(order - n, dtype=torch.float64))
    expected = dense(transform.left).T @ bordered @ dense(transform.right)
    assert torch.allclose(transform.apply_(work), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("n", [1, 6, 8, 33])
def test_undone_in_the_solution(n: int) -> None:
    transform = TwoSided.random(n, CPU)
    a = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    work = torch.zeros(padded(n), padded(n), dtype=torch.float64)
    work[:n, :n] = a
    factors = Butterflied(library_lu(transform.apply_(work), EmulatedEngine()), transform)
    b = torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    before = b.clone()
    x = factors.solve(b)
    assert torch.equal(b, before)
    assert x.shape == (n, 3)
    bound = 100 * n * 2.0**-53 * float(torch.linalg.matrix_norm(a, math.inf) * x.abs().max() + b.abs().max())
    assert (a @ x - b).abs().max() <= bound
    assert torch.equal(factors.in_double().solve(b), x)
    assert factors.growth == factors.factors.growth


def test_zero_pivots_disappear() -> None:
    """The point of it: half of the leading minors of this matrix are zero, and none is afterwards."""
    n = 16
    blocks = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a = torch.block_diag(*blocks).roll(n // 2, 0)
    mixed = TwoSided.random(n, CPU).apply_(a.clone())

    def minors(matrix: torch.Tensor) -> list[float]:
        return [abs(float(torch.linalg.det(matrix[:k, :k]))) for k in range(1, n + 1)]

    assert minors(a)[:8] == [0.0] * 8
    assert min(minors(mixed)) > 1e-3
