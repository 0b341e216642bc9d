"""Blocks and Ritz triplets on a CPU beside their definitions."""

from __future__ import annotations

import pytest
import torch

from neula.algorithms.spectra.ritz import REFLECTED, block_on_host, ritz_on_host, ritz_triplets
from neula.certificates.low_rank import beside, largest_beyond, random_vectors
from neula.engines import CpuEngine

M, N, WIDTH = 700, 300, 24


def normal(m: int, n: int, seed: int) -> torch.Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("kind", ["normal", "parallel", "graded", "duplicates", "zero", "tiny"])
def test_blocks_are_orthonormal_whatever_their_rank(kind: str, by_rows: bool, dtype: torch.dtype) -> None:
    x = normal(M, WIDTH, seed=1)
    assert x.numel() * WIDTH > REFLECTED  # by Cholesky QR
    if kind == "parallel":  # a condition number that takes two passes in either precision
        x += 1e5
    elif kind == "graded":
        x *= 10.0 ** -torch.arange(WIDTH)
    elif kind == "duplicates":
        x[:, WIDTH // 2 :] = x[:, : WIDTH // 2]
    elif kind == "zero":
        x.zero_()
    elif kind == "tiny":
        x *= 1e-30
    x = x.to(dtype)
    u = unit(dtype)
    q, r = block_on_host(x if by_rows else x.T.contiguous().T, 16 * u)
    wide = q.double()
    loss = torch.linalg.matrix_norm(wide.T @ wide - torch.eye(WIDTH))
    assert float(loss) <= 100 * WIDTH * u
    norms = torch.linalg.vector_norm(x.double(), dim=0)
    left = torch.linalg.vector_norm(wide @ r.double() - x.double(), dim=0)
    assert bool((left <= 100 * WIDTH * u * norms).all())  # column by column, as with reflections


@pytest.mark.parametrize("loss", [0.1, 2e-15])
def test_nothing_more_is_done_for_a_block_that_is_only_multiplied(loss: float) -> None:
    x = normal(M, WIDTH, seed=2) @ torch.diag(10.0 ** -torch.linspace(0, 6, WIDTH)).double()
    x = x @ torch.linalg.qr(normal(WIDTH, WIDTH, seed=3)).Q
    q, _ = block_on_host(x, loss)
    assert float((q.T @ q - torch.eye(WIDTH)).abs().max()) <= loss


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_triplets_and_what_is_carried_along(dtype: torch.dtype, by_rows: bool) -> None:
    a = (normal(M, N, seed=4) * 0.9 ** torch.arange(N)).to(dtype)
    a = a if by_rows else a.T.contiguous().T
    block, g = normal(N, WIDTH, seed=5).to(dtype), random_vectors(N, dtype, a.device)
    engine, u = CpuEngine("cpu", "fp32" if dtype == torch.float32 else "fp64"), unit(dtype)
    found, other = ritz_on_host(a, block, engine, a @ g), ritz_triplets(a, block, engine)
    noise = 100 * WIDTH * u * float(torch.linalg.matrix_norm(a.double()))
    torch.testing.assert_close(found.s, other.s, rtol=0, atol=noise)
    rest = (a.T @ found.u - found.v * found.s.to(dtype)).double()
    size = float(torch.linalg.matrix_norm(rest))
    torch.testing.assert_close(found.rest, rest.T @ rest, rtol=0, atol=2 * noise * size + noise**2)
    assert max(found.loss, other.loss) <= 100 * u
    across = torch.linalg.matrix_norm(found.v.double().T @ rest, 2)
    assert float(across) <= found.rounding + noise
    assert found.rounding <= noise
    assert found.carried is not None
    image, norms = beside(found.u, a @ g, engine), [torch.linalg.matrix_norm(x.double()) for x in (g, a)]
    assert float((found.carried[0] - image).norm()) <= noise * norms[0]
    assert float((found.carried[1] - a.T @ image).norm()) <= noise * norms[0] * norms[1]
    both = [largest_beyond(a, found.u, found.v, 1e-9, 1.0, engine, carried=x) for x in (found.carried, None)]
    assert both[0].bound == pytest.approx(both[1].bound, rel=1e-2)
    assert both[0].size == pytest.approx(both[1].size, rel=1e-2)
