"""Blocks that are copied to a GPU while others are worked on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import neula
from neula.io.sources import row_blocks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["numpy", "read-only", "pageable", "pinned", "float32"])
def test_solutions(rng: np.random.Generator, kind: str) -> None:
    """Of more than ten blocks, from every kind of memory; x lies where b does."""
    m, n = 300_000, 1200
    a = rng.standard_normal((m, n), dtype=np.float32)
    a = a if kind == "float32" else a.astype(np.float64)
    x = rng.standard_normal(n)
    b = a @ x.astype(a.dtype)
    given: Any = a
    if kind == "read-only":
        given.flags.writeable = False
    elif kind in ("pageable", "pinned"):
        given = torch.from_numpy(a)
        given = given.pin_memory() if kind == "pinned" else given
    result = neula.lstsq(row_blocks(given), torch.from_numpy(b).cuda())
    assert result.converged
    assert result.engine == "cuda"
    assert result.x.is_cuda
    assert result.passes == 2
    size = np.linalg.norm(x)
    slack = 1e-4 if kind == "float32" else 1e-12  # b is rounded
    assert np.linalg.norm(result.x.cpu().numpy() - x) <= (result.forward_error + slack) * size
    assert neula.lstsq(row_blocks(given), b, engine="cuda").converged


def test_other_ways(rng: np.random.Generator) -> None:
    """Dependent columns, singular values, a fit that is held open."""
    a = rng.standard_normal((200_000, 300))
    a[:, 7] = a[:, 8]
    b = rng.standard_normal(200_000)
    result = neula.lstsq(row_blocks(a), b, engine="cuda", damp=0.0)
    assert (result.rank, result.passes, result.converged) == (299, 3, True)
    found = neula.svd_lowrank(row_blocks(a), rank=5, engine="cuda")
    assert found.converged
    assert np.allclose(found.s, torch.linalg.svdvals(torch.from_numpy(a).cuda())[:5].cpu(), rtol=1e-12)
    fit = neula.LeastSquares(300, engine="cuda")
    fit.update(row_blocks(a[:150_000]), b[:150_000])
    fit.update(torch.from_numpy(a[150_000:]).cuda(), torch.from_numpy(b[150_000:]).cuda())
    assert fit.solve(damp=1.0).converged


def test_faults(rng: np.random.Generator) -> None:
    a = rng.standard_normal((300_000, 600))
    a[299_000, 5] = np.nan
    with pytest.raises(ValueError, match=r"A\[299000, 5\] is nan"):
        neula.lstsq(row_blocks(a), np.ones(300_000), engine="cuda")
