"""Gram-Schmidt of tiles into given places: as :func:`mgs` does it, once or twice, of taller tiles as well."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, KERNEL, variants

from neula.io.matrices import random_matrix
from neula.kernels.qr.mgs import mgs_into, tallest_tile

DTYPES = [torch.float32, torch.float64]

Into = Callable[..., None]


into = variants(mgs_into, "dispatch", KERNEL)


def geometric(batch: int, m: int, n: int, cond: float, dtype: torch.dtype) -> torch.Tensor:
    tiles = [random_matrix("geometric", m, n, cond=cond, seed=i) for i in range(batch)]
    return torch.stack(tiles).to(DEVICE, dtype)


def check(tiles: torch.Tensor, q: torch.Tensor, r: torch.Tensor, passes: int, growth: float) -> None:
    """Residual ``4 n u`` a pass, orthogonality ``4 (n + sqrt(m)) u`` times the condition of the last pass."""
    m, n = tiles.shape[-2:]
    u = torch.finfo(tiles.dtype).eps / 2
    assert torch.equal(r, r.triu())
    assert (r.diagonal(dim1=-2, dim2=-1) >= 0).all()
    a, q, r = tiles.double(), q.double(), r.double()
    residual = torch.linalg.matrix_norm(a - q @ r) / torch.linalg.matrix_norm(a)
    assert (residual <= passes * 4 * n * u).all()
    identity = torch.eye(n, dtype=torch.float64, device=q.device)
    assert (torch.linalg.matrix_norm(identity - q.mT @ q, 2) <= 4 * (n + math.sqrt(m)) * u * growth).all()


@pytest.mark.parametrize(("m", "n"), [(1, 1), (32, 32), (40, 17)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_once(into: Into, m: int, n: int, dtype: torch.dtype) -> None:
    tiles = geometric(3, m, n, 1e2, dtype)
    work, r = tiles.clone(), tiles.new_empty(3, n, n)
    into(work, work, r)
    check(tiles, work, r, 1, 1e2)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (32, 32), (40, 17)])
def test_twice_is_enough(into: Into, m: int, n: int) -> None:
    """A condition number of up to ``1 / (c u)`` is repaired by the second pass; 2 is that of the first Q."""
    tiles = geometric(3, m, n, 1e5, torch.float32)
    q, r = torch.empty_like(tiles), tiles.new_empty(3, n, n)
    into(tiles, q, r, twice=True)
    check(tiles, q, r, 2, 2.0)


def test_twice_in_float64() -> None:
    tiles = geometric(3, 60, 20, 1e12, torch.float64)
    q, r = torch.empty_like(tiles), tiles.new_empty(3, 20, 20)
    mgs_into(tiles, q, r, twice=True)
    check(tiles, q, r, 2, 2.0)


def test_columns_of_a_wider_matrix_and_blocks_of_its_r(into: Into) -> None:
    whole = geometric(2, 64, 50, 1e1, torch.float32)
    work, r = whole.clone(), torch.full((2, 50, 50), 7.0, device=DEVICE)
    part = slice(20, 45)
    into(work[:, :, part], work[:, :, part], r[:, part, part])
    check(whole[:, :, part], work[:, :, part], r[:, part, part], 1, 1e1)
    outside = torch.ones(50, 50, dtype=torch.bool, device=DEVICE)
    outside[part, part] = False
    assert (r[:, outside] == 7).all()
    others = [*range(20), *range(45, 50)]
    assert torch.equal(work[:, :, others], whole[:, :, others])


@pytest.mark.parametrize("where", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_the_tallest_tiles(where: str) -> None:
    assert (tallest_tile(torch.float32), tallest_tile(torch.float64)) == (1024, 256)
    for dtype in DTYPES:
        for m in (tallest_tile(dtype), tallest_tile(dtype) + 1):
            tiles = geometric(2, m, 32, 1e1, dtype).to("cpu" if where == "cpu" else DEVICE)
            q, r = torch.empty_like(tiles), tiles.new_empty(2, 32, 32)
            mgs_into(tiles, q, r)
            check(tiles, q, r, 1, 1e1)
