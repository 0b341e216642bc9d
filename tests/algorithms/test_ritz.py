"""Orthonormal blocks on a CPU beside their definition."""

from __future__ import annotations

import pytest
import torch
from tests.matrices import normal

from neula.algorithms.spectra.ritz import orthonormal
from neula.engines import CpuEngine

M, WIDTH = 700, 24


def unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("kind", ["normal", "parallel", "graded", "duplicates", "zero", "tiny"])
def test_blocks_are_orthonormal_whatever_their_rank(kind: str, by_rows: bool, dtype: torch.dtype) -> None:
    x = normal(M, WIDTH, seed=1)
    if kind == "parallel":
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
    engine = CpuEngine("cpu", "fp32" if dtype == torch.float32 else "fp64")
    q, r = orthonormal(x if by_rows else x.T.contiguous().T, engine)
    wide = q.double()
    loss = torch.linalg.matrix_norm(wide.T @ wide - torch.eye(WIDTH))
    assert float(loss) <= 100 * WIDTH * u
    norms = torch.linalg.vector_norm(x.double(), dim=0)
    left = torch.linalg.vector_norm(wide @ r.double() - x.double(), dim=0)
    assert bool((left <= 100 * WIDTH * u * norms).all())  # column by column, as with reflections
