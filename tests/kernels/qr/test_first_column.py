"""The first column projected out of the others: the definition, and the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from tests.devices import KERNEL, normal

from neula.kernels.qr.first_column import ProjectedMatrices, with_first_column, without_first_column

U = 2.0**-53


class Ways(NamedTuple):
    without: Callable[[torch.Tensor, torch.Tensor], ProjectedMatrices]
    restored: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]


@pytest.fixture(params=["reference", KERNEL])
def ways(request: pytest.FixtureRequest) -> Ways:
    if request.param == "kernel":
        pytest.importorskip("triton")
    return Ways(*(getattr(x, request.param) for x in (without_first_column, with_first_column)))


@pytest.mark.parametrize(("m", "n"), [(1, 1), (5, 1), (70, 33)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_taken_out_is_put_back(
    ways: Ways, m: int, n: int, dtype: torch.dtype, transposed: bool
) -> None:
    a = (normal(3, m, 1) + 1e-3 * normal(3, m, n)).to(dtype)
    a = a.mT.contiguous().mT if transposed else a
    before = a.clone()
    work, multiples, vanished = ways.without(a, normal(m, n, dtype=torch.float32))
    assert torch.equal(a, before)
    assert not vanished.any()
    size = torch.linalg.matrix_norm(a.double())
    whole = work + work[:, :, :1] * multiples[:, None]
    assert (torch.linalg.matrix_norm(whole - a.double()) <= 4 * U * size).all()
    # What others have along the first one is rounding errors.
    along = (work[:, :, :1] * work[:, :, 1:]).sum(1).abs()
    assert (along <= 4 * m * U * size[:, None] ** 2).all()
    q, r = torch.linalg.qr(work)
    noise_below = r + 7.0 * torch.ones_like(r).tril(-1)
    r = ways.restored(noise_below.contiguous(), multiples, vanished, torch.float64)
    assert torch.equal(r, r.triu())
    assert (torch.linalg.matrix_norm(q @ r - a.double()) <= 8 * (n + m**0.5) * U * size).all()
    narrow = ways.restored(noise_below.contiguous(), multiples, vanished, torch.float32)
    assert torch.equal(narrow, r.float())


def test_columns_that_vanish_and_nan(ways: Ways) -> None:
    a, noise = normal(4, 70, 40), normal(70, 40, dtype=torch.float32)
    clean = ways.without(a, noise)
    a[1, :, [3, 39]] = 0
    a[2, :, 0] = 0
    a[3, 5, 7] = math.nan
    work, multiples, vanished = ways.without(a, noise)
    assert torch.equal(work[0], clean.a[0])
    assert vanished.nonzero().tolist() == [[1, 3], [1, 39], [2, 0]]
    assert torch.equal(work[1, :, [3, 39]], noise[:, [3, 39]].double())
    assert torch.equal(work[2, :, 0], noise[:, 0].double())
    assert torch.equal(work[2, :, 1:], a[2, :, 1:])
    assert not multiples[2].any()
    assert work[3, :, 7].isnan().any()
    assert torch.isfinite(work[3, :, :7]).all()
    r = ways.restored(normal(4, 40, 40), multiples, vanished, torch.float32)
    assert not r[1, :, [3, 39]].any()
    assert not r[2, :, 0].any()


def test_a_column_of_tiny_numbers_has_not_vanished(ways: Ways) -> None:
    a = normal(1, 20, 3)
    a[0, :, 1] = 0
    a[0, 4, 1] = 2.0**-1074
    assert not ways.without(a, normal(20, 3, dtype=torch.float32)).vanished.any()
