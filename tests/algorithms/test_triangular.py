"""Solving with inverted diagonal blocks against substitution in double precision."""

from __future__ import annotations

import pytest
import torch

from neula.algorithms.spectra.condition import (
    solve_normal,
    solve_r,
    solve_rt,
)
from neula.algorithms.triangular.inverted import VECTORS
from neula.algorithms.triangular.triangular import LEAF, BlockTriangular
from neula.io.matrices import random_matrix


def triangle(n: int, dtype: torch.dtype = torch.float32, cond: float = 10.0) -> torch.Tensor:
    """R of a matrix, column-major as the recursion leaves it."""
    r = torch.linalg.qr(random_matrix("arithmetic", 2 * n, n, cond=cond, seed=3), mode="r")[1].to(dtype)
    return r.T.contiguous().T


@pytest.mark.parametrize("n", [1, 3, LEAF - 1, LEAF, LEAF + 1, 3 * LEAF + 5])
@pytest.mark.parametrize("k", [1, 2, VECTORS + 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_solves_are_backward_stable_up_to_the_condition_of_a_block(
    n: int, k: int, dtype: torch.dtype
) -> None:
    r = triangle(n, dtype)
    scales = 2.0 ** (torch.arange(n, dtype=torch.float64) % 5 - 2)
    blocks = BlockTriangular.from_factor(r, width=2 * LEAF).scaled(scales)
    x = torch.randn(n, k, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    full = r.double() / scales
    # An inverted block X of order w has |X R - I| <= w u |X| |R|, at most w u times its condition number, and
    # so has a product with it; blocks of R are no worse conditioned than R, whose condition number is 10.
    bound = 2 * 2 * LEAF * torch.finfo(dtype).eps * 10
    for found, matrix in ((solve_r(blocks, x), full), (solve_rt(blocks, x), full.T)):
        assert found.dtype == torch.float64
        assert (matrix @ found - x).norm() <= bound * x.norm()
    normal = solve_normal(blocks, x)
    assert (full.T @ (full @ normal) - x).norm() <= 10 * 16 * bound * x.norm()
    product = blocks.matmul(x)
    assert (product - full @ x).norm() <= n * torch.finfo(dtype).eps * full.norm() * x.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 2, 5])
def test_on_a_gpu_it_does_the_same_without_waiting(k: int) -> None:
    r, x = triangle(700).cuda(), torch.ones(700, k, dtype=torch.float64, device="cuda")
    r = r.T.contiguous().T
    blocks = BlockTriangular.from_factor(r, 256)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = blocks.solve(x), blocks.solve_transposed(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for solution, matrix in zip(found, (r.double(), r.double().T), strict=True):
        assert (matrix @ solution - x).norm() <= 10 * 2 * 256 * 2.0**-23 * x.norm()
