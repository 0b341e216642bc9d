"""Operands whose parts are kept, by kernel and by reference, against float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.kernels.products.test_gemm import DEVICE, HAS_GPU, bound, errors, uniform, wide

from neula.kernels.products.gemm import multiply_kept
from neula.kernels.products.kept import Kept, keep

Functions = tuple[Callable[..., Any], Callable[..., Any]]


@pytest.fixture(params=["reference", pytest.param("kernel", marks=[pytest.mark.gpu] if HAS_GPU else [])])
def functions(request: pytest.FixtureRequest) -> Functions:
    if request.param == "kernel":
        pytest.importorskip("triton")
    split, multiply = (getattr(x, request.param) for x in (keep, multiply_kept))
    return split, partial(multiply, alpha=-1.0, beta=1.0)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (70, 33, 64), (33, 70, 100)])
@pytest.mark.parametrize("transposed", [False, True])
def test_subtracts_a_product(m: int, n: int, k: int, transposed: bool, functions: Functions) -> None:
    split, subtract = functions
    x, y, c = uniform(m, k, 0), wide(n, k, 1, decades=2.0), uniform(m, n, 2)
    if transposed:
        x, c = x.T.contiguous().T, c.T.contiguous().T
    parts = []
    for each in (x, y):
        kept = Kept.empty(*each.shape, 1.5 * each.abs().amax(1))  # what no element exceeds will do
        split(each, kept)
        parts.append(kept)
    expected = c.double() - x.double() @ y.double().T
    before = c.clone()
    assert subtract(c, *parts) is c
    assert errors(
        c, torch.cat([x, before], 1), torch.cat([-y.T, torch.eye(n, device=DEVICE)])
    ).max() <= bound(k)
    assert (c - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_blocks_of_one_matrix(functions: Functions) -> None:
    """Split a block of columns at a time, multiplied by each other: the rest of the room is not touched."""
    split, subtract = functions
    x = uniform(96, 80, 3)
    kept = Kept.empty(96, 80, torch.ones(96, device=DEVICE))
    kept.parts.fill_(torch.nan)
    for k in (slice(0, 32), slice(32, 64)):
        split(x[k.start :, k], kept.block(slice(k.start, 96), k))
    assert kept.parts[:, :32, 32:].isnan().all()
    assert kept.parts[:, :, 64:].isnan().all()
    rows, columns, done = slice(64, 96), slice(64, 80), slice(0, 64)
    c = torch.zeros(32, 16, device=DEVICE)
    subtract(c, kept.block(rows, done), kept.block(columns, done))
    assert errors(-c, x[rows, done], x[columns, done].T).max() <= bound(64)


def test_what_is_not_finite_shows(functions: Functions) -> None:
    split, subtract = functions
    x = uniform(20, 16, 4)
    x[3, 5] = torch.nan
    kept = Kept.empty(20, 16, torch.ones(20, device=DEVICE))
    split(x, kept)
    c = subtract(torch.zeros(20, 20, device=DEVICE), kept, kept)
    assert c[3].isnan().all()
    assert c[:3, :3].isfinite().all()


def test_a_few_thread_blocks_go_from_tile_to_tile(
    functions: Functions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers, whatever is left to others."""
    _, subtract = functions
    if not HAS_GPU and subtract.func is not multiply_kept.reference:
        monkeypatch.setattr("neula.kernels.products.gemm.multiprocessors", lambda device: 3)
    x = uniform(300 if HAS_GPU else 140, 64, 5)
    kept = Kept.from_matrix(x)
    one, other = (torch.zeros(len(x), len(x), device=DEVICE) for _ in range(2))
    subtract(one, kept, kept, spare=0)
    units = torch.cuda.get_device_properties(DEVICE).multi_processor_count if HAS_GPU else 3
    subtract(other, kept, kept, spare=units - 2)
    assert torch.equal(one, other)


def test_a_product_is_rounded_as_it_is_stored(functions: Functions) -> None:
    _, subtract = functions
    x, y = Kept.from_matrix(uniform(70, 64, 6)), Kept.from_matrix(uniform(33, 64, 7))
    exact = subtract(torch.zeros(70, 33, device=DEVICE), x, y)
    room = torch.full((33, 70), torch.nan, dtype=torch.float16, device=DEVICE).T
    subtract(room, x, y, beta=0.0)
    assert torch.equal(room, exact.half())
