"""Problems bordered to a shape of a grid have the solutions and the evidence of those that were given."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import neula
from neula.engines import CpuEngine
from neula.pipeline.batches import LEAST_COLUMNS, LEAST_ROWS, _on_the_grid


class Bordering(CpuEngine):
    """A CPU that borders, as a GPU does."""

    tuning = replace(CpuEngine("cpu").tuning, bordered=10**9)


ENGINE = Bordering("cpu")


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 40, 41, 500, 511, 512, 513, 2000, 10**6 + 1])
def test_a_border_adds_less_than_a_quarter(size: int) -> None:
    found = _on_the_grid(size, LEAST_COLUMNS)
    assert size <= found <= size + max(LEAST_COLUMNS - 1, size / 4)
    assert _on_the_grid(found, LEAST_COLUMNS) == found


def test_few_shapes_serve_many() -> None:
    rows = {_on_the_grid(m, LEAST_ROWS) for m in range(1800, 2200)}
    columns = {_on_the_grid(n, LEAST_COLUMNS) for n in range(450, 550)}
    assert len(rows) * len(columns) <= 9


@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 2), (33, 9), (100, 41), (64, 64), (65, 65), (700, 3)])
@pytest.mark.parametrize("k", [None, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_solutions_and_evidence_are_the_same(m: int, n: int, k: int | None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(m)
    a = torch.randn(m, n, generator=generator, dtype=dtype)
    b = torch.randn(m, *(() if k is None else (k,)), generator=generator, dtype=dtype)
    found, expected = neula.lstsq(a, b, engine=ENGINE), neula.lstsq(a, b, engine="cpu")
    assert found.converged
    assert found.x.shape == expected.x.shape
    assert found.rank == expected.rank == n
    # Schatten norms of a bordered matrix are larger by the fourth root of the columns it has more, at most.
    assert 1 / 2 <= found.condition / expected.condition <= 2
    error = (found.x - expected.x).norm() / expected.x.norm()
    assert float(error) <= max(found.forward_error + expected.forward_error, 2 * torch.finfo(dtype).eps)
    noise = 100 * torch.finfo(dtype).eps * float(b.norm())
    np.testing.assert_allclose(found.residual_norm, expected.residual_norm, atol=noise)


@pytest.mark.parametrize("scale", [1e-300, 1e-9, 1e9, 1e300])
def test_the_border_is_in_units_of_no_one(scale: float) -> None:
    a = torch.from_numpy(np.vander(np.linspace(0, 1, 50), 7)) * scale
    b = a.sum(1)
    assert torch.allclose(neula.lstsq(a, b, engine=ENGINE).x, torch.ones(7, dtype=torch.float64), rtol=1e-8)


def test_a_matrix_of_deficient_rank_goes_on() -> None:
    a = torch.ones(60, 20, dtype=torch.float64)
    found = neula.lstsq(a, torch.arange(60.0, dtype=torch.float64), engine=ENGINE)
    assert found.rank == 1
    assert torch.allclose(found.x, torch.full((20,), 29.5 / 20, dtype=torch.float64))
